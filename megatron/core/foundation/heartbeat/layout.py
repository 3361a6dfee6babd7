"""The bytes of a heartbeat: written by a rank with a few stores, read by a process beside it.

    words | message | ring of records | table of channels

Words are unsigned 64-bit integers, each written at once. Nothing is locked: a reader that meets a
record while it is written sees a mixture, and looks again later.
"""

from __future__ import annotations

import enum
import struct

MESSAGE_OFFSET, MESSAGE_BYTES = 512, 3584
RING_OFFSET, NUM_RECORDS = 4096, 1024
RECORD = struct.Struct("<QIIQQQ")
"""Number + 1, channel, operation, count within the channel, elements, instruction."""
TABLE_OFFSET = RING_OFFSET + NUM_RECORDS * RECORD.size
TABLE_BYTES = 1 << 16
NUM_BYTES = TABLE_OFFSET + TABLE_BYTES
TEXT_OFFSET, TEXT_BYTES = 256, 128
"""What the rank says it does."""


class Word(enum.IntEnum):
    """Which word is what."""

    BEATS = 0
    """Counted by a thread: it stands still if the process is stopped or its interpreter locked."""
    NUM_RECORDS = 1
    """Operations that were entered so far."""
    WAITS_IN = 2
    """1 + the number of the record whose operation blocks the training thread; 0: it computes."""
    INSTRUCTION = 3
    """Of the schedule: 1 + the operation, chunk and micro batch in 16, 16 and 32 bits; 0: none."""
    ITERATION = 4
    CHECKPOINT = 5
    """1 + the iteration of the newest good checkpoint; 0: none."""
    BLOCKED_ON = 6
    """1 + the rank that is waited for, where one is; 0: none, or it is not known."""
    TABLE_LENGTH = 7
    CLOSED = 8
    """1: the run has ended, and nobody has to watch it."""
    VERDICT = 9
    """Written by the watchdog: the exit code with which the rank shall end; 0: go on."""
    NUM_STEPS = 10
    """Steps that this process has finished."""
    IS_TRAINING = 11
    """1 in steps, and in evaluations from the second one on; 0 where anything may take long: setup,
    the first evaluation, a save."""
    ASKS = 12
    """1: an operation failed, and the rank asks whether the ranks were in different ones."""
    ANSWERED = 13
    """1: the watchdog has looked, and they were not."""
    GENERATION = 14
    """Counts the sets of process groups; a watchdog watches one of them."""


NO_CHUNK, NO_MICROBATCH = 0xFFFF, 0xFFFFFFFF

OPERATIONS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "barrier",
    "all_gather_object", "broadcast_object", "gather_object", "scatter_object", "ring_shift",
    "send", "recv",
)  # fmt: skip
SAME_SIZE = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
"""Operations to which all ranks of a group bring as many elements."""


def instruction_code(operation: int, microbatch: int, chunk: int) -> int:
    """Return the word of an instruction of the schedule; -1 is no micro batch or chunk."""
    return (1 + operation) << 48 | (chunk & NO_CHUNK) << 32 | microbatch & NO_MICROBATCH
