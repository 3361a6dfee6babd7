"""A rank notes where it is: the step, the instruction of the schedule, the collective, the peers.

A note is a store or two into memory that the watchdog reads; without a watchdog into memory that
nobody reads.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation.heartbeat.collective_log import CollectiveLog
from megatron.core.foundation.heartbeat.layout import (
    MESSAGE_BYTES,
    MESSAGE_OFFSET,
    NUM_BYTES,
    NUM_RECORDS,
    OPERATIONS,
    RECORD,
    RING_OFFSET,
    TABLE_BYTES,
    TABLE_OFFSET,
    TEXT_BYTES,
    TEXT_OFFSET,
    Word,
)
from megatron.core.foundation.heartbeat.waits import PEERS, Channel, Waits

Function = TypeVar("Function", bound=Callable[..., Any])

_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
# Constants of the module: a member of an enumeration costs as much as the store.
_RECORDS, _WAITS, _INSTRUCTION = int(Word.NUM_RECORDS), int(Word.WAITS_IN), int(Word.INSTRUCTION)
_BLOCKED, _RECORD_BYTES = int(Word.BLOCKED_ON), RECORD.size


class Place:
    """Where this process is in the program."""

    def __init__(self) -> None:
        self.is_aborted = False
        """Whether the ranks give up the groups that they have; who waits for a peer raises."""
        self._channels: dict[tuple[int, int], list[int]] = {}  # group, tag -> number, uses
        self._num_channels = 0
        self._num_records = 0
        self._channel_of = [0] * NUM_RECORDS  # by number of the record, modulo their number
        self.waits = Waits()
        self.log: CollectiveLog | None = None
        """Takes the times of all operations while a profile runs."""
        self._activity, self._has_evaluated = "", False
        self.file: int | None = None
        """Descriptor of the memory, once it is shared."""
        self.stacks_file: int | None = None
        """Descriptor of what the stacks of this process are written to, once they can be."""
        self._attach(bytearray(NUM_BYTES))

    def _attach(self, memory: Any) -> None:
        self.memory = memory
        self.words = memoryview(memory)[: 8 * len(Word)].cast("Q")

    def share(self) -> int:
        """Move the notes to memory that others can map through the descriptor returned.

        Raises:
            OSError: the system has no such memory.
        """
        if self.file is None:
            file = os.memfd_create("heartbeat")
            os.ftruncate(file, NUM_BYTES)
            shared = mmap.mmap(file, NUM_BYTES)
            shared[:] = bytes(self.memory)
            self.file = file
            self._attach(shared)
        return self.file

    def begin_anew(self) -> None:
        """Forget the operations of groups that are gone, for the first watchdog of new ones."""
        self.is_aborted = False
        self.waits.switch(None)
        self._channels, self._num_channels, self._num_records = {}, 0, 0
        for word in Word:
            if word not in (Word.BEATS, Word.NUM_STEPS, Word.GENERATION):
                self.words[word] = 0
        self.memory[RING_OFFSET:TABLE_OFFSET] = bytes(TABLE_OFFSET - RING_OFFSET)
        self.words[Word.GENERATION] += 1

    # Collectives ----------------------------------------------------------------------------

    def enter(self, operation: str, group: Any, num_elements: int, tag: int = 0) -> int:
        """Note the start of an operation, and return 1 + the number of its record.

        Args:
            group: a process group.
            tag: tells operations apart that are matched apart. It is negative for messages between
                two ranks: -1 - source * size - target.
        """
        channel = self._channels.get((id(group), tag))
        if channel is None:
            channel = self._open_channel(group, tag)
        number, words = self._num_records, self.words
        at = number % NUM_RECORDS
        name, channel[1] = channel[0], channel[1] + 1
        RECORD.pack_into(
            self.memory,
            RING_OFFSET + at * _RECORD_BYTES,
            number + 1,
            name,
            _NUMBER[operation],
            channel[1],
            num_elements,
            words[_INSTRUCTION],
        )
        self._channel_of[at] = name
        self._num_records = words[_RECORDS] = number + 1
        if self.log is not None:
            self.log.enter(number + 1, operation, channel[0], channel[1], num_elements)
        return number + 1

    def count(self, group: Any, tag: int = 0) -> int:
        """Return how many operations of a channel were entered."""
        return self._channels.get((id(group), tag), (0, 0))[1]

    @property
    def newest(self) -> int:
        """1 + the number of the newest record."""
        return self._num_records

    def wait_in(self, record: int) -> None:
        """Note that the training thread blocks in the operation of a record; 0: not any more."""
        self.words[_WAITS] = record
        self.waits.switch(self._channel_of[(record - 1) % NUM_RECORDS] if record else None)
        if self.log is not None:
            self.log.wait_in(record)

    def wait_for(self, rank: int | None) -> None:
        """Note for whom; None: for nobody any more."""
        self.words[_BLOCKED] = 0 if rank is None else rank + 1
        if rank is not None and self.waits.waits_for is None:
            self.waits.switch(PEERS)
        elif rank is None and self.waits.waits_for == PEERS:
            self.waits.switch(None)

    def _open_channel(self, group: Any, tag: int) -> list[int]:
        """Write who belongs to a group into the table."""
        key = (id(group), tag)
        channel = self._channels[key] = [self._num_channels, 0]
        weakref.finalize(group, self._channels.pop, key, None).atexit = False
        self._num_channels += 1
        ranks, name = describe_group(group)
        self.waits.add_channel(channel[0], Channel(name, tuple(ranks), tag))
        self._write_table(f"{name}|{','.join(map(str, ranks))}|{tag}")
        return channel

    def _write_table(self, line: str) -> None:
        text, length = f"{line}\n".encode(), self.words[Word.TABLE_LENGTH]
        if length + len(text) <= TABLE_BYTES:
            start = TABLE_OFFSET + length
            self.memory[start : start + len(text)] = text
            self.words[Word.TABLE_LENGTH] = length + len(text)

    # The rest -------------------------------------------------------------------------------

    def instruct(self, code: int) -> None:
        """Note the instruction of the schedule that begins; see `instruction_code`."""
        self.words[_INSTRUCTION] = code

    def note(self, word: Word, value: int) -> None:
        """Set a word."""
        self.words[word] = value

    def say(self, activity: str) -> None:
        """Note what is being done, in a few words."""
        text = activity.encode()[: TEXT_BYTES - 1]
        self.memory[TEXT_OFFSET : TEXT_OFFSET + TEXT_BYTES] = text.ljust(TEXT_BYTES, b"\0")
        self.waits.begin_activity(activity)
        is_again = self._has_evaluated and activity == "evaluating"
        self.note(Word.IS_TRAINING, int(activity == "training" or is_again))
        self._has_evaluated |= self._activity == "evaluating"
        self._activity = activity

    def verdict(self) -> tuple[int, str]:
        """Return the exit code that the watchdog asks for, and why; 0 without one."""
        text = bytes(self.memory[MESSAGE_OFFSET : MESSAGE_OFFSET + MESSAGE_BYTES])
        return self.words[Word.VERDICT], text.rstrip(b"\0").decode(errors="replace")


def describe_group(group: Any) -> tuple[Sequence[int], str]:
    """Return the ranks of a process group among all processes, and its name."""
    return dist.get_process_group_ranks(group), str(getattr(group, "group_desc", "") or "group")


PLACE = Place()
"""Of this process."""


def noted(operation: str, *, group_at: int | None = None) -> Callable[[Function], Function]:
    """Return a decorator that notes the operation while the function starts it, or runs it.

    Args:
        group_at: which argument the group is; None: the function is a method of an object with a
            group, and perhaps a tag. The tensor is the first argument.
    """
    first = 0 if group_at is not None else 1

    def decorate(function: Function) -> Function:
        @wraps(function)
        def with_note(*arguments: Any, **named: Any) -> Any:
            if group_at is None:
                owner = arguments[0]
                group, tag = owner.group, getattr(owner, "tag", 0)
            else:
                group, tag = arguments[group_at] if len(arguments) > group_at else named["group"], 0
            if group.size() == 1:
                return function(*arguments, **named)
            x = arguments[first] if len(arguments) > first else None
            count = x.numel() if isinstance(x, Tensor) else 0
            place = PLACE
            record = place.enter(operation, group, count, tag)
            place.wait_in(record)
            result = function(*arguments, **named)
            place.wait_in(0)
            if place.log is not None:
                place.log.started(record, result)
            return result

        return with_note  # type: ignore[return-value]

    return decorate
