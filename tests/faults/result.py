"""The result of a case, and its jobs: started, ended whatever happens, and timed."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.faults.job import Job
from tests.faults.moments import MissedMomentError


@dataclass
class Result:
    """One line of the table."""

    name: str
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    ended_after_s: float | None = None
    """From the last signal to the end of the last process."""
    facts: str = ""
    not_run: str = ""
    """Why it could not be run here."""

    @property
    def outcome(self) -> str:
        """Say it in a word."""
        return "not run" if self.not_run else "FAILED" if self.problems else "ok"


class CaseRun(AbstractContextManager):
    """A context that ends its jobs, notes a missed moment as a problem, and takes the time."""

    def __init__(self, name: str) -> None:
        self.result = Result(name)
        self.jobs: list[Job] = []
        self._began = time.monotonic()

    def start(self, folder: Path, words: Sequence[str], **options: Any) -> Job:
        """Start a job of the case; see `Job`."""
        job = Job(folder, words, **options)
        self.jobs.append(job)
        return job

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        for job in self.jobs:
            job.end()
        self.result.seconds = time.monotonic() - self._began
        if isinstance(error, MissedMomentError | OSError | KeyError):
            self.result.problems.append(f"{type(error).__name__}: {error}")
            return True
        return False
