"""Where the parts of `benchmarks.gpu` measure, and the processes they do it in.

Each measurement has processes of its own: an error of a GPU ends the process that it is in, and
memory that another measurement holds would count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import MegatronError
from megatron.planner.hardware import Gpu

REPOSITORY = Path(__file__).resolve().parents[2]
_SHOWN_LINES = 15


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What is measured.

    Attributes:
        ranks: numbers of processes, each with an accelerator of its own.
        directory: of the report and of what is kept beside it.
        is_rehearsal: on the CPU, with tiny sizes.
        gpu: its data sheet; None if the planner has none.
        memory_bytes: of one accelerator.
        peer_python: Python of an environment with megatron-core.
    """

    ranks: tuple[int, ...]
    directory: Path
    is_rehearsal: bool
    gpu: Gpu | None = None
    memory_bytes: float = 0.0
    peer_python: Path | None = None


class MeasurementFailedError(MegatronError):
    """A process that measures has ended with an error."""


def run(
    command: Sequence[str], log: Path, *, timeout_s: float, also: Mapping[str, str] | None = None
) -> None:
    """Run a command from the root of the repository, with its output in `log`.

    Raises:
        MeasurementFailedError: it failed or took too long; with the end of its output.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), **(also or {})}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as output:
        try:
            status = subprocess.run(
                command, cwd=REPOSITORY, env=environment, timeout=timeout_s,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            status = -1
    if status:
        end = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN_LINES:]
        how = f"took more than {timeout_s:.0f} s" if status == -1 else f"ended with {status}"
        raise MeasurementFailedError(f"{' '.join(command)} {how}:\n" + "\n".join(end))


def ranks_command(num_ranks: int, words: Sequence[str]) -> list[str]:
    """Return the command that starts so many processes of a script, or of -m and a module."""
    if num_ranks == 1:
        return [sys.executable, *words]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, *launcher, *words]
