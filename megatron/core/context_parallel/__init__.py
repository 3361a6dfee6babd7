"""Context parallelism: every layer, including attention, works on a shard of the sequence."""

from megatron.core.context_parallel.attention import (
    CP_COMM_TYPES,
    attend_in_units,
    context_parallel_attention,
)
from megatron.core.context_parallel.partition import (
    get_batch_on_this_cp_rank,
    sequence_shard_of_rank,
    share_microbatch,
    shift_left,
)

__all__ = [
    "CP_COMM_TYPES",
    "attend_in_units",
    "context_parallel_attention",
    "get_batch_on_this_cp_rank",
    "sequence_shard_of_rank",
    "share_microbatch",
    "shift_left",
]
