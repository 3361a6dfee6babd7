"""The flight recorder of a rank: its step, instruction of the schedule, collective and waits.

Recording costs one or two stores into memory, which the watchdog of the machine can map
(`megatron.resilience.watchdog`):

    fields | activity | message of the watchdog | ring of operations | table of channels

Fields are unsigned 64-bit integers, each written by one store. There are no locks: if a reader
finds a half-written entry of the ring, it reads the entry again later. The module does not import
torch, so that the watchdog starts fast.
"""

from __future__ import annotations

import enum
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

TEXT_OFFSET, TEXT_BYTES = 256, 128
"""Position and length of the activity."""
MESSAGE_OFFSET, MESSAGE_BYTES = 512, 3584
RING_OFFSET, NUM_RECORDS = 4096, 1024
RECORD = struct.Struct("<QIIQQQ")
"""Number + 1, channel, operation, count within the channel, elements, instruction."""
TABLE_OFFSET = RING_OFFSET + NUM_RECORDS * RECORD.size
TABLE_BYTES = 1 << 16
NUM_BYTES = TABLE_OFFSET + TABLE_BYTES


class Field(enum.IntEnum):
    """Position of each field."""

    BEATS = 0
    """Heartbeat, counted by a thread: stops if the process is stopped or a thread holds the GIL."""
    NUM_RECORDS = 1
    """Operations that the rank has entered so far."""
    WAITS_IN = 2
    """1 + the number of the operation that blocks the training thread; 0 while it computes."""
    INSTRUCTION = 3
    """Instruction of the schedule: 1 + the operation, chunk and micro batch in 16, 16 and 32 bits;
    0 outside of the schedule."""
    ITERATION = 4
    CHECKPOINT = 5
    """1 + the iteration of the newest good checkpoint; 0 before the first one."""
    BLOCKED_ON = 6
    """1 + the rank that this rank waits for; 0 if it is unknown or the rank does not wait."""
    TABLE_LENGTH = 7
    CLOSED = 8
    """1: the run has ended, and the watchdog ignores this rank."""
    VERDICT = 9
    """Written by the watchdog: the exit code that the rank must end with; 0: continue."""
    NUM_STEPS = 10
    """Steps that this process has finished."""
    IS_TRAINING = 11
    """1 in steps and in evaluations except the first; 0 in phases of unknown length: setup, the
    first evaluation, a save."""
    ASKS = 12
    """1: an operation failed, and the rank requests a comparison of all ranks' operations."""
    ANSWERED = 13
    """1: the watchdog has compared the operations, and they match."""
    ATTEMPT = 14
    """Number of the current set of process groups; a watchdog serves one set."""


# Constants of the module: a member of an enumeration costs as much as the store.
_RECORDS, _WAITS, _INSTRUCTION = int(Field.NUM_RECORDS), int(Field.WAITS_IN), int(Field.INSTRUCTION)
_BLOCKED, _RECORD_BYTES = int(Field.BLOCKED_ON), RECORD.size

NO_CHUNK, NO_MICROBATCH = 0xFFFF, 0xFFFFFFFF

OPERATIONS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier",
    "all_gather_object", "broadcast_object", "gather_object", "scatter_object", "ring_shift",
    "send", "recv",
)  # fmt: skip
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}


def instruction_code(operation: int, microbatch: int, chunk: int) -> int:
    """Return the field of an instruction of the schedule; -1 is no micro batch or chunk."""
    return (1 + operation) << 48 | (chunk & NO_CHUNK) << 32 | microbatch & NO_MICROBATCH


@dataclass(frozen=True)
class Channel:
    """Operations that ranks match in one order: of a group, or messages of one rank to another."""

    ranks: tuple[int, ...]
    """Global ranks of the group."""
    tag: int
    """Negative for messages between two ranks: -1 - source * size - target."""
    occurrence: int = 0
    """Number of this group among groups of the same ranks."""
    name: str = field(default="group", compare=False)

    def describe(self) -> str:
        """Return the channel as text for messages."""
        return f"{self.name} {list(self.ranks)}"

    def ends(self) -> tuple[int, int] | None:
        """Return the global ranks (source, target) of a channel of messages, else None."""
        if self.tag >= 0:
            return None
        source, target = divmod(-1 - self.tag, len(self.ranks))
        return self.ranks[source], self.ranks[target]


DATA, PEERS = -1, -2
"""Waits without a channel: for the loader; for another rank outside of any operation."""


class Waits:
    """Seconds that the training thread has waited, by the kind of wait: sums that only grow.

    A caller copies the sums before and after the part that it measures. The clock is the host's:
    if only the stream of an accelerator waits and the host continues, nothing is counted.
    """

    def __init__(self) -> None:
        self.channels: dict[int, Channel] = {}
        self.seconds: dict[int, float] = {DATA: 0.0, PEERS: 0.0}
        """Seconds by number of the channel, or DATA, or PEERS."""
        self.loading_cpu_s = 0.0
        """Processor seconds of the training thread in its loader."""
        self.activity_s: dict[str, float] = {}
        """Seconds by activity of the run: training, evaluating, saving a checkpoint."""
        self.waits_for: int | None = None
        """Current wait: a channel, DATA or PEERS; None while the thread computes."""
        self._since = 0.0
        self._activity, self._active_since = "", time.perf_counter()

    def switch(self, waits_for: int | None) -> None:
        """Begin another wait; None: the thread computes."""
        now = time.perf_counter()
        if self.waits_for is not None:
            self.seconds[self.waits_for] += now - self._since
        self.waits_for, self._since = waits_for, now

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Count the block as waiting for data."""
        began = time.thread_time()
        self.switch(DATA)
        try:
            yield
        finally:
            self.switch(None)
            self.loading_cpu_s += time.thread_time() - began

    def begin_activity(self, activity: str) -> None:
        """Begin another activity."""
        self.update_activity()
        self._activity = activity

    def update_activity(self) -> None:
        """Add the time of the current activity up to now."""
        now = time.perf_counter()
        spent = self.activity_s.get(self._activity, 0.0)
        self.activity_s[self._activity] = spent + now - self._active_since
        self._active_since = now


class RankProgress:
    """The recorder of this process."""

    def __init__(self) -> None:
        self.is_aborted = False
        """Whether the ranks abandon their groups: a rank that waits for a peer raises."""
        self._channels: dict[tuple[int, int], list[int]] = {}  # group, tag -> number, uses
        self._num_channels = 0
        self._num_records = 0
        self._channel_of = [0] * NUM_RECORDS  # by number of the record, modulo their number
        self.waits = Waits()
        self._activity, self._has_evaluated = "", False
        self.file: int | None = None
        """Descriptor of the memory, once it is shared."""
        self.stacks_file: int | None = None
        """Descriptor of the file to which `faulthandler` writes the stacks of this process."""
        self._attach(bytearray(NUM_BYTES))

    def _attach(self, memory: Any) -> None:
        self.memory = memory
        self.fields = memoryview(memory)[: 8 * len(Field)].cast("Q")

    def share(self) -> int:
        """Move the record to memory that others can map through the descriptor returned.

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

    def reset(self) -> None:
        """Forget the operations of destroyed groups, and begin another attempt."""
        self.is_aborted = False
        self.waits.switch(None)
        self._channels, self._num_channels, self._num_records = {}, 0, 0
        for each in Field:
            if each not in (Field.BEATS, Field.NUM_STEPS, Field.ATTEMPT):
                self.fields[each] = 0
        self.memory[RING_OFFSET:TABLE_OFFSET] = bytes(TABLE_OFFSET - RING_OFFSET)
        self.fields[Field.ATTEMPT] += 1

    def begin_op(self, operation: str, group: Any, num_elements: int, tag: int = 0) -> int:
        """Record the start of an operation, and return 1 + the number of its record.

        Args:
            group: a process group.
            tag: separates operations of one group that ranks match independently; see
                `Channel.tag`.
        """
        channel = self._channels.get((id(group), tag))
        if channel is None:
            channel = self._open_channel(group, tag)
        number, fields = self._num_records, self.fields
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
            fields[_INSTRUCTION],
        )
        self._channel_of[at] = name
        self._num_records = fields[_RECORDS] = number + 1
        return number + 1

    def count(self, group: object, tag: int = 0) -> int:
        """Return how many operations of a channel this rank has entered."""
        return self._channels.get((id(group), tag), (0, 0))[1]

    @property
    def newest(self) -> int:
        """1 + the number of the newest record."""
        return self._num_records

    def wait_in(self, record: int) -> None:
        """Record that the training thread blocks in an operation; 0: it continues."""
        self.fields[_WAITS] = record
        self.waits.switch(self._channel_of[(record - 1) % NUM_RECORDS] if record else None)

    def wait_for(self, rank: int | None) -> None:
        """Record for which rank the training thread waits; None: it continues."""
        self.fields[_BLOCKED] = 0 if rank is None else rank + 1
        if rank is not None and self.waits.waits_for is None:
            self.waits.switch(PEERS)
        elif rank is None and self.waits.waits_for == PEERS:
            self.waits.switch(None)

    def _open_channel(self, group: Any, tag: int) -> list[int]:
        """Write the ranks of a group into the table."""
        key = (id(group), tag)
        channel = self._channels[key] = [self._num_channels, 0]
        weakref.finalize(group, self._channels.pop, key, None).atexit = False
        self._num_channels += 1
        ranks, name = describe_group(group)
        self.waits.channels[channel[0]] = Channel(tuple(ranks), tag, name=name)
        self.waits.seconds[channel[0]] = 0.0
        text = f"{name}|{','.join(map(str, ranks))}|{tag}\n".encode()
        length = self.fields[Field.TABLE_LENGTH]
        if length + len(text) <= TABLE_BYTES:
            start = TABLE_OFFSET + length
            self.memory[start : start + len(text)] = text
            self.fields[Field.TABLE_LENGTH] = length + len(text)
        return channel

    def set_instruction(self, code: int) -> None:
        """Record the instruction of the schedule that begins; see `instruction_code`."""
        self.fields[_INSTRUCTION] = code

    def set_field(self, name: Field, value: int) -> None:
        """Set a field."""
        self.fields[name] = value

    def set_activity(self, activity: str) -> None:
        """Record the activity of the run, in a few words."""
        text = activity.encode()[: TEXT_BYTES - 1]
        self.memory[TEXT_OFFSET : TEXT_OFFSET + TEXT_BYTES] = text.ljust(TEXT_BYTES, b"\0")
        self.waits.begin_activity(activity)
        is_again = self._has_evaluated and activity == "evaluating"
        self.set_field(Field.IS_TRAINING, int(activity == "training" or is_again))
        self._has_evaluated |= self._activity == "evaluating"
        self._activity = activity

    def verdict(self) -> tuple[int, str]:
        """Return the exit code and the message of the watchdog; (0, "") without a verdict."""
        text = bytes(self.memory[MESSAGE_OFFSET : MESSAGE_OFFSET + MESSAGE_BYTES])
        return self.fields[Field.VERDICT], text.rstrip(b"\0").decode(errors="replace")


def describe_group(group: Any) -> tuple[Sequence[int], str]:
    """Return the global ranks of a process group, and its name."""
    import torch.distributed as dist  # the watchdog imports this module without torch

    return dist.get_process_group_ranks(group), str(getattr(group, "group_desc", "") or "group")


PROGRESS = RankProgress()
"""The recorder of this process."""


def recorded(operation: str, *, group_at: int | None = None) -> Callable[[Function], Function]:
    """Return a decorator that records the operation while the function starts or runs it.

    Args:
        group_at: position of the group among the arguments; the tensor is the first argument.
            None: the function is a method, and its object has a group and perhaps a tag.
    """
    first = 0 if group_at is not None else 1

    def decorate(function: Function) -> Function:
        @wraps(function)
        def with_record(*arguments: Any, **named: Any) -> Any:
            if group_at is None:
                owner = arguments[0]
                group, tag = owner.group, getattr(owner, "tag", 0)
            else:
                group, tag = arguments[group_at] if len(arguments) > group_at else named["group"], 0
            if group.size() == 1:
                return function(*arguments, **named)
            x = arguments[first] if len(arguments) > first else None
            num_elements = getattr(x, "numel", None)
            progress = PROGRESS
            record = progress.begin_op(
                operation, group, 0 if num_elements is None else num_elements(), tag
            )
            progress.wait_in(record)
            result = function(*arguments, **named)
            progress.wait_in(0)
            return result

        return with_record  # type: ignore[return-value]

    return decorate
