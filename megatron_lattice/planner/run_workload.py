"""A run's settings as the planner's table, and a layout of the table as settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.optimizer_config import OptimizerFlags
from megatron.core.transformer.config.layer_kinds import ATTENTION
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import RunConfig, all_flags
from megatron.training.metrics.model_size import ModelSize
from megatron_lattice.planner.hardware import Gpu
from megatron_lattice.planner.layout_space import Choices, counted_layers
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
_DECIDED_OTHERWISE = (
    "pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "num_layers_per_virtual_pipeline_stage",
    "use_torch_fsdp2", "use_megatron_fsdp",
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
    others = sum(not (kind.mixer == ATTENTION and kind.mlp) for kind in size.layer_kinds)
    if others:
        raise ConfigError(
            f"{others} layers are not attention and an MLP.",
            rule="the planner has no time model for such layers; pretrain_gpt.py --dry-run and"
            " tools/plan.py memory print their parameters, operations and memory",
            flags=["--experimental-attention-variant", "--hybrid-layer-pattern"],
            fix="leave it out to plan a model with attention",
        )
    states = state_bytes(run.optimizer, precision, grads_in_fp32=run.ddp.grad_reduce_in_fp32)
    config, layers = size.config, size.config.num_layers
    routed = sum(kind.has_experts for kind in size.layer_kinds) * size.routed_parameters
    tables = size.head_matrix * (1 if size.is_tied else 2)
    experts, groups = config.num_moe_experts or 0, config.num_query_groups or 0
    numbers: dict[str, float] = {
        "num_layers": layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_attention_heads if config.multi_latent_attention else groups,
        "kv_channels": size.value_head,
        "ffn_hidden_size": config.ffn_hidden_size or 0,
        "gated_linear_unit": config.gated_linear_unit,
        "vocab_size": size.vocab_size,
        "num_experts": experts,
        "moe_router_topk": config.moe_router_topk if experts else 0,
        "moe_ffn_hidden_size": size.expert_width if experts else 0,
        "expert_hidden_size": config.moe_latent_size or config.hidden_size,
        "active_params": size.active_parameters if experts else 0,
        "dense_params": (size.total_parameters - routed - tables) / layers,
        "expert_params": routed / layers,
        "num_tables": 1 if size.is_tied else 2,
        "seq_length": run.model.seq_length,
        "world_size": world_size,
        "tensor_size": 1,
        "pipeline_size": 1,
        "num_chunks": 1,
        "context_size": 1,
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
        precision=np.array(["bf16" if precision.bf16 else "fp16"]),
    )


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

    def fixed(name: str) -> tuple[int, ...]:
        return (int(config.value_of(name)),) if name in given else ()

    return Choices(
        tensor_size=fixed("tensor_model_parallel_size"),
        pipeline_size=fixed("pipeline_model_parallel_size"),
        context_size=fixed("context_parallel_size"),
        expert_size=fixed("expert_model_parallel_size"),
        expert_tensor_size=fixed("expert_tensor_parallel_size"),
        num_chunks=fixed("num_virtual_stages_per_pipeline_rank"),
        micro_batch_size=fixed("micro_batch_size"),
        sharding_stage=_sharding_choices(config, given),
        recompute=_recompute_choices(config),
    )


def _sharding_choices(config: RunConfig, given: frozenset[str]) -> tuple[int, ...]:
    if "data_parallel_sharding_strategy" in given:
        return (SHARDING_STRATEGIES.index(config.ddp.data_parallel_sharding_strategy),)
    return (1,) if config.ddp.use_distributed_optimizer else ()


def _recompute_choices(config: RunConfig) -> tuple[str, ...]:
    precision = config.precision
    granularity = precision.recompute_granularity
    if precision.recompute_activations:
        granularity = granularity or "selective"
    if granularity is None:
        return ()
    if granularity == "full":
        return ("full",)
    modules = precision.recompute_modules or ["core_attn"]
    if len(modules) > 1 or modules[0] not in KIND_OF_MODULE:
        raise ConfigError(
            f"--recompute-modules {' '.join(modules)} with a search for the layout.",
            rule="a search predicts one recomputed part of a layer, or the whole of it",
            flags=["--recompute-modules"],
            fix="drop --recompute-granularity and --recompute-modules, or name one module",
        )
    return (KIND_OF_MODULE[modules[0]],)


def settings_of_layout(row: Workloads, *, has_dispatcher: bool) -> dict[str, Any]:
    """Return the settings of one layout by the names of their flags.

    Args:
        row: a table of one row.
        has_dispatcher: whether the user's flags name the token dispatcher.
    """

    def number(column: str) -> int:
        return int(getattr(row, column)[0])

    tp, pp, chunks = number("tensor_size"), number("pipeline_size"), number("num_chunks")
    stage, layers = number("sharding_stage"), number("num_layers")
    counted = counted_layers(layers, pp * chunks)
    assert counted is not None, f"{layers} layers over {pp} x {chunks} chunks"
    found = dict(FREE_LAYOUT) | {
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "context_parallel_size": number("context_size"),
        "sequence_parallel": tp > 1,
        "num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None,
        "account_for_loss_in_pipeline_split": counted > layers,
        "account_for_embedding_in_pipeline_split": counted > layers + 1,
        "micro_batch_size": number("micro_batch_size"),
        "global_batch_size": number("global_batch_size"),
        "use_distributed_optimizer": stage == 1,
        "data_parallel_sharding_strategy": SHARDING_STRATEGIES[stage] if stage > 1 else None,
        "overlap_grad_reduce": True,
        "overlap_param_gather": stage > 0,
    }
    if row.is_moe[0]:
        found["expert_model_parallel_size"] = number("expert_size")
        found["expert_tensor_parallel_size"] = number("expert_tensor_size")
        if not has_dispatcher:
            found["moe_token_dispatcher_type"] = "alltoall"
    return found | _recompute_settings(row, counted // (pp * chunks))


def _recompute_settings(row: Workloads, layers_of_chunk: int) -> dict[str, Any]:
    kind = str(row.recompute[0])
    if kind == "none":
        return {}
    if kind == "full":
        layers = round(float(row.recompute_share[0]) * layers_of_chunk)
        is_all = layers == layers_of_chunk
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform" if is_all else "block",
            "recompute_num_layers": 1 if is_all else layers,
        }
    experts = "moe" if row.is_moe[0] else "mlp"
    module = {"selective": "core_attn", "layernorm": "layernorm", "mlp": experts}[kind]
    return {"recompute_granularity": "selective", "recompute_modules": [module]}
