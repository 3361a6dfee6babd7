"""Phases of the training data (--phase-transition-iterations): a run that ends at each boundary.

Each phase has data of its own: a command trains to the end of its phase and saves; the command for
the next phase names other data, and its first sample is sample 0 of those.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.resolved import ResolvedRun


@dataclass(frozen=True)
class Phase:
    """A range of the samples that a whole run consumes."""

    begin: int
    end: int


def transitions_of(run: ResolvedRun) -> list[int]:
    """Return the iterations after which a phase ends.

    Raises:
        ValueError: the flag holds something else than numbers.
    """
    text = run.schedule.phase_transition_iterations
    return [int(word) for word in text.split(",")] if text else []


def phase_of(run: ResolvedRun, consumed_samples: int) -> Phase:
    """Return the phase in which the sample after `consumed_samples` is."""
    ends = [iteration * run.schedule.global_batch_size for iteration in transitions_of(run)]
    begin = max((end for end in ends if end <= consumed_samples), default=0)
    later = (end for end in ends if end > consumed_samples)
    return Phase(begin, min(later, default=run.schedule.train_samples or 0))
