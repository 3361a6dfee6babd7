"""Which settings of a resumed run are the command line's, and which the checkpoint's."""

import re
from pathlib import Path

import pytest

from megatron.core.foundation.errors import ConfigError
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.parity.training_run import read_metrics, train_with_flags

SMALL = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 90"
    " --micro-batch-size 2 --global-batch-size 4 --mock-data --log-interval 1 --num-workers 0"
    " --eval-iters 0"
)
SAVED = "--train-iters 4 --exit-interval 2 --lr 1e-3 --decoupled-lr 2e-3"


def train(path: Path, flags: str) -> list[dict]:
    """Train, and return the lines of the log of numbers."""
    log = path / f"{len(list(path.iterdir()))}.jsonl"
    words = [*SMALL.split(), *flags.split(), "--metrics-jsonl", str(log)]
    run_distributed(train_with_flags, 1, words, timeout_s=120.0)
    return read_metrics(log)


def refusal(path: Path, flags: str) -> str:
    """Return the message of a run that is refused."""
    with pytest.raises(DistributedFailure) as caught:
        train(path, flags)
    (outcome,) = caught.value.outcomes
    assert outcome.error_type == ConfigError.__name__
    return outcome.error_message


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A run that stopped half way, after 8 of 16 samples."""
    train(tmp_path, f"{SAVED} --save {tmp_path}/run --save-interval 2")
    return tmp_path


def test_the_rate_of_the_command_line_or_of_the_checkpoint_is_used_as_asked(saved):
    changed = f"--train-iters 4 --load {saved}/run --lr 8e-3 --decoupled-lr 4e-3"
    text = refusal(saved, changed)
    assert "--lr 0.001" in text
    assert "--decoupled-lr 0.002" in text
    ours = train(saved, f"{changed} --override-opt-param-scheduler")
    assert [line["learning-rate"] for line in ours] == pytest.approx([4e-3, 2e-3])
    theirs = train(saved, f"{changed} --use-checkpoint-opt-param-scheduler")
    assert [line["learning-rate"] for line in theirs] == pytest.approx([5e-4, 2.5e-4])


def test_the_fix_for_a_longer_run_is_in_the_unit_of_its_flag_and_works(saved):
    longer = f"--train-iters 6 --load {saved}/run --lr 1e-3 --decoupled-lr 2e-3"
    text = refusal(saved, longer)
    assert "lr_decay_steps=16 samples, this run has 24 samples" in text
    (fix,) = re.findall(r"use (--lr-decay-iters \d+);", text)
    assert len(train(saved, f"{longer} {fix}")) == 4
