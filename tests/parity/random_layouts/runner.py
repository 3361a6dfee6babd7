"""Runs command lines on ranks that live on: a process of its own, for one of the two widths.

`python -m tests.parity.random_layouts.runner wide` reads pickled cases from its standard input
and writes pickled results to its standard output.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tests.parity.random_layouts.cases import Case
from tests.parity.random_layouts.outcomes import Kind, Result

TIMEOUT_S = 60.0
MODULE = "tests.parity.random_layouts"


class Runner:
    """The other end of such a process, started when it is first needed."""

    def __init__(self, *, is_wide: bool) -> None:
        self.is_wide = is_wide
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_started(self) -> bool:
        """Whether the process is there."""
        return self._process is not None

    def run(self, case: Case) -> Result:
        """Run one command line."""
        assert case.is_wide == self.is_wide
        if self._process is None:
            width = "wide" if self.is_wide else "plain"
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{MODULE}.runner", width],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        pickle.dump(case, self._process.stdin)
        self._process.stdin.flush()
        result: Result = pickle.load(self._process.stdout)
        return result

    def close(self) -> None:
        """End the process and its ranks."""
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answer until the requests end."""
    from tests.parity.random_layouts.execution import Execution

    with tempfile.TemporaryDirectory(prefix="random-layouts-") as folder:
        execution = Execution(Path(folder))
        while True:
            try:
                case: Case = pickle.load(requests)
            except EOFError:
                return
            try:
                result = execution.run(case)
            except Exception as error:
                result = Result(Kind.BROKEN, f"{type(error).__name__}: {error}")
            pickle.dump(result, replies)
            replies.flush()


@contextlib.contextmanager
def _own_output() -> Iterator[BinaryIO]:
    """Keep standard output for replies: whatever is printed goes to standard error."""
    with os.fdopen(os.dup(1), "wb") as replies:
        os.dup2(2, 1)
        yield replies


def main() -> None:
    """Serve one width."""
    from tests.harness import pool

    first = [f"{MODULE}.wide"] if sys.argv[1] == "wide" else []
    pool.PRELOAD[:] = [*first, *pool.PRELOAD, f"{MODULE}.job"]
    with _own_output() as replies:
        serve(sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
