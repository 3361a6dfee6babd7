"""Time that importing the library adds to importing torch and numpy.

    python -m benchmarks.import_time [--rounds 15]        about a minute on two cores

Each statement runs in fresh processes, in turns with a statement that imports torch and numpy
alone. The clock of a process runs from its first line until the statement is done; the start of the
interpreter is not included. The table has medians over the rounds of wall and processor seconds,
and of their difference from torch and numpy in the same round. The exit status is 1 if
`megatron.core`, with or without a GPT model, adds more than 0.25 s of processor time.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line

ALONE = "import torch, numpy"
WITH_A_MODEL = "these, TransformerConfig, GPTModel"
STATEMENTS = {
    "torch, numpy": ALONE,
    "megatron.core": f"{ALONE}; import megatron.core",
    "mpu, parallel_state, tensor_parallel": f"{ALONE}; "
    "from megatron.core import mpu, parallel_state, tensor_parallel",
    WITH_A_MODEL: f"{ALONE}; "
    "from megatron.core import mpu, parallel_state, tensor_parallel; "
    "from megatron.core.transformer import TransformerConfig; "
    "from megatron.core.models.gpt import GPTModel",
    "megatron.training.pretrain": f"{ALONE}; from megatron.training import pretrain",
}
"""Imported modules -> statement. The first statement is the reference for the others."""
ADDED_LIMIT_S = 0.25
"""Limit of processor seconds that the library without training adds to torch and numpy."""
TIMED = """
import json, os, time
wall, used = time.perf_counter(), sum(os.times()[:2])
{statement}
print(json.dumps([time.perf_counter() - wall, sum(os.times()[:2]) - used]))
"""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rounds: int = 15
    """Number of processes of each statement."""


def seconds(statement: str) -> tuple[float, float]:
    """Return wall and processor seconds of a statement in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TIMED.format(statement=statement)],
        cwd=Path(__file__).resolve().parents[1],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    wall, used = json.loads(done.stdout.splitlines()[-1])
    return wall, used


def measure(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return (wall, processor) seconds of every statement in every round."""
    for statement in STATEMENTS.values():  # warm up: files are in memory and compiled afterwards
        seconds(statement)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in STATEMENTS}
    for _ in range(rounds):
        for name, statement in STATEMENTS.items():
            found[name].append(seconds(statement))
    return found


def main() -> int:
    """Print the table."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    found = measure(options.rounds)
    base = next(iter(found.values()))
    print(f"{'':<40}{'wall s':>9}{'added':>9}{'processor s':>14}{'added':>9}")
    added_by: dict[str, float] = {}
    for name, times in found.items():
        line = f"{name:<40}"
        for clock, width in ((0, 9), (1, 14)):
            added = statistics.median(t[clock] - b[clock] for t, b in zip(times, base, strict=True))
            line += f"{statistics.median(t[clock] for t in times):>{width}.3f}{added:>9.3f}"
        added_by[name] = added
        print(line)
    return int(max(added_by["megatron.core"], added_by[WITH_A_MODEL]) > ADDED_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
