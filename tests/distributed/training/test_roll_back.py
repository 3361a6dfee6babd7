"""A spike of loss or gradient norm: back to the newest state, past the samples, or the end."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron.core.foundation.errors import SpikeError
from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from pretrain_gpt import forward_step
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.parity.training_run import read_metrics, train_with_flags

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --vocab-size 90"
    " --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --mock-data --log-interval 1"
    " --num-workers 0 --eval-iters 0 --train-iters 10 --lr-decay-style cosine"
)
GUARDS = "--check-for-spiky-loss --check-for-large-grads --on-spike rollback"
LAYOUTS = {
    "tp 2 x dp 2, ZeRO-1": (
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce"
        " --overlap-param-gather --sequence-parallel --bf16",
        {"tp": 2},
    ),
    "pp 2 x dp 2, ZeRO-1": (
        "--pipeline-model-parallel-size 2 --use-distributed-optimizer",
        {"pp": 2},
    ),
}


def train_with_spikes(
    groups: ProcessGroupCollection, words: list[str], spikes: dict[int, float], of_grads: bool
) -> tuple[str, int]:
    """Train with micro batches whose samples multiply the loss, or its gradient alone.

    Args:
        spikes: first sample of a global batch -> factor.
    Returns:
        what this rank printed, and its number of collectives and messages in one step.
    """
    begun: dict[int, int] = {}

    def spiky(data_iterator, model):
        begun.setdefault(rng_state().first_sample // 8, PROGRESS.newest)
        output, loss_func = forward_step(data_iterator, model)
        factor = spikes.get(rng_state().first_sample, 1.0)
        return (_GradientTimes.apply(output, factor) if of_grads else output * factor), loss_func

    printed = train_with_flags(groups, words, spiky)
    return printed, begun.get(3, 0) - begun.get(2, 0)


class _GradientTimes(torch.autograd.Function):
    """Multiplies what comes back."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def train(
    folder: Path, layout: str, flags: str, spikes: dict[int, float], *, of_grads: bool = False
) -> tuple[dict[int, tuple[float, float, int]], str, list[int]]:
    """Train in a layout.

    Returns:
        iteration -> (loss, gradient norm, samples) of what trained; the log of rank 0; operations
        of each rank in one step.
    """
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    words, sizes = LAYOUTS[layout]
    command = [*MODEL.split(), *words.split(), *flags.split(), "--metrics-jsonl", str(path)]
    outcomes = run_distributed(
        train_with_spikes, 4, command, spikes, of_grads, timeout_s=120.0, **sizes
    )
    figures = {
        line["iteration"]: (line["lm loss"], line["grad-norm"], line["consumed-samples"])
        for line in read_metrics(path)
        if "grad-norm" in line
    }
    return figures, outcomes[0][0], [operations for _, operations in outcomes]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "of_grads"),
    [("tp 2 x dp 2, ZeRO-1", True), ("pp 2 x dp 2, ZeRO-1", False)],
)
def test_after_a_rollback_the_curve_is_that_of_a_run_without_the_samples(
    layout, of_grads, tmp_path
):
    saving = f"--save {tmp_path / 'run'} --save-interval 4"
    spikes = {5 * 8: 1e4}  # iteration 6; the newest checkpoint is of iteration 4
    rolled_back, log, operations = train(
        tmp_path, layout, f"{GUARDS} --rollback-iterations-to-skip 3 {saving}", spikes,
        of_grads=of_grads,
    )  # fmt: skip
    expected, _, usual = train(tmp_path, layout, "--iterations-to-skip 5 6 7", {})
    assert min(usual) > 0
    assert operations == usual, "a step without a spike has no more collectives"
    told = [line for line in log.splitlines() if "rolled back" in line]
    assert len(told) == 1
    assert re.search(
        r"iteration 6: (lm loss|gradient norm) .* samples 40 to 47: rolled back to iteration 4,"
        r" skipping the samples of iterations 5 to 7 \(time 1 of --max-rollbacks 3",
        told[0],
    )
    later = set(range(8, 11))
    assert later <= rolled_back.keys()
    assert {i: rolled_back[i] for i in later} == {i: expected[i] for i in later}


@pytest.mark.distributed
def test_a_run_stopped_after_a_rollback_goes_on_to_the_bit(tmp_path):
    """With a second spike, which only a run that remembers the figures of before can see."""
    layout, spikes = "pp 2 x dp 2, ZeRO-1", {5 * 8: 1e4, 9 * 8: 1e4}
    flags = f"{GUARDS} --rollback-iterations-to-skip 1"
    first, second = (f"--save {tmp_path / name} --save-interval 4" for name in ("one", "two"))
    unbroken, *_ = train(tmp_path, layout, f"{flags} {first}", spikes)
    begun, *_ = train(tmp_path, layout, f"{flags} {second} --exit-interval 8", spikes)
    resumed, log, _ = train(tmp_path, layout, f"{flags} {second} --load {tmp_path / 'two'}", spikes)
    assert "rolled back to iteration 8" in log
    assert 10 not in unbroken
    assert {**begun, **resumed} == unbroken


@pytest.mark.distributed
def test_a_place_that_spikes_again_and_again_ends_the_run(tmp_path):
    flags = f"{GUARDS} --rollback-iterations-to-skip 2 --max-rollbacks 1"
    spikes = dict.fromkeys(range(40, 80, 8), 1e4)
    with pytest.raises(DistributedFailure) as caught:
        train(
            tmp_path, "pp 2 x dp 2, ZeRO-1", f"{flags} --save {tmp_path / 'run'} --save-interval 4",
            spikes,
        )  # fmt: skip
    for outcome in caught.value.outcomes:
        assert outcome.error_type == SpikeError.__name__
        message = outcome.error_message
        assert re.search(
            r"iteration 7: lm loss \S+ is \S+ deviations .* \(threshold \S+\)", message
        )
        assert "rolled back for this place 1 times" in message
        assert "--rollback-iterations-to-skip" in message
