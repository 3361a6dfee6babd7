"""The executor loses no more time than the plan says: stages that sleep, on 2 and 4 processes."""

import statistics

import pytest

from tests.distributed.pipeline_parallel.sleeping_stages import (
    Measured,
    SleepingCase,
    measure,
)
from tests.harness.distributed import run_distributed

NUM_STEPS = 3
TOLERANCE = 0.10
LEAST_TOLERANCE = 0.02
"""Of the step: where next to nothing is idle, a tenth of it is less than the messages take."""
FORWARD_S = 0.060
"""Of one chunk and micro batch. A message takes 0.3 ms, and some ms on a machine with more work
than cores, where processes that wake up queue: both are small against it."""
MAX_PROCESSOR_SHARE = 0.10
"""Of the wall time of a step. A rank that polled while it waits would use its share of the bubble,
a quarter and more."""


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "num_microbatches"),
    [
        ("1f1b", 2, 4),
        ("zb-h1", 1, 4),
        ("zb-v", 2, 4),
        ("dualpipe-v", 2, 8),
    ],
)
def test_the_measured_bubble_is_the_simulated_one(schedule, num_chunks, num_microbatches):
    case = SleepingCase(schedule, num_chunks, num_microbatches, FORWARD_S)
    measured = measure_quietly(case)
    assert statistics.median(measured.bubbles) == pytest.approx(
        case.simulated().bubble, rel=TOLERANCE, abs=LEAST_TOLERANCE
    ), measured


@pytest.mark.parametrize(
    ("schedule", "num_chunks", "num_ranks"),
    [("1f1b", 1, 4), ("dualpipe-v", 2, 2)],
)
def test_turns_hide_both_exchanges_of_every_pair(schedule, num_chunks, num_ranks):
    compute_s, exchange_s = FORWARD_S * 2 / 3, FORWARD_S / 3
    case = SleepingCase(schedule, num_chunks, 6, compute_s, num_ranks, exchange_s, overlap_f_b=True)
    measured, simulated = measure_quietly(case), case.simulated()
    # Pieces are a third as long as above, and more of them follow each other: the quietest step
    # counts, since other programs only ever add time.
    makespan_s, bubble = min(zip(measured.makespans_s, measured.bubbles, strict=True))
    assert makespan_s == pytest.approx(simulated.makespan, rel=TOLERANCE), measured
    assert bubble == pytest.approx(simulated.bubble, rel=TOLERANCE, abs=LEAST_TOLERANCE), measured


def measure_quietly(case: SleepingCase) -> Measured:
    """Measure a case; no rank may use the processor meanwhile."""
    results = run_distributed(measure, case.num_ranks, case, NUM_STEPS, pp=case.num_ranks)
    shares = [result.processor_share for result in results]
    assert max(shares) < MAX_PROCESSOR_SHARE, shares
    return results[0]
