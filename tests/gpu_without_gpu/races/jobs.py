"""Run a job of the harness with its races reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection
from tests.gpu_without_gpu.races.detector import watched
from tests.harness.distributed import address_of, run_distributed
from tests.harness.worker import FunctionAddress


@dataclass(frozen=True)
class Watched:
    """What was seen of one rank.

    Attributes:
        value: what the function returned.
        reports: races by the place that was left out; that of the program as it is: "".
        num_skipped: how often each place was left out.
    """

    value: Any
    reports: dict[str, list[str]]
    num_skipped: dict[str, int]
    num_operations: int


def run_watched(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    without: Sequence[str] = (),
    **layout: Any,
) -> list[Watched]:
    """Call `function(groups, *args)` on every rank as `run_distributed` does, and watch it.

    Args:
        without: see `watched`.
    """
    address = address_of(function)
    return run_distributed(watched_body, world_size, address, without, *args, **layout)


def watched_body(
    groups: ProcessGroupCollection, address: FunctionAddress, without: Sequence[str], *args: Any
) -> Watched:
    """One rank of `run_watched`."""
    with watched(without) as detector:
        value = address.resolve()(groups, *args)
    return Watched(
        value,
        {clocks.without: [*clocks.reports.values()] for clocks in detector.clocks},
        {clocks.without: clocks.num_skipped for clocks in detector.clocks},
        detector.num_operations,
    )
