"""What became of a case."""

from __future__ import annotations

from dataclasses import dataclass, field


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
