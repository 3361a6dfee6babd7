"""The layout of a run as a row of the planner's table."""

from __future__ import annotations

import numpy as np

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.training.config.resolved import ResolvedRun
from megatron_lattice.planner.hardware import Gpu
from megatron_lattice.planner.run_workload import KIND_OF_MODULE, workload_of_run
from megatron_lattice.planner.workload import Workloads


def row_of_run(run: ResolvedRun, gpu: Gpu) -> Workloads:
    """Return model, batch and layout of a run as a table of one row, without blanks.

    Schedules other than 1F1B count as 1F1B, and stages as equal.

    Args:
        run: resolved for all of its ranks, with its vocabulary.
        gpu: with its usual build of NVLink and NICs.
    Raises:
        ConfigError: the planner has no constants for its precision.
    """
    model = workload_of_run(run, gpu, run.topology.world_size)
    sizes, batch = run.parallelism, run.schedule
    chunks = run.transformer_config.virtual_pipeline_model_parallel_size or 1
    kind, share = _recomputation(run, chunks)
    numbers = {
        "tensor_size": sizes.tensor_model_parallel_size,
        "pipeline_size": sizes.pipeline_model_parallel_size,
        "num_chunks": chunks,
        "context_size": sizes.context_parallel_size,
        "expert_size": sizes.expert_model_parallel_size,
        "expert_tensor_size": sizes.expert_tensor_parallel_size or 1,
        "data_size": run.topology.data_parallel_size,
        "micro_batch_size": batch.micro_batch_size,
        "global_batch_size": batch.global_batch_size,
        "sharding_stage": SHARDING_STRATEGIES.index(run.ddp.data_parallel_sharding_strategy),
        "recompute_share": share,
        "sequence_parallel": sizes.sequence_parallel,
        "may_interleave": chunks > 1,
        "must_interleave": chunks > 1,
    }
    columns = {name: np.array([float(number)]) for name, number in numbers.items()}
    return model.replace(**columns, recompute=np.array([kind], dtype="<U16"))


def _recomputation(run: ResolvedRun, chunks: int) -> tuple[str, float]:
    """Return the planner's kind of recomputation, and the share of layers it is of."""
    settings = run.precision
    if settings.recompute_granularity is None:
        return "none", 1.0
    if settings.recompute_granularity == "full":
        stages = run.parallelism.pipeline_model_parallel_size * chunks
        layers = run.transformer_config.num_layers / stages
        chosen = settings.recompute_num_layers
        is_part = settings.recompute_method == "block" and chosen is not None
        return "full", min(1.0, (chosen or 0) / layers) if is_part else 1.0
    known = KIND_OF_MODULE | {"moe_act": "mlp", "shared_experts": "mlp"}
    kinds = {known.get(module, "modules") for module in settings.recompute_modules or ["core_attn"]}
    if "mlp" in kinds:
        return "mlp", 1.0
    return (kinds.pop() if len(kinds) == 1 else "modules"), 1.0
