"""The program that reads stdout may end first, as `head` does in `tool --help | head -1`."""

from __future__ import annotations

import io
import os
import select
import sys

from megatron.core.foundation.errors import MegatronError


class OutputClosedError(MegatronError):
    """The program that read the output of this program has ended."""


def cause_of(error: BaseException) -> BaseException:
    """Return `OutputClosedError` if `print` raised for lack of a reader, else the error itself.

    Afterwards stdout is discarded: the interpreter would report an error in its last flush.
    """
    if not isinstance(error, BrokenPipeError) or not _is_closed():
        return error
    _discard()
    return OutputClosedError(
        "the program that read the output of this one has ended, so nothing can be printed.",
        rule="a program can write to a pipe as long as the pipe has a reader",
        fix="write the output to a file, or to a program that reads all of it",
    )


def write(text: str) -> None:
    """Print `text`, or discard it if stdout has no reader."""
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        _discard()


def _is_closed() -> bool:
    """Return whether stdout is a pipe or socket without a reader."""
    try:
        descriptor = sys.stdout.fileno()
    except (AttributeError, io.UnsupportedOperation):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard() -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
