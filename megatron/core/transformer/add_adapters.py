"""Add low-rank adapters to the layers of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.parameters.initialization import canonical_names, draw_parameter
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.low_rank_adapter import (
    ATTRIBUTE,
    EXPERT_TARGETS,
    TARGETS,
    GroupedLowRankAdapter,
    LoraConfig,
    LowRankAdapter,
    adapter_parameters,
)
from megatron.core.transformer.moe.experts import GroupedMLP, SequentialMLP
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transport.object_collectives import all_gather_object


def _add_adapter_output(layer: Any, arguments: tuple[Tensor, ...], output: Any) -> Any:
    """Forward hook of a layer with an adapter."""
    out, bias = output
    added_bias = layer.bias if bias is None else None
    return layer.adapter.adapted(arguments[0], out, layer.weight, added_bias), bias


def _add_grouped_output(layer: Any, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
    """Forward hook of grouped linear maps with adapters."""
    return output + layer.adapter(*arguments)


def add_adapters(
    chunks: Sequence[nn.Module], settings: LoraConfig, groups: ProcessGroupCollection
) -> int:
    """Freeze a model and give its layers adapters, which alone are trained from then on.

    Args:
        chunks: the model chunks of this rank, before they are wrapped for data parallelism.
    Returns:
        the number of trained parameters on this rank.
    Raises:
        ConfigError: a requested layer is on no stage, or cannot have an adapter.
    Communication:
        one all-gather of names over the pipeline stages.
    """
    present = set().union(*(_attach(chunk, settings, groups) for chunk in chunks))
    refuse_missing_targets(present, settings, groups)
    trained = 0
    for chunk in chunks:
        names = canonical_names(chunk)
        for name, parameter in adapter_parameters(chunk):
            trained += parameter.numel()
            meta = get_param_meta(parameter)
            if meta.init_method is not None:
                tp = groups.expt_tp if meta.is_expert else groups.tp
                draw_parameter(
                    parameter,
                    meta,
                    meta.init_method,
                    seed=rng_state().seed,
                    name=names[name],
                    axis_rank=tp.rank(),
                    axis_size=tp.size(),
                )
    return trained


def _attach(model: nn.Module, settings: LoraConfig, groups: ProcessGroupCollection) -> set[str]:
    """Freeze a chunk, add its adapters, and return the names of the layers that can have one."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    present = set()
    for path, layer in list(model.named_modules()):
        name = path.rpartition(".")[2]
        is_grouped = isinstance(layer, GroupedLinear)
        linear = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
        if not is_grouped and not isinstance(layer, linear):
            continue
        if layer.is_expert:
            name = f"experts.{name}"
        present.add(name)
        if name not in settings.lora_target_modules:
            continue
        if layer.is_expert and (settings.use_dora or settings.lora_dropout):
            what = "--use-dora" if settings.use_dora else f"--lora-dropout {settings.lora_dropout}"
            raise ConfigError(
                f"{what} with adapters of routed experts.",
                rule="the adapter of an expert is the product of two matrices, as in PEFT",
                flags=[what.split()[0], "--lora-target-modules"],
                fix=f"drop {what.split()[0]}, or {' and '.join(EXPERT_TARGETS)}",
            )
        if is_grouped:
            layer.add_module(ATTRIBUTE, GroupedLowRankAdapter(layer, settings))
            layer.register_forward_hook(_add_grouped_output)
        else:
            layer.add_module(ATTRIBUTE, LowRankAdapter(layer, settings, name, groups))
            layer.register_forward_hook(_add_adapter_output)
    for experts in model.modules():
        if isinstance(experts, (GroupedMLP, SequentialMLP)):
            experts.number_experts()
    return present


def refuse_missing_targets(
    present: set[str], settings: LoraConfig, groups: ProcessGroupCollection
) -> None:
    """Raise if no stage has a requested layer.

    Args:
        present: names of the layers of this stage.
    Raises:
        ConfigError: on every stage.
    Communication:
        one all-gather over the pipeline stages.
    """
    wanted = set(settings.lora_target_modules)
    missing = wanted.difference(*all_gather_object(present, groups.pp))
    # No model has all the layers of the default.
    if missing and wanted != set(TARGETS):
        raise ConfigError(
            f"the model has no layer called {', '.join(sorted(missing))}.",
            rule=f"adapters are added to the layers {', '.join(TARGETS)}, and of routed experts"
            f" {', '.join(EXPERT_TARGETS)}, of the local backend",
            flags=["--lora-target-modules", "--transformer-impl"],
            fix="name layers that the model has, with --transformer-impl local",
        )
