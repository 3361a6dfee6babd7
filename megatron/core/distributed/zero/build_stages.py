"""Choose the ZeRO stage of each set of parameters, and lay out its buffer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import nn

from megatron.core.distributed.communication import Mesh
from megatron.core.distributed.distributed_data_parallel_config import (
    DistributedDataParallelConfig,
    bucket_numel,
)
from megatron.core.distributed.flat_params import FlatParams
from megatron.core.distributed.model_parameters import Unit, names_in_model
from megatron.core.distributed.sharding_arithmetic import plan_buffer
from megatron.core.distributed.zero.gathered_params import GatheredParams, gathered_params
from megatron.core.distributed.zero.sharded_params import ShardedParams
from megatron.core.distributed.zero.stage import ReductionPolicy, ZeroStage
from megatron.core.distributed.zero.stage1 import ParamAndGradBuffer
from megatron.core.distributed.zero.stage2 import Zero2Buffer
from megatron.core.distributed.zero.stage3 import Zero3Buffer
from megatron.core.low_precision.quantized_linear import QuantizedLinear
from megatron.core.parameters.initialization import fill_deferred_weights
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.transformer.low_precision_layers import weights_of_one_scale
from megatron.core.transformer.moe.grouped_linear import GroupedLinear

_TAGS_PER_BUFFER = 1 << 16

Named = list[tuple[str, nn.Parameter]]


def build_stages(
    module: nn.Module,
    config: DistributedDataParallelConfig,
    units: Sequence[Unit],
    *,
    mesh_of: Callable[[bool], Mesh],
    policy_of: Callable[[Mesh], ReductionPolicy],
    separate: Collection[nn.Parameter],
    disable_bucketing: bool,
    is_exact: bool = False,
) -> list[ZeroStage]:
    """Return one buffer for each dtype, and for dense and expert parameters.

    Args:
        units: gathered by stage 3; empty with other stages.
        mesh_of: is_expert -> the ranks that hold copies.
        policy_of: mesh -> how its ranks sum gradients.
        separate: parameters with buckets of their own.
        is_exact: gradients are exact sums; see `parameters.exact_sum`.
    """
    unit_of = {p: number for number, unit in enumerate(units) for p in unit.parameters}
    single_bucket_units = {number for number, unit in enumerate(units) if unit.is_layer}
    on_host = config.overlap_cpu_optimizer_d2h_h2d
    leaves_device = config.offloads_parameters or on_host
    stages: list[ZeroStage] = []
    quantized = _fp8_gathered(module, config)
    for (dtype, is_expert, _), parameters in _by_kind(module, unit_of, quantized).items():
        mesh = mesh_of(is_expert)
        policy, grad_dtype = policy_of(mesh), torch.float32 if config.grad_reduce_in_fp32 else dtype
        if is_exact:
            grad_dtype = torch.float64
            for _, parameter in parameters:
                parameter.grad_dtype = None
        shards_gradients = config.shards_gradients and (mesh.shard_size > 1 or leaves_device)
        numels, device = [p.numel() for _, p in parameters], parameters[0][1].device
        bucketed = partial(bucket_numel, config, num_ranks=mesh.size, device=device)
        plan = plan_buffer(
            numels,
            bucket_numel=None if disable_bucketing else bucketed(sum(numels)),
            num_shards=mesh.size,
            separate={i for i, (_, p) in enumerate(parameters) if p in separate},
            separate_numel=None if disable_bucketing else bucketed(None),
            units=[unit_of[p] for _, p in parameters] if units and shards_gradients else None,
            single_bucket_units=single_bucket_units,
        )
        flat = FlatParams(
            parameters,
            plan,
            mesh,
            tag=len(stages) * _TAGS_PER_BUFFER,
            quantized=[quantized[p] for _, p in parameters if p in quantized],
        )
        if not shards_gradients:
            fill_deferred_weights(module, flat.parameters)
            stages.append(ParamAndGradBuffer(flat, policy, grad_dtype=grad_dtype))
            continue
        params: GatheredParams | ShardedParams
        kind: type[Zero2Buffer]
        if units:
            path, is_on_host = config.param_offload_path, config.param_cpu_offload
            params, kind = ShardedParams(flat, module, path, is_on_host), Zero3Buffer
        else:
            params, kind = gathered_params(flat, is_updated_on_host=on_host), Zero2Buffer
        stages.append(kind(flat, params, policy, grad_dtype=grad_dtype, sums_on_host=on_host))
    return stages


def _fp8_gathered(
    module: nn.Module, config: DistributedDataParallelConfig
) -> dict[nn.Parameter, QuantizedLinear]:
    """Return the bf16 parameters that are gathered in FP8, with their products.

    fp16 has less range than scaled E4M3 numbers, and fp32 parameters are their own main weights.
    """
    if not config.gathers_params_in_fp8:
        return {}
    found = weights_of_one_scale(module)
    return {p: quantized for p, quantized in found.items() if p.dtype == torch.bfloat16}


def _by_kind(
    module: nn.Module,
    unit_of: dict[nn.Parameter, int],
    quantized: Collection[nn.Parameter],
) -> dict[tuple[torch.dtype, bool, bool], Named]:
    """Return (dtype, is_expert, is gathered in FP8) -> trained parameters.

    They are in the order of their units, if there are units. A parameter without elements is in no
    buffer, because there is nothing to reduce or to update. Parameters of a grouped layer are
    in reverse: a buffer holds the last parameter first, and products read experts in order.
    """
    names = names_in_model(module)
    name_of = {p: names[name] for name, p in module.named_parameters()}
    kinds: dict[tuple[torch.dtype, bool, bool], Named] = {}
    for parameter in unit_of or name_of:
        if parameter.requires_grad and parameter.numel():
            is_expert = get_param_meta(parameter).is_expert
            kind = (parameter.dtype, is_expert, parameter in quantized)
            kinds.setdefault(kind, []).append((name_of[parameter], parameter))
    layers = [part for part in module.modules() if isinstance(part, GroupedLinear)]
    layer_of = {p: layer for layer in layers for p in layer.parameters(recurse=False)}
    for kind, named in kinds.items():
        runs = [(layer, list(run)) for layer, run in groupby(named, lambda n: layer_of.get(n[1]))]
        kinds[kind] = [n for layer, run in runs for n in (run[::-1] if layer else run)]
    return kinds
