"""What a step was predicted to cost, beside what it does cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Seconds of a step, and bytes of the rank that needs most.

    Attributes:
        low_s, high_s: nine of ten steps are predicted to be between them.
        memory_bytes: None where it was not predicted.
        basis: what the prediction was made of, for people.
    """

    seconds: float
    low_s: float
    high_s: float
    memory_bytes: float | None
    basis: str

    def __str__(self) -> str:
        """Return it as one line."""
        text = f"{self.seconds * 1e3:.1f} ms per step ({self.low_s * 1e3:.1f} to "
        text += f"{self.high_s * 1e3:.1f})"
        if self.memory_bytes is not None:
            text += f", {gibibytes(self.memory_bytes)}"
        return f"{text}; {self.basis}"

    def cell(self) -> str:
        """Return the field of a log line."""
        low, high = self.low_s * 1e3, self.high_s * 1e3
        return f"predicted (ms): {self.seconds * 1e3:.1f} ({low:.1f} to {high:.1f})"

    def judge(self, measured_s: float) -> str | None:
        """Return what to say of steps that take so long; None where nothing is unusual."""
        if measured_s <= self.high_s:
            return None
        return (
            f"steps take {measured_s / self.seconds:.2f} times as long as predicted, more than"
            " nine of ten runs like this do; the shares of the time in the log line say in what,"
            " --log-straggler names slow ranks"
        )


def gibibytes(num_bytes: float) -> str:
    """Format bytes as GiB, or MiB below a tenth of one."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{num_bytes / 2**20:.1f} MiB"
