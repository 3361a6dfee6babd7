"""What one rank has started and waited for, in order."""

from dataclasses import dataclass, field

MESSAGES = ("send", "recv")
"""Calls that two ranks match; all others are collectives of their group."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operation of a process group, as its rank started it.

    Attributes:
        ranks: global ranks of the group.
        group: tells groups of the same ranks apart; the same on all of them.
        shape: of what all ranks give or get alike; of an all-to-all that of a row.
        sizes: rows that an all-to-all sends to each rank, and receives.
        peer: global rank at the other end of a message.
        batch: a number that messages share which are started as one; -1 if it is alone.
        where: file and line that asked for it.
    """

    ranks: tuple[int, ...]
    group: str
    name: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    reduction: str = ""
    root: int = -1
    sizes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    peer: int = -1
    batch: int = -1
    where: str = ""

    @property
    def is_message(self) -> bool:
        """Whether it has one peer."""
        return self.name in MESSAGES

    @property
    def agreed(self) -> tuple[object, ...]:
        """What has to be the same on all ranks of the group."""
        return (self.name, self.shape, self.dtype, self.reduction, self.root)

    @property
    def communicator(self) -> tuple[str, tuple[int, ...]]:
        """The group, as all its ranks name it."""
        return (self.group, self.ranks)

    def __str__(self) -> str:
        of = f" to {self.peer}" if self.name == "send" else f" from {self.peer}"
        words = [self.name + (of if self.is_message else ""), str(list(self.shape)), self.dtype]
        words += [self.reduction] if self.reduction else []
        words += [f"root {self.root}"] if self.root >= 0 else []
        return f"{' '.join(words)} in group {list(self.ranks)} ({self.where})"


@dataclass(frozen=True)
class Wait:
    """The stream that computes waits for a call, by its number."""

    number: int


@dataclass
class RankLog:
    """Calls and waits of one rank. A call's number is its place among the calls."""

    rank: int
    events: list[Call | Wait] = field(default_factory=list)

    @property
    def calls(self) -> list[Call]:
        """The calls alone."""
        return [event for event in self.events if isinstance(event, Call)]
