"""A tool of `tools/` as a user starts it, under torchrun on the CPU."""

import subprocess
import sys

from tests.harness.pool import REPOSITORY
from tests.harness.started import environment, torchrun


def run_tool(tool: str, num_ranks: int, *flags: str) -> str:
    """Run a tool over sequences of 64; return what it printed.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    command = [
        sys.executable, *torchrun(num_ranks), f"tools/{tool}.py", "--seq-length", "64",
        "--transformer-impl", "local", *flags,
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout
