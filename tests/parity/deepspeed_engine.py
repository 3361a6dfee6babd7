"""Compare with the real DeepSpeed: `python -m tests.parity.deepspeed_engine --peer PYTHON`.

PYTHON is the interpreter of an environment with deepspeed. Both programs run one file,
`deepspeed_engine_job.py`, which trains with ZeRO stages 0 to 3, in fp32, bf16 and fp16, with 1 and
4 micro batches per step on two processes; in the last rows both continue from the checkpoints that
DeepSpeed has saved. A row shows the largest difference of the losses and of
the gradient norms, relative; a case that DeepSpeed refuses on this machine is compared with our
stage 0. Exits with status 1 if a difference is larger than its limit.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.settings.command_line import read_command_line
from tests.harness.pool import REPOSITORY
from tests.parity.deepspeed_engine_job import CASES

JOB = Path(__file__).with_name("deepspeed_engine_job.py")
LIMITS = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 4e-3}
"""fp32: sums in another order, over six steps. bf16 and fp16: an update that is rounded the other
way changes a weight by half a unit in the last place, 2^-9 and 2^-12; a small model's loss and norm
follow from some thousand of them."""


def run(python: str, port: int, environment: dict[str, str], directory: str) -> dict[str, Any]:
    """Let one program run all cases."""
    out = Path(directory) / f"found{port}.json"
    line = [python, str(JOB), "--out", str(out), "--port", str(port), "--checkpoints", directory]
    done = subprocess.run(
        line, capture_output=True, text=True, check=False, env=environment, cwd=directory
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(line)} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(out.read_text()))


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    """Return the largest relative difference; 0 where the other program says nothing."""
    if not theirs:
        return 0.0
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    return max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    peer: str
    """A Python that has deepspeed."""


def main(arguments: list[str] | None = None) -> int:
    """Run both programs and print the table."""
    options = read_command_line(Flags, arguments, description=__doc__)
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as directory:
        theirs = run(options.peer, 29861, plain, directory)
        ours = run(sys.executable, 29862, {**plain, "PYTHONPATH": str(REPOSITORY)}, directory)
    failures = 0
    print(f"{'case':<38}{'losses':>10}{'norms':>10}{'limit':>9}   compared with")
    for name, (_, dtype, accumulation) in CASES.items():
        mine, other, whose = ours[name], theirs[name], "deepspeed"
        if "refused" in mine:
            failures += 1
            print(f"{name:<38} FAILED: {mine['refused']}")
            continue
        if "refused" in other:
            whose = f"our stage 0 (deepspeed: {other['refused'][:60]})"
            other = ours[f"stage 0, {dtype}, accumulation {accumulation}"]
        differences = [largest_difference(mine[what], other[what]) for what in ("losses", "norms")]
        is_bad = max(differences) > LIMITS[dtype]
        failures += is_bad
        shown = "".join(f"{value:>10.1e}" for value in differences)
        print(f"{name:<38}{shown}{LIMITS[dtype]:>9.0e}   {whose}{'  <- TOO LARGE' * is_bad}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
