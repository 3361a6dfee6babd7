"""Micro batches that can be given again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron.core.topology.group import Group
from megatron.core.transport.object_collectives import broadcast_object
from megatron.core.utils import as_list
from megatron.training.run.context import StepPlan


class RerunDataIterator:
    """An iterator that can give its last batches again.

    `advance` forgets what was given; `rewind` makes `next` give it once more, in the same order.
    """

    def __init__(self, iterable: Iterable[object], make_iterable: bool = True) -> None:
        self.iterable: Iterator[Any] = iter(iterable)
        self.saved_microbatches: list[Any] = []
        self.replaying = False
        self.replay_pos = 0

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        if self.replaying and self.replay_pos < len(self.saved_microbatches):
            self.replay_pos += 1
            return _copied(self.saved_microbatches[self.replay_pos - 1])
        self.replaying = False
        batch = next(self.iterable)
        self.saved_microbatches.append(batch)
        return _copied(batch)

    def rewind(self) -> None:
        """Go back to the batch after the last `advance`."""
        self.replaying, self.replay_pos = True, 0

    def advance(self) -> None:
        """Forget the batches given so far."""
        self.replaying, self.replay_pos = False, 0
        self.saved_microbatches = []

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that could be given again."""
        return {
            "saved_microbatches": self.saved_microbatches,
            "replaying": self.replaying,
            "replay_pos": self.replay_pos,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over the batches of `state_dict`."""
        self.saved_microbatches = state_dict["saved_microbatches"]
        self.replaying = state_dict["replaying"]
        self.replay_pos = state_dict["replay_pos"]


def _copied(batch: Any) -> Any:
    """Return a batch whose entries a forward step may replace."""
    return dict(batch) if type(batch) is dict else batch


@dataclass(frozen=True)
class Batches:
    """All micro batches of one step of one replica."""

    of_iterators: tuple[RerunDataIterator | None, ...]
    """One for each model chunk; None where a chunk reads no data."""
    is_list: bool
    """Whether the schedule takes a list of iterators."""
    first_sample: int
    """Absolute index of the first sample of the step, of all replicas."""
    plan: StepPlan
    dp_rank: int
    """The replica that they belong to: it decides what is dropped out."""

    @classmethod
    def of(cls, data: Any, first_sample: int, plan: StepPlan, dp_rank: int) -> Batches:
        """Return the batches that will be taken from an iterator, or one for each chunk."""
        found = tuple(None if it is None else RerunDataIterator(it) for it in as_list(data))
        return cls(found, isinstance(data, list), first_sample, plan, dp_rank)

    def iterators(self) -> Any:
        """Return what the schedule takes."""
        return list(self.of_iterators) if self.is_list else self.of_iterators[0]

    def rewind(self) -> None:
        """Begin again."""
        for iterator in self.of_iterators:
            if iterator is not None:
                iterator.rewind()

    def shared(self, source: int, dp: Group) -> Batches:
        """Return those of rank `source` of the data-parallel group, on all of its ranks.

        Communication: one broadcast of pickles on `dp`.
        """
        own = [None if it is None else it.saved_microbatches for it in self.of_iterators]
        theirs = broadcast_object(own, source, dp)
        found = []
        for batches in theirs:
            iterator = None if batches is None else RerunDataIterator(())
            if iterator is not None:
                iterator.saved_microbatches = batches
            found.append(iterator)
        return Batches(tuple(found), self.is_list, self.first_sample, self.plan, source)
