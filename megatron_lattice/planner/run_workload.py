"""A run's settings as the planner's table, and a layout of the table as settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.optimizer_config import OptimizerFlags
from megatron.core.pipeline_parallel.layout import virtual_stages_of
from megatron.core.transformer.config.layer_kinds import DENSE, MAMBA
from megatron.core.transformer.config.layer_sizes import PATH_FLAG
from megatron.core.utils import as_list
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import RunConfig, all_flags
from megatron.training.metrics.model_size import ModelSize
from megatron_lattice.planner.hardware import Gpu
from megatron_lattice.planner.layout_space import (
    Choices,
    counted_layers,
    layers_of_chunk,
    stage_layers,
)
from megatron_lattice.planner.workload import Workloads

FREE_LAYOUT: Mapping[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "sequence_parallel": False,
    "micro_batch_size": 1,
    "use_distributed_optimizer": False,
    "data_parallel_sharding_strategy": None,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "recompute_activations": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_modules": None,
}
"""Settings that a search decides, with their values in one process."""

KIND_OF_MODULE = {
    "core_attn": "selective", "layernorm": "layernorm", "mlp": "mlp", "moe": "mlp",
}  # fmt: skip
"""Planner's kind of recomputation for each word of --recompute-modules."""
STAGES = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)  # fmt: skip
"""Settings that determine the layers of each stage."""
_DECIDED_OTHERWISE = (
    "num_layers_per_virtual_pipeline_stage", "use_torch_fsdp2", "use_megatron_fsdp",
)  # fmt: skip


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on the device, before sharding divides them."""

    weight: float
    gradient: float
    main: float
    moments: float


def state_bytes(
    optimizer: OptimizerFlags, precision: HalfPrecision, *, grads_in_fp32: bool
) -> StateBytes:
    """Return the bytes of a parameter between steps."""
    item = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 2 + 4 / 128,
            torch.uint8: 1 + 4 / 128}  # fmt: skip
    is_half = precision.bf16 or precision.fp16
    first, second = item[optimizer.exp_avg_dtype], item[optimizer.exp_avg_sq_dtype]
    main = item[optimizer.main_params_dtype] if is_half else 0.0
    if optimizer.use_precision_aware_optimizer and precision.bf16 and main == 4.0:
        main = 2.0  # the other two bytes of fp32 are the bf16 weight
    # Muon leaves some parameters to another rule; they are too few to count.
    names = OPTIMIZERS[optimizer.optimizer].states_of(optimizer)
    moments = sum(second if name == "exp_avg_sq" else first for name in names)
    kept = 1.0
    if optimizer.optimizer_cpu_offload or optimizer.optimizer_offload_path:
        kept -= optimizer.optimizer_offload_fraction
    gradient = 4.0 if not is_half or grads_in_fp32 else 2.0
    return StateBytes(2.0 if is_half else 4.0, gradient, main * kept, moments * kept)


def workload_of_run(run: ResolvedRun, gpu: Gpu, world_size: int) -> Workloads:
    """Return model and batch of a run as a table of one row, without a layout.

    Args:
        run: resolved, with its vocabulary.
        gpu: with its usual build of NVLink and NICs.
    Raises:
        ConfigError: the planner has no constants for its precision.
    """
    size = ModelSize.from_settings(run)
    precision = run.precision
    if not (precision.bf16 or precision.fp16):
        raise ConfigError(
            "the run computes in fp32.",
            rule="the planner's constants are of 16-bit products",
            flags=["--bf16", "--fp16"],
            fix="add --bf16",
        )
    kinds = size.layer_kinds
    others = sum(kind.is_recurrent and kind.mixer != MAMBA for kind in kinds)
    if others:
        raise ConfigError(
            f"{others} layers are neither attention nor Mamba-2.",
            rule="the planner has no time model for such layers; pretrain_gpt.py --dry-run and"
            " tools/plan.py memory print their parameters, operations and memory",
            flags=["--experimental-attention-variant", "--hybrid-layer-pattern"],
            fix="leave it out to plan a model with attention",
        )
    if size.config.blocks:
        raise ConfigError(
            "layers have several sizes.",
            rule="the planner has one time of all layers with attention, and one of all MLPs",
            flags=[PATH_FLAG],
            fix=f"drop {PATH_FLAG} to plan a model whose layers have the same sizes",
        )
    states = state_bytes(run.optimizer, precision, grads_in_fp32=run.ddp.grad_reduce_in_fp32)
    config, layers = size.config, size.config.num_layers
    routed = sum(kind.has_experts for kind in size.layer_kinds) * size.routed_parameters
    tables = size.head_matrix * (1 if size.is_tied else 2)
    experts, groups = config.num_moe_experts or 0, config.num_query_groups or 0

    def share(number: int) -> float:
        return number / layers

    with_mlp = share(sum(kind.mlp == DENSE for kind in kinds))
    with_mamba = share(sum(kind.recurrence == MAMBA for kind in kinds))
    with_attention = share(sum(kind.attends for kind in kinds))
    heads = config.num_attention_heads
    kv_heads = heads if config.multi_latent_attention else groups
    mamba_width = (config.mamba_num_heads or 0) * config.mamba_head_dim if with_mamba else 0
    states_width = config.mamba_num_groups * config.mamba_state_dim
    mamba_inputs = 2 * (mamba_width + states_width) + (config.mamba_num_heads or 0)
    # Shared experts and latents count as weights of the mixers.
    mixers = (size.total_parameters - routed - tables) / layers
    mixers -= (
        with_mlp
        * size.config.hidden_size
        * (config.ffn_hidden_size or 0)
        * (2 + config.gated_linear_unit)
    )
    mixers -= with_mamba * config.hidden_size * (mamba_inputs + mamba_width)
    columns_of_attention = (
        with_attention * 2 * config.hidden_size * (heads + kv_heads) * size.value_head
    )
    # Queries and keys may be wider than values.
    wider = size.score_width / (2 * size.attention_width) if with_attention else 1.0
    numbers: dict[str, float] = {
        "num_layers": layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": heads,
        "num_query_groups": kv_heads,
        "kv_channels": size.value_head,
        "ffn_hidden_size": config.ffn_hidden_size or 0,
        "gated_linear_unit": config.gated_linear_unit,
        "vocab_size": size.vocab_size,
        "num_experts": experts,
        "moe_router_topk": config.moe_router_topk if experts else 0,
        "moe_ffn_hidden_size": size.expert_width if experts else 0,
        "expert_hidden_size": config.moe_latent_size or config.hidden_size,
        "mixer_scale": mixers / columns_of_attention if with_attention else 1,
        "dense_params": (size.total_parameters - routed - tables) / layers,
        "expert_params": routed / layers,
        "attention_layers": with_attention,
        "dense_layers": with_mlp,
        "expert_layers": share(sum(kind.has_experts for kind in kinds)),
        "mamba_layers": with_mamba,
        "mamba_width": mamba_width,
        "mamba_inputs": mamba_inputs if with_mamba else 0,
        "mamba_state_size": config.mamba_state_dim if with_mamba else 0,
        "attended_share": wider * _share_of_keys(size),
        "has_sinks": config.softmax_type == "learnable",
        "trained_share": _trained_share(run, size),
        "grouped_products": config.moe_grouped_gemm,
        "num_tables": 1 if size.is_tied else 2,
        "seq_length": run.model.seq_length,
        "world_size": world_size,
        "tensor_size": 1,
        "pipeline_size": 1,
        "num_chunks": 1,
        "context_size": 1,
        "exchanges_heads": set(as_list(run.parallelism.cp_comm_type or "p2p")) == {"a2a"},
        "expert_size": 1,
        "expert_tensor_size": 1,
        "data_size": world_size,
        "micro_batch_size": 1,
        "global_batch_size": run.config.schedule.global_batch_size,
        "sharding_stage": 1,
        "weight_bytes": states.weight,
        "gradient_bytes": states.gradient,
        "optimizer_bytes": states.main + states.moments,
        "recompute_share": 1,
        "sequence_parallel": 0,
        "may_interleave": 0,
        "must_interleave": 0,
        "flash_attention": 1,
        "nvlink_domain": gpu.nvlink_domain,
        "nic_bytes_per_s": gpu.nic_bytes_per_s,
    }
    columns: dict[str, Any] = {name: np.array([float(n)]) for name, n in numbers.items()}
    return Workloads(
        **columns,
        gpu=np.array([gpu.name]),
        recompute=np.array(["none"], dtype="<U16"),
        precision=np.array([_precision(run)]),
        software=np.array(["lattice"]),
        graphs=np.array(["layer" if config.captures_layers else "none"]),
    )


def _precision(run: ResolvedRun) -> str:
    config = run.transformer_config
    if config.fp4:
        return "nvfp4"
    if config.fp8:
        return "mxfp8" if config.fp8_recipe == "mxfp8" else "fp8"
    return "bf16" if run.precision.bf16 else "fp16"


def _trained_share(run: ResolvedRun, size: ModelSize) -> float:
    """Return the share of the weights that are trained: adapters beside the matrices of a layer."""
    rank = run.config.lora.lora_rank
    if not rank:
        return 1.0
    config, heads = size.config, size.attention_width
    widths = (
        4 * config.hidden_size + 2 * heads + 2 * (config.num_query_groups or 0) * size.value_head
    )
    return rank * widths * config.num_layers / size.total_parameters


def choices_of(config: RunConfig, given: frozenset[str]) -> Choices:
    """Return the choices that the user's flags fix.

    Raises:
        ConfigError: a flag requests a layout that the search does not support.
    """
    for name in _DECIDED_OTHERWISE:
        if name in given:
            flag = all_flags()[name].flag
            raise ConfigError(
                f"{flag} with a search for the layout.",
                rule="a search splits layers evenly and shards by the distributed optimizer",
                flags=[flag],
                fix=f"drop {flag}",
            )
    schedule = config.parallelism.pipeline_schedule
    if schedule != "1f1b":
        raise ConfigError(
            f"--pipeline-schedule {schedule} with a search for the layout.",
            rule="a search predicts 1F1B, plain and interleaved",
            flags=["--pipeline-schedule"],
            fix="drop --pipeline-schedule",
        )

    has_stages = any(name in given for name in STAGES)

    def fixed(name: str) -> tuple[int, ...]:
        return (int(config.value_of(name)),) if name in given else ()

    return Choices(
        tensor_size=fixed("tensor_model_parallel_size"),
        pipeline_size=fixed("pipeline_model_parallel_size")
        or (config.parallelism.pipeline_model_parallel_size,) * has_stages,
        context_size=fixed("context_parallel_size"),
        expert_size=fixed("expert_model_parallel_size"),
        expert_tensor_size=fixed("expert_tensor_parallel_size"),
        num_chunks=fixed("num_virtual_stages_per_pipeline_rank")
        or _chunks_of_stages(config, given),
        micro_batch_size=fixed("micro_batch_size"),
        sharding_stage=_sharding_choices(config, given),
        recompute=_recompute_choices(config, given),
        has_stages=has_stages,
    )


def _chunks_of_stages(config: RunConfig, given: frozenset[str]) -> tuple[int, ...]:
    """Return the number of chunks that the layers of each stage determine."""
    if not any(name in given for name in STAGES):
        return ()
    layout = config.value_of("pipeline_model_parallel_layout")
    size = config.parallelism.pipeline_model_parallel_size
    return ((virtual_stages_of(layout, size) if layout else None) or 1,)


def _sharding_choices(config: RunConfig, given: frozenset[str]) -> tuple[int, ...]:
    if "data_parallel_sharding_strategy" in given:
        return (SHARDING_STRATEGIES.index(config.ddp.data_parallel_sharding_strategy),)
    is_on = "use_distributed_optimizer" in given and config.ddp.use_distributed_optimizer
    return (1,) if is_on else ()


def _recompute_choices(config: RunConfig, given: frozenset[str]) -> tuple[str, ...]:
    precision = config.precision
    granularity = precision.recompute_granularity
    if precision.recompute_activations:
        granularity = granularity or "selective"
    if granularity is None or not given & {"recompute_granularity", "recompute_activations"}:
        return ()
    if granularity == "full":
        return ("full",)
    return (kind_of_modules(precision.recompute_modules or ["core_attn"]),)


def kind_of_modules(modules: Sequence[str]) -> str:
    """Return the planner's kind of recomputation for --recompute-modules."""
    kinds = {KIND_OF_MODULE.get(module, "activations") for module in modules}
    if "mlp" in kinds:
        return "mlp"
    return kinds.pop() if len(kinds) == 1 else "activations"


def settings_of_layout(
    row: Workloads,
    *,
    has_dispatcher: bool,
    num_predicted: int = 0,
    needs_layout: bool = False,
) -> dict[str, Any]:
    """Return the settings of one layout by the names of their flags.

    Args:
        row: a table of one row.
        has_dispatcher: whether the user's flags name the token dispatcher.
        num_predicted: layers that predict later tokens.
        needs_layout: whether a file has a layout string, which only another one replaces.
    """

    def number(column: str) -> int:
        return int(getattr(row, column)[0])

    tp, pp, chunks = number("tensor_size"), number("pipeline_size"), number("num_chunks")
    stage, layers = number("sharding_stage"), number("num_layers")
    counted = counted_layers(layers, pp * chunks)
    layout = None
    if pp > 1 and (counted is None or needs_layout):
        stages = ["t" * count for count in stage_layers(layers, pp, chunks)]
        layout = f"E{'|'.join(stages)}{'m' * num_predicted}L"
    counted = layers if counted is None or layout else counted
    found = dict(FREE_LAYOUT) | {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": number("context_size"),
        "sequence_parallel": tp > 1,
        "pipeline_model_parallel_layout": layout,
        "num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 and not layout else None,
        "account_for_loss_in_pipeline_split": counted > layers,
        "account_for_embedding_in_pipeline_split": counted > layers + 1,
        "micro_batch_size": number("micro_batch_size"),
        "global_batch_size": number("global_batch_size"),
        "use_distributed_optimizer": stage == 1,
        "data_parallel_sharding_strategy": SHARDING_STRATEGIES[stage] if stage > 1 else None,
        "overlap_grad_reduce": True,
        "overlap_param_gather": stage > 0,
    }
    if number("context_size") > 1 and number("exchanges_heads"):
        found["cp_comm_type"] = ["a2a"]
    if row.is_moe[0]:
        found["expert_model_parallel_size"] = number("expert_size")
        found["expert_tensor_parallel_size"] = number("expert_tensor_size")
        if not has_dispatcher:
            found["moe_token_dispatcher_type"] = "alltoall"
    return found | _recompute_settings(row, layers_of_chunk(layers, pp * chunks))


def _recompute_settings(row: Workloads, most: int) -> dict[str, Any]:
    kind = str(row.recompute[0])
    if kind == "none":
        return {}
    if kind == "full":
        layers = round(float(row.recompute_share[0]) * most)
        is_all = layers == most
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if is_all else "block",
            "recompute_num_layers": 1 if is_all else layers,
        }
    experts = "moe" if row.is_moe[0] else "mlp"
    modules = {"selective": ["core_attn"], "layernorm": ["layernorm"], "mlp": [experts]}
    both = ["layernorm", "moe_act"]
    return {"recompute_granularity": "selective", "recompute_modules": modules.get(kind, both)}


def _share_of_keys(size: ModelSize) -> float:
    """Return the share of the keys before a query that it attends to, on average over layers."""
    config, length = size.config, size.seq_length
    shares = []
    for layer, kind in enumerate(size.layer_kinds, 1):
        if kind.attends:
            chunk = min(config.chunk_of(layer) or length, length)
            left, _ = config.window_of(layer) or (-1, 0)
            window = 1.0 if left < 0 else min((left + 1) / chunk, 1.0)
            shares.append(chunk / length * window * (2 - window))
    return sum(shares) / len(shares) if shares else 1.0
