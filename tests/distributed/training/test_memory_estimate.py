"""The memory report says what a rank holds."""

from tests.distributed.training.memory_of_stages import SMALL, compare


def test_estimates_of_every_stage_are_what_a_rank_holds():
    off = [
        f"stage {stage}, {part}: estimated {estimate:.0f}, measured {count}"
        for stage, part, estimate, count, tolerance in compare(SMALL, "bf16")
        if abs(estimate - count) > tolerance * max(count, 1)
    ]
    assert not off
