"""Steps of which one hides the exchange of the other's tokens: when they are possible."""

from __future__ import annotations

from typing import Any

from megatron.core.errors import ConfigError, MegatronError
from megatron.core.pipeline_parallel.step_plan import OVERLAPPED_SCHEDULES

_FLAG = "--overlap-moe-expert-parallel-comm"


def overlap_f_b_problems(config: Any) -> list[MegatronError]:
    """Return why forwards and backwards of a `TransformerConfig` cannot take turns."""
    if not config.overlap_moe_expert_parallel_comm:
        return []
    problems: list[MegatronError] = []
    ranks, dispatcher = config.expert_model_parallel_size, config.moe_token_dispatcher_type
    if config.num_moe_experts is None or ranks == 1 or dispatcher != "alltoall":
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
    if config.pipeline_schedule not in OVERLAPPED_SCHEDULES:
        problems.append(
            ConfigError(
                "overlap_moe_expert_parallel_comm with"
                f" pipeline_schedule={config.pipeline_schedule!r}.",
                rule="each forward of the steady state stands beside a backward that it does not"
                " need",
                flags=[_FLAG, "--pipeline-schedule"],
                fix=f"use --pipeline-schedule {' or '.join(OVERLAPPED_SCHEDULES)}",
            )
        )
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
