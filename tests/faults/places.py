"""Whether the place that a watchdog names is where the rank was, by Python's stack and the log."""

import linecache
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from megatron.core.foundation.flight_recorder import OPERATIONS

_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (\S+)$', re.MULTILINE)
_METHODS = {
    "receive_activation": "recv_activation",
    "receive_gradient": "recv_gradient",
    "gather_parameters": "param_gather",
    "open_grad_sync": "grad_sync",
}
"""Of the executor, where they are not called like the instruction."""
_BLOCKING = (("work.py", "handle.wait()"),)
"""File and line in which a rank waits."""
_NOTES = ("foundation/flight_recorder.py", "resilience/status.py")


class Frame(NamedTuple):
    """A line of a stack."""

    file: str
    line: int
    function: str

    def is_in(self, file: str, function: str = "") -> bool:
        """Return whether it is one of a file, and of a function."""
        return self.file.endswith(file) and function in ("", self.function)

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line)


def main_stack(text: str) -> list[Frame]:
    """Return the stack of the thread that trains, the innermost frame first."""
    for thread in re.split(r"^(?:Current t|T)hread ", text, flags=re.MULTILINE):
        frames = [Frame(file, int(line), name) for file, line, name in _FRAME.findall(thread)]
        if frames and frames[-1].function == "<module>":
            return frames
    return []


def check_place(record: dict[str, Any], rank: int, last_step: int) -> list[str]:
    """Return what the stack of a rank says otherwise than its place.

    Args:
        record: failure.json.
        last_step: the last one that the log shows.
    """
    where, stack = record["where"], main_stack(record["stacks"][str(rank)])
    if not stack:
        return [f"no stack of rank {rank}"]
    said = re.search(r"iteration (\d+)", where)
    problems = []
    if said is None or int(said[1]) not in (last_step, last_step + 1):
        problems.append(f"the last step of the log is {last_step}")
    if any(frame.is_in(name) for frame in stack[:2] for name in _NOTES):
        return problems  # it is just noting its place
    problems += _contradictions(where, stack)
    shown = " < ".join(f"{f.file.rpartition('/')[2]}:{f.line} {f.function}" for f in stack[:14])
    return [f"{problem}, said is {where!r}, the stack is {shown}" for problem in problems]


def _contradictions(where: str, stack: list[Frame]) -> Iterator[str]:
    activity = where.partition(",")[0]
    doing = _activity(stack)
    if doing != activity:
        yield f"the rank is {doing}"
    instruction = _instruction(stack)
    words = where.split(", ")
    if instruction is not None and not any(w.startswith(f"{instruction} of") for w in words):
        yield f"the rank runs {instruction}"
    waits = any(f.is_in(file) and line in f.source for f in stack for file, line in _BLOCKING)
    if waits and not re.search(r"waits (in|for)", where):
        yield "the rank waits"
    operation = _operation(stack)
    if operation is not None and f"waits in {operation}" not in where:
        yield f"the rank waits in {operation}"


def _activity(stack: list[Frame]) -> str:
    for frame in stack:
        if frame.is_in("hooks/evaluation.py", "evaluate"):
            return "evaluating"
        if frame.is_in("hooks/save.py", "_save"):
            return "saving a checkpoint"
    return "training"


def _instruction(stack: list[Frame]) -> str | None:
    """Return the instruction of the schedule, by the method of the executor that runs it."""
    for inner, outer in zip(stack, stack[1:], strict=False):
        is_run = outer.is_in("pipeline_parallel/executor.py", "run")
        if is_run and inner.is_in("pipeline_parallel/executor.py"):
            return _METHODS.get(inner.function, inner.function)
    return None


def _operation(stack: list[Frame]) -> str | None:
    """Return the collective that blocks, where the function that waits is the one that began it."""
    waits = False
    for frame in stack:
        if frame.is_in("transport/work.py"):
            waits = waits or "handle.wait()" in frame.source
        elif waits:
            is_known = frame.is_in("transport/collectives.py") and frame.function in OPERATIONS
            return frame.function if is_known else None
    return None


def check_chain(record: dict[str, Any], rank: int) -> list[str]:
    """Return which ranks are said to wait, but not in the end for the one that hangs."""
    waiting = dict(_waiting(record["waiting"]))
    problems = []
    if not waiting:
        problems.append("nobody is said to wait")
    for first in waiting:
        reached, next_ones = {first}, list(waiting[first])
        while next_ones:
            one = next_ones.pop()
            if one not in reached:
                reached.add(one)
                next_ones += waiting.get(one, [])
        if rank not in reached:
            problems.append(f"rank {first} is not said to wait for rank {rank}")
    return [f"{problem}: {record['waiting']}" for problem in problems]


def _waiting(lines: list[str]) -> Iterator[tuple[int, list[int]]]:
    for line in lines:
        waits = re.search(r" for rank ([\d, ]+)$", line)
        targets = waits[1].split(", ") if waits else []
        yield int(line.split()[1]), [int(number) for number in targets]
