"""One rank of a job of the harness with the order of its collectives kept."""

from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from tests.gpu_without_gpu.collective_order.calls import RankLog
from tests.gpu_without_gpu.collective_order.recording import recorded
from tests.gpu_without_gpu.process_group_calls import ways_of_nccl
from tests.harness.worker import FunctionAddress


def recorded_body(
    groups: ProcessGroupCollection, address: FunctionAddress, *args: Any
) -> tuple[Any, RankLog]:
    """Call `function(groups, *args)` in NCCL's ways; return its result, and what was started."""
    with ways_of_nccl(), recorded() as finish:
        value = address.resolve()(groups, *args)
        return value, finish()
