"""Read the flight recorder of another process. The module imports no torch."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron.core.foundation import flight_recorder as recorder
from megatron.core.foundation.flight_recorder import Channel, Field

_FIELDS = struct.Struct(f"<{len(Field)}Q")


@dataclass(slots=True)  # not frozen: this makes a reading with a thousand operations 3x as fast
class Operation:
    """An operation that a rank has entered."""

    number: int
    channel: Channel
    name: str
    count: int
    """Position among the operations of its channel, from 1."""
    num_elements: int
    instruction: int

    def describe(self, instructions: Mapping[int, str]) -> str:
        """Return the operation in words, for messages."""
        size = f" of {self.num_elements} elements" if self.num_elements else ""
        during = show_instruction(self.instruction, instructions)
        return (
            f"{self.name}{size}, number {self.count} on {self.channel.describe()}"
            f"{', begun in ' + during if during else ''}"
        )


def show_instruction(code: int, names: Mapping[int, str]) -> str:
    """Return an instruction of the schedule in words; "" outside of a schedule."""
    if not code:
        return ""
    number = (code >> 48) - 1
    chunk, microbatch = code >> 32 & recorder.NO_CHUNK, code & recorder.NO_MICROBATCH
    of = "" if microbatch == recorder.NO_MICROBATCH else f" of micro batch {microbatch}"
    return f"{names.get(number, number)}{of}" + (
        "" if chunk == recorder.NO_CHUNK else f", chunk {chunk}"
    )


@dataclass(frozen=True)
class Snapshot:
    """The record of a rank at one moment."""

    fields: tuple[int, ...]
    activity: str
    operations: Mapping[int, Operation] = field(default_factory=dict)
    """The operations that the ring buffer holds, by number."""
    of_channel: Mapping[Channel, Mapping[int, Operation]] = field(default_factory=dict)
    """The same operations by channel and by count, the newest last."""

    def count(self, channel: Channel) -> int:
        """Return the number of operations that the rank has entered in a channel.

        The number is 0 if the ring buffer holds no operation of the channel.
        """
        return max(self.of_channel.get(channel, ()), default=0)

    @property
    def waits_in(self) -> Operation | None:
        """The operation that blocks the training thread, or None if unknown."""
        return self.operations.get(self.fields[Field.WAITS_IN] - 1)

    @property
    def waits(self) -> bool:
        """Whether other ranks block the training thread."""
        return bool(self.fields[Field.WAITS_IN] or self.fields[Field.BLOCKED_ON])

    @property
    def blocked_on(self) -> int | None:
        """The rank for which this rank waits, or None if unknown."""
        return self.fields[Field.BLOCKED_ON] - 1 if self.fields[Field.BLOCKED_ON] else None


class RecorderReader:
    """The mapped recorder of one rank.

    Args:
        process: the id of its process.
        file: descriptor of the recorder's memory in this process.
    Raises:
        OSError: the memory cannot be opened.
    """

    def __init__(self, process: int, file: int) -> None:
        descriptor = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        try:
            self._memory = mmap.mmap(descriptor, recorder.NUM_BYTES)
        finally:
            os.close(descriptor)
        self._table_length, self._table = 0, list[Channel]()

    def fields(self) -> tuple[int, ...]:
        """Return the fields."""
        return _FIELDS.unpack_from(self._memory)

    def snapshot(self) -> Snapshot:
        """Return the whole record."""
        fields = self.fields()
        text = self._memory[
            recorder.TEXT_OFFSET : recorder.TEXT_OFFSET + recorder.TEXT_BYTES
        ].rstrip(b"\0")
        if fields[Field.TABLE_LENGTH] != self._table_length:
            self._table_length = fields[Field.TABLE_LENGTH]
            self._table = self._read_table()
        channels = self._table
        operations: dict[int, Operation] = {}
        by_count: list[dict[int, Operation]] = [{} for _ in channels]
        last = fields[Field.NUM_RECORDS]
        ring = self._memory[recorder.RING_OFFSET : recorder.TABLE_OFFSET]
        oldest = last % recorder.NUM_RECORDS * recorder.RECORD.size
        for mark, channel, operation, count, size, code in recorder.RECORD.iter_unpack(
            ring[oldest:] + ring[:oldest]
        ):
            number = mark - 1
            is_there = 0 <= number < last and number >= last - recorder.NUM_RECORDS
            if is_there and channel < len(channels) and operation < len(recorder.OPERATIONS):
                name = recorder.OPERATIONS[operation]
                found = Operation(number, channels[channel], name, count, size, code)
                operations[number] = by_count[channel][count] = found
        of_channel = dict(zip(channels, by_count, strict=True))
        return Snapshot(fields, text.decode(errors="replace"), operations, of_channel)

    def _read_table(self) -> list[Channel]:
        found: list[Channel] = []
        text = self._memory[recorder.TABLE_OFFSET : recorder.TABLE_OFFSET + self._table_length]
        for line in text.decode(errors="replace").splitlines():
            name, ranks, tag = line.rsplit("|", 2)
            members = tuple(map(int, ranks.split(",")))
            occurrence = sum((c.ranks, c.tag) == (members, int(tag)) for c in found)
            found.append(Channel(members, int(tag), occurrence, name))
        return found

    def set_field(self, name: Field, value: int) -> None:
        """Set a field in the rank's memory."""
        struct.pack_into("<Q", self._memory, 8 * name, value)

    def give_verdict(self, code: int, message: str) -> None:
        """Make the rank end with an exit code and a message."""
        text = message.encode()[: recorder.MESSAGE_BYTES - 1].ljust(recorder.MESSAGE_BYTES, b"\0")
        self._memory[recorder.MESSAGE_OFFSET : recorder.MESSAGE_OFFSET + recorder.MESSAGE_BYTES] = (
            text
        )
        self.set_field(Field.VERDICT, code)
