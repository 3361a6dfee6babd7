"""When a forward and a backward overlap, one hiding the all-to-all of the other's tokens."""

from __future__ import annotations

from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named

_FLAG = "--overlap-moe-expert-parallel-comm"


def overlap_f_b_problems(config: Any) -> list[MegatronError]:
    """Return why forwards and backwards of a `TransformerConfig` cannot overlap."""
    if not config.overlap_moe_expert_parallel_comm:
        return []
    problems: list[MegatronError] = []
    ranks, dispatcher = config.expert_model_parallel_size, config.moe_token_dispatcher_type
    if config.num_moe_experts is None or ranks == 1 or dispatcher == "allgather":
        problems.append(
            ConfigError(
                f"overlap_moe_expert_parallel_comm with {config.num_moe_experts} experts,"
                f" expert_model_parallel_size={ranks}, moe_token_dispatcher_type={dispatcher!r}.",
                rule="it hides an all-to-all between the ranks that hold the experts",
                flags=[_FLAG, "--expert-model-parallel-size", "--moe-token-dispatcher-type"],
                fix="use --moe-token-dispatcher-type alltoall and several expert-parallel ranks,"
                f" or drop {_FLAG}",
            )
        )
    schedule = schedule_named(config.pipeline_schedule)
    if not schedule.overlaps_f_b:
        problems.append(schedule.overlap_error(ConfigError))
    if config.recompute_granularity == "full" or config.moe_layer_recompute:
        problems.append(
            ConfigError(
                "overlap_moe_expert_parallel_comm with recomputed expert layers.",
                rule="the all-to-all of a recomputation is not hidden",
                flags=[_FLAG, "--recompute-granularity", "--moe-layer-recompute"],
                fix="use --recompute-granularity selective --recompute-modules core_attn",
            )
        )
    return problems
