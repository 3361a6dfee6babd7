"""Run a job of the harness with the order of its collectives kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from tests.gpu_without_gpu.collective_order.calls import RankLog
from tests.gpu_without_gpu.collective_order.recording import recorded, ways_of_nccl
from tests.harness.distributed import address_of, run_distributed
from tests.harness.worker import FunctionAddress


def run_recorded(
    function: Callable[..., Any], world_size: int, *args: Any, **layout: Any
) -> tuple[list[Any], list[RankLog]]:
    """Call `function(groups, *args)` on every rank as `run_distributed` does, in NCCL's ways.

    Returns:
        results and logs, by rank.
    """
    body, address = recorded_body, address_of(function)
    outcomes = run_distributed(body, world_size, address, *args, **layout)
    return [value for value, _ in outcomes], [log for _, log in outcomes]


def recorded_body(
    groups: ProcessGroupCollection, address: FunctionAddress, *args: Any
) -> tuple[Any, RankLog]:
    """One rank of `run_recorded`."""
    with ways_of_nccl(), recorded() as finish:
        value = address.resolve()(groups, *args)
        return value, finish()
