"""Detect ranks that are about to run different steps, before they exchange data.

Before any data, neighbours in a pipeline send each other the numbers that determine a step, and
compare them before they post the first receive from each other. So the check waits only where a
rank would wait for data anyway: an early rank can start its next step while a late rank finishes
the last one, which in evaluation hides the bubble between steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.foundation.errors import PeerLostError, TopologyError
from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.core.parameters.rng import derive_seed

_PATIENCE = timedelta(seconds=5)
_TAG = 0  # data messages have positive tags


def encode(settings: Mapping[str, object]) -> torch.Tensor:
    """Return one int64 per setting: an integer unchanged, any other value as a hash of its repr."""
    numbers = [v if isinstance(v, int) else derive_seed(repr(v)) for v in settings.values()]
    return torch.tensor(numbers, dtype=torch.int64)


def disagreement(
    settings: Mapping[str, object], theirs: list[int], my_name: str, their_name: str
) -> TopologyError | None:
    """Return the error for a peer with other encoded settings; None if they are equal."""
    mine = encode(settings).tolist()
    differing = [i for i in range(len(mine)) if mine[i] != theirs[i]]
    if not differing:
        return None
    items = list(settings.items())
    ours_text = ", ".join(f"{items[i][0]}={items[i][1]}" for i in differing)
    theirs_text = ", ".join(
        f"{items[i][0]}={theirs[i] if isinstance(items[i][1], int) else 'something else'}"
        for i in differing
    )
    return TopologyError(
        "two ranks of a pipeline are about to run different steps:\n"
        f"  {my_name}: {ours_text}\n  {their_name}: {theirs_text}",
        rule="all ranks of a pipeline run the same number of equal micro batches with the same "
        "schedule",
        flags=["--global-batch-size", "--micro-batch-size", "--pipeline-model-parallel-size"],
        fix="start all ranks with the same flags, and end an epoch on all ranks together",
    )


def lost_neighbour(rank: int, what: object, name: str, problem: RuntimeError) -> PeerLostError:
    """Return the error for a message between this rank and a neighbour that failed."""
    return PeerLostError(
        f"pipeline rank {rank}: {what} did not pass: the connection with {name} failed or timed "
        f"out.\n  {problem}",
        rule="all ranks of a pipeline run the same program at the same time",
        flags=["--distributed-timeout-minutes"],
        fix=f"look at the log of {name}: it stopped, hangs, or runs other micro batches",
    )


class StepHandshake:
    """The exchange of one step between this rank and its neighbours.

    Args:
        group: pipeline group of a backend with message tags.
        neighbours: pipeline ranks that this rank exchanges data with.
        settings: names, equal and in the same order on all ranks, and values.
        name_of: pipeline rank -> text for messages.
    Communication:
        one small message to and from each neighbour.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        neighbours: Iterable[int],
        settings: Mapping[str, object],
        name_of: Callable[[int], str],
    ) -> None:
        self._settings = settings
        self._name_of = name_of
        self._rank = group.rank()
        self._global_ranks = dist.get_process_group_ranks(group)
        self._mine = encode(settings)
        self._sends: list[Any] = []
        self._receives: dict[int, tuple[torch.Tensor, Any]] = {}
        for peer in sorted(set(neighbours)):
            theirs = torch.empty_like(self._mine)
            with self._reaching(peer):
                self._receives[peer] = theirs, group.recv([theirs], peer, _TAG)
                self._sends.append(group.send([self._mine], peer, _TAG))

    def check(self, peer: int) -> None:
        """Wait for the settings of a neighbour and raise if they differ; once per peer."""
        problem = self._compare(peer)
        if problem is not None:
            # Let the neighbours receive these settings before this rank exits.
            for work in self._sends:
                with contextlib.suppress(RuntimeError):
                    work.wait(_PATIENCE)
            raise problem

    def explain(self) -> TopologyError | None:
        """Return a disagreement with any neighbour that explains why a transfer failed."""
        for peer in list(self._receives):
            with contextlib.suppress(RuntimeError):
                problem = self._compare(peer, _PATIENCE)
                if problem is not None:
                    return problem
        return None

    def _compare(self, peer: int, timeout: timedelta | None = None) -> TopologyError | None:
        expected = self._receives.pop(peer, None)
        if expected is None:
            return None
        theirs, work = expected
        PROGRESS.wait_for(self._global_ranks[peer])
        work.wait() if timeout is None else work.wait(timeout)
        PROGRESS.wait_for(None)
        return disagreement(
            self._settings, theirs.tolist(), self._name_of(self._rank), self._name_of(peer)
        )

    def finish(self) -> None:
        """Check every neighbour that was not checked yet."""
        for peer in list(self._receives):
            with self._reaching(peer):
                self.check(peer)
        with self._reaching(None):
            for work in self._sends:
                work.wait()

    @contextlib.contextmanager
    def _reaching(self, peer: int | None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as problem:
            name = "a neighbour" if peer is None else self._name_of(peer)
            raise lost_neighbour(self._rank, "the plan of a step", name, problem) from problem
