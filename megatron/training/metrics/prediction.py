"""Predicted time and memory of a step, and their comparison with the measured time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepPrediction:
    """Seconds of a step, and bytes of the rank with the largest memory.

    Attributes:
        low_s, high_s: range that is predicted for nine of ten steps.
        memory_bytes: None without a prediction of memory.
        basis: data of the prediction, in words.
    """

    seconds: float
    low_s: float
    high_s: float
    memory_bytes: float | None
    basis: str

    def __str__(self) -> str:
        text = f"{self.seconds * 1e3:.1f} ms per step ({self.low_s * 1e3:.1f} to "
        text += f"{self.high_s * 1e3:.1f})"
        if self.memory_bytes is not None:
            text += f", {gibibytes(self.memory_bytes)}"
        return f"{text}; {self.basis}"

    def cell(self) -> str:
        """Return the field for the log line."""
        low, high = self.low_s * 1e3, self.high_s * 1e3
        return f"predicted (ms): {self.seconds * 1e3:.1f} ({low:.1f} to {high:.1f})"

    def judge(self, measured_s: float) -> str | None:
        """Return a warning if steps take unusually long, else None."""
        if measured_s <= self.high_s:
            return None
        return (
            f"steps take {measured_s / self.seconds:.2f} times as long as predicted, longer than"
            " nine of ten such runs; the shares of time in the log line show the cause, and"
            " --log-straggler reports slow ranks"
        )


def gibibytes(num_bytes: float) -> str:
    """Format bytes as GiB, or MiB below a tenth of one."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{num_bytes / 2**20:.1f} MiB"
