"""Programs of the repository as a user starts them, on the CPU."""

import os
import subprocess
import sys

from tests.harness.machine import ONE_MACHINE
from tests.harness.pool import REPOSITORY


def torchrun(num_ranks: int) -> list[str]:
    """Return the words after `python` that start ranks on this machine."""
    return ["-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", str(num_ranks)]


def environment(**more: str) -> dict[str, str]:
    """Return an environment for one thread on the CPU, without the place of a rank."""
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    own = {"PYTHONPATH": str(REPOSITORY), "LATTICE_DEVICE": "cpu", "OMP_NUM_THREADS": "1",
           "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    return {**kept, **own, **more}


def run_python(*words: object, status: int = 0, timeout_s: float = 300.0, **more: str) -> str:
    """Run Python from the repository to its end; return what it printed.

    Args:
        status: of the exit that is expected.
        more: variables of its environment.
    """
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=REPOSITORY, env=environment(**more), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s,
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-4000:]
    return done.stdout
