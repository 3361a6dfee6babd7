"""What a heartbeat says, read beside its rank; no torch, so that the reader is small."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.core.foundation.heartbeat.layout import (
    NO_CHUNK,
    NO_MICROBATCH,
    NUM_BYTES,
    NUM_RECORDS,
    OPERATIONS,
    RECORD,
    RING_OFFSET,
    TABLE_OFFSET,
    TEXT_BYTES,
    TEXT_OFFSET,
    Word,
)

_WORDS = struct.Struct(f"<{len(Word)}Q")


@dataclass(frozen=True)
class Channel:
    """What is matched in one order: the operations of a group, or messages one way of two ranks."""

    ranks: tuple[int, ...]
    tag: int
    occurrence: int = 0
    """Of groups of the same ranks, the first, second ..."""
    name: str = field(default="group", compare=False)

    def describe(self) -> str:
        """Return it as messages show it."""
        return f"{self.name} {list(self.ranks)}"

    def ends(self) -> tuple[int, int] | None:
        """Return (source, target) among all processes; None unless it is one of messages."""
        if self.tag >= 0:
            return None
        source, target = divmod(-1 - self.tag, len(self.ranks))
        return self.ranks[source], self.ranks[target]


@dataclass(slots=True)  # frozen, the thousand that each look makes would take three times as long
class Record:
    """An operation that a rank has entered."""

    number: int
    channel: Channel
    operation: str
    count: int
    """It is the count-th of its channel."""
    num_elements: int
    instruction: int

    def describe(self, instructions: Mapping[int, str]) -> str:
        """Return it as messages show it."""
        size = f" of {self.num_elements} elements" if self.num_elements else ""
        during = show_instruction(self.instruction, instructions)
        return (
            f"{self.operation}{size}, number {self.count} on {self.channel.describe()}"
            f"{', begun in ' + during if during else ''}"
        )


def show_instruction(code: int, names: Mapping[int, str]) -> str:
    """Return an instruction of the schedule in words; empty outside of a schedule."""
    if not code:
        return ""
    number = (code >> 48) - 1
    chunk, microbatch = code >> 32 & NO_CHUNK, code & NO_MICROBATCH
    of = "" if microbatch == NO_MICROBATCH else f" of micro batch {microbatch}"
    return f"{names.get(number, number)}{of}" + ("" if chunk == NO_CHUNK else f", chunk {chunk}")


@dataclass(frozen=True)
class Notes:
    """All notes of a rank at a moment."""

    words: tuple[int, ...]
    activity: str
    records: Mapping[int, Record] = field(default_factory=dict)
    """Those that are still in the ring, by number."""
    of_channel: Mapping[Channel, Mapping[int, Record]] = field(default_factory=dict)
    """The same by channel, and by their count there; the newest is the last."""

    def word(self, word: Word) -> int:
        """Return one of the words."""
        return self.words[word]

    def count(self, channel: Channel) -> int:
        """Return how many operations of a channel were entered, as far as the ring tells."""
        return max(self.of_channel.get(channel, ()), default=0)

    @property
    def waits_in(self) -> Record | None:
        """The operation that blocks the training thread, if it is known."""
        return self.records.get(self.word(Word.WAITS_IN) - 1)

    @property
    def waits(self) -> bool:
        """Whether the training thread is blocked by other ranks."""
        return bool(self.word(Word.WAITS_IN) or self.word(Word.BLOCKED_ON))

    @property
    def blocked_on(self) -> int | None:
        """The rank that is waited for, where one is."""
        return self.word(Word.BLOCKED_ON) - 1 if self.word(Word.BLOCKED_ON) else None


class Heartbeat:
    """The memory of one rank.

    Args:
        process: its id.
        file: descriptor of the memory, there.
    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, process: int, file: int) -> None:
        descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, NUM_BYTES)
        finally:
            os.close(descriptor)
        self._table_length, self._table = 0, list[Channel]()

    def words(self) -> tuple[int, ...]:
        """Return the words alone."""
        return _WORDS.unpack_from(self._memory)

    def notes(self) -> Notes:
        """Return all."""
        words = self.words()
        text = self._memory[TEXT_OFFSET : TEXT_OFFSET + TEXT_BYTES].rstrip(b"\0")
        channels = self._channels(words[Word.TABLE_LENGTH])
        records: dict[int, Record] = {}
        by_count: list[dict[int, Record]] = [{} for _ in channels]
        last = words[Word.NUM_RECORDS]
        ring = self._memory[RING_OFFSET:TABLE_OFFSET]
        oldest = last % NUM_RECORDS * RECORD.size
        for mark, channel, operation, count, size, code in RECORD.iter_unpack(
            ring[oldest:] + ring[:oldest]
        ):
            number = mark - 1
            is_there = 0 <= number < last and number >= last - NUM_RECORDS
            if is_there and channel < len(channels) and operation < len(OPERATIONS):
                name = OPERATIONS[operation]
                record = Record(number, channels[channel], name, count, size, code)
                records[number] = by_count[channel][count] = record
        of_channel = dict(zip(channels, by_count, strict=True))
        return Notes(words, text.decode(errors="replace"), records, of_channel)

    def _channels(self, length: int) -> list[Channel]:
        if length != self._table_length:
            self._table_length, self._table = length, self._read_table(length)
        return self._table

    def _read_table(self, length: int) -> list[Channel]:
        found: list[Channel] = []
        text = self._memory[TABLE_OFFSET : TABLE_OFFSET + length].decode(errors="replace")
        for line in text.splitlines():
            name, ranks, tag = line.rsplit("|", 2)
            members = tuple(map(int, ranks.split(",")))
            occurrence = sum((c.ranks, c.tag) == (members, int(tag)) for c in found)
            found.append(Channel(members, int(tag), occurrence, name))
        return found

    def write(self, word: Word, value: int) -> None:
        """Set a word."""
        struct.pack_into("<Q", self._memory, 8 * word, value)

    def write_text(self, offset: int, text: bytes) -> None:
        """Write bytes at a place."""
        self._memory[offset : offset + len(text)] = text
