"""fp16: the loss scale takes the same way in every layout and at every rung of the ladder.

Runs are compared at equal numbers of micro batches: a replica's loss is the mean over its own, so
with twice the replicas each sample's gradients are twice as large on their way through the model.
"""

from pathlib import Path

import pytest

from tests.distributed.checkpointing.gpt_run import Layout, Model, Run
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP16_WHOLE_MODEL, assert_close

NUM_STEPS = 14
MODEL = Model(dtype="fp16", dropout=0.0, is_tied=False)
SCALING = {"initial_loss_scale": 2.0**26, "loss_scale_window": 3, "hysteresis": 2}
"""Overflows at first; then the scale doubles every three good steps until it overflows again."""

LAYOUTS = [
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=3),
    Layout(dp=2, zero=2),
    Layout(tp=2),
    Layout(pp=2),
    Layout(pp=2, dp=2, zero=1),
    Layout(pp=2, vp=2),
    Layout(tp=2, dp=2, zero=2),
]


def trajectory(groups, layout: Layout) -> tuple[list[float], list[float], str | None]:
    """Train, and return loss scales, losses, and the first overflow that was told."""
    run = Run(groups, layout, MODEL, optimizer=SCALING)
    told = None
    for _ in range(NUM_STEPS):
        run.train(1)
        told = told or run.optimizer.nonfinite
    return run.scales, run.losses, told


@pytest.fixture(scope="module")
def plain() -> dict[int, tuple[list[float], list[float], str | None]]:
    """The run on one rank, and on two replicas of stage 0, by the number of replicas."""
    return {dp: run_distributed(trajectory, dp, Layout(dp=dp))[0] for dp in (1, 2)}


def test_the_scale_falls_grows_and_falls_again(plain) -> None:
    scales, _, told = plain[1]
    steps = list(zip(scales, scales[1:], strict=False))
    assert scales[0] == 2.0**26, "the first overflow is within the hysteresis"
    assert any(after == before / 2 for before, after in steps)
    assert any(after == before * 2 for before, after in steps)
    assert scales[-1] < 2.0**26
    assert told is not None and "is not finite on global rank" in told


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_loss_scales_are_those_of_the_plain_run(layout: Layout, plain) -> None:
    expected = plain[layout.dp]
    ranks = run_distributed(trajectory, layout.size, layout, **layout.axes())
    for scales, _, told in ranks:
        assert scales == expected[0]
        assert told is not None and told.split(" is ")[0] == expected[2].split(" is ")[0]
    if layout.dp == 1:
        (losses,) = [losses for _, losses, _ in ranks if losses][:1]
        for ours, theirs in zip(losses, expected[1], strict=True):
            assert_close(ours, theirs, FP16_WHOLE_MODEL, "loss")


def resumed(groups, layout: Layout, directory: Path, stops: list[int]) -> list[float]:
    """Train in pieces, each in new objects, and return the loss scale after each step."""
    scales: list[float] = []
    for number, num_steps in enumerate(stops):
        run = Run(
            groups, layout, MODEL, optimizer=SCALING, load=str(directory), save=str(directory)
        )
        if number:
            assert run.load() is not None
        run.train(num_steps)
        run.save()
        run.checkpointer.close()
        scales += run.scales
    return scales


def test_a_resumed_run_keeps_scale_window_and_hysteresis(plain, tmp_path: Path) -> None:
    # Stops inside the hysteresis, between two halvings, and inside a window of good steps.
    stops = [1, 3, 5, NUM_STEPS - 9]
    layout = Layout(dp=2, zero=1)
    for scales in run_distributed(resumed, layout.size, layout, tmp_path / "run", stops):
        assert scales == plain[2][0]
