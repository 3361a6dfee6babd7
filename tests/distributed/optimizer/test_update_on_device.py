"""Training in which the device decides on updates: same figures, read when they are logged."""

import contextlib
import shlex
from unittest import mock

import pytest
import torch

from megatron.core.foundation.errors import NumericsError
from megatron.core.optimizer.gradient_norm import GradientReader
from megatron.training.run import state
from pretrain_gpt import forward_step
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import EXACT, assert_close
from tests.parity.random_layouts.job import run_rank
from tests.parity.training_run import train_with_flags

WORDS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 89"
    " --tokenizer-type NullTokenizer --mock-data --num-workers 0 --distributed-backend gloo"
    " --micro-batch-size 1 --train-iters 5 --eval-iters 0 --lr 1e-3"
    " --use-distributed-optimizer --clip-grad 0.5 --log-interval 2 --tensorboard-log-interval 2"
    " --pipeline-model-parallel-size 2 --global-batch-size 4"
)


READS = state.AsyncStepResult.read


@contextlib.contextmanager
def deciding(on_device, reads):
    """Let the device decide, if asked; `reads` gets an entry for each step that is read."""

    def noted(step):
        reads.extend([1] * (not step.is_read))
        return READS(step)

    with (
        mock.patch.object(GradientReader, "is_on_host", not on_device),
        mock.patch.object(state.AsyncStepResult, "read", noted),
    ):
        yield


def trained(groups, words, metrics, on_device):
    """Train; return what `run_rank` does, and how many steps were read from the device."""
    reads = []
    with deciding(on_device, reads):
        return run_rank(groups, words, metrics), len(reads)


@pytest.mark.distributed
@pytest.mark.parametrize("words", ["--rerun-mode disabled", "", "--bf16 --rerun-mode disabled"])
def test_training_is_the_same_whoever_decides(words, tmp_path):
    words = shlex.split(f"{WORDS} {words}")
    outcomes = [
        run_distributed(trained, 4, words, str(tmp_path / f"{on_device}.jsonl"), on_device)
        for on_device in (False, True)
    ]
    keys = ("lm loss", "grad-norm", "learning-rate")
    for (host, none), (device, reads) in zip(*outcomes, strict=True):
        assert (host.refusal, device.refusal, none, reads) == ("", "", 0, 5)
        figures = [
            [{key: line[key] for key in keys} for line in each.scalars if "lm loss" in line]
            for each in (host, device)
        ]
        assert figures[0] == figures[1]
        for name, weight in host.report.weights.items():
            assert_close(device.report.weights[name], weight, EXACT, name)


def with_a_bad_loss(groups, words, step):
    """Make the loss of one step NaN where it is computed; return what was raised and was read."""
    reads, calls = [], []

    def stepping(iterator, model):
        calls.append(1)
        output, loss = forward_step(iterator, model)
        # Two micro batches a step on each replica.
        bad = torch.nan if (len(calls) + 1) // 2 == step else 1.0
        return output, lambda out: _times(loss(out), bad)

    with deciding(True, reads):
        try:
            train_with_flags(groups, words, stepping)
        except NumericsError as error:
            return str(error), len(reads)
    return "", len(reads)


def _times(reported, factor):
    loss, *rest, report = reported
    return (loss * factor, *rest, {name: pair * factor for name, pair in report.items()})


@pytest.mark.distributed
def test_a_bad_loss_ends_the_run_when_it_is_read():
    words = shlex.split(f"{WORDS} --rerun-mode disabled")
    for message, reads in run_distributed(with_a_bad_loss, 4, words, 3, pp=2):
        assert "iteration 3: lm loss is nan in micro batch 0" in message
        assert reads == 3  # 1 and 2 together, then the first of two


@pytest.mark.distributed
def test_a_step_that_was_bad_once_is_run_again_before_the_next_one():
    for message, reads in run_distributed(with_a_bad_loss, 4, shlex.split(WORDS), 3, pp=2):
        assert (message, reads) == ("", 5)
