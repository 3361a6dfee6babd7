"""Find the first ranks of pipeline stages and the ranks that read data."""

from __future__ import annotations

from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.rank_grid import Layout, plan_layout
from megatron.training.config.resolved import ResolvedRun


def is_dataset_built_on_rank(run: ResolvedRun, vp_stage: int | None = None) -> bool:
    """Return whether this rank's chunk needs micro batches.

    The first stage needs tokens, and with hash layers every stage. The last stage, and stages of
    multi-token prediction, need labels.
    Every stage needs document masks (--reset-attention-mask, --sft), the position of padding, and
    the packing of dynamic context parallelism.
    """
    is_padded = run.encoders.traits.is_padded
    is_packed = run.parallelism.hybrid_context_parallel
    if run.data.reset_attention_mask or run.data.sft or is_padded or is_packed:
        return True
    if run.transformer_config.moe_n_hash_layers:
        return True
    layout = pipeline_layout(run.transformer_config)
    pp_rank = ProcessGroupCollection.current().pp.rank()
    return layout.reads_tokens(pp_rank, vp_stage)


def planned_layout(run: ResolvedRun) -> Layout:
    """Return the grid of ranks.

    Raises:
        TopologyError: the world size and the parallel sizes do not fit.
    """
    sizes = run.parallelism
    return plan_layout(
        run.topology.world_size,
        tp=sizes.tensor_model_parallel_size,
        pp=sizes.pipeline_model_parallel_size,
        cp=sizes.context_parallel_size,
        ep=sizes.expert_model_parallel_size,
        expert_tp=sizes.expert_tensor_parallel_size,
        order=run.topology.rank_order,
    )


def first_rank_of_stages(run: ResolvedRun) -> list[int]:
    """Return the first global rank of each pipeline stage."""
    return next(ranks for ranks in planned_layout(run).dense.groups("pp") if 0 in ranks)
