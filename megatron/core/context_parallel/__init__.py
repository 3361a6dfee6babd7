"""The sequence split over ranks everywhere, attention included."""

from megatron.core.context_parallel.attention import (
    COMMUNICATION_TYPES,
    attend_over_sequence,
)
from megatron.core.context_parallel.partition import (
    get_batch_on_this_cp_rank,
    rows_of_rank,
)
from megatron.core.context_parallel.shift import from_later

__all__ = [
    "COMMUNICATION_TYPES",
    "attend_over_sequence",
    "from_later",
    "get_batch_on_this_cp_rank",
    "rows_of_rank",
]
