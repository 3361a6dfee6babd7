"""`pretrain_gpt.py` on several ranks: the same curve as one process, and exact resume."""

import json
import shlex

import pytest

from megatron.core.foundation.errors import NumericsError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.resilience.status import RunStatus
from megatron.training.setup import initialize
from pretrain_gpt import forward_step
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity import training_run
from tests.parity.random_layouts.corpus import VOCABULARY, write_corpus
from tests.parity.resume import CASES, run_case
from tests.parity.training_run import read_metrics, train_with_flags

SMALL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 90"
    " --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --lr 1e-2 --mock-data"
    " --log-interval 1 --num-workers 0"
)
"""With the default dropout of 0.1."""


def losses(tmp_path, world_size: int, flags: str, **layout: int) -> list[float]:
    """Train and return the exact loss of each step."""
    path = tmp_path / f"{world_size}-{len(list(tmp_path.iterdir()))}.jsonl"
    small = SMALL.replace("--mock-data", "") if "--data-path" in flags else SMALL
    words = [*small.split(), *flags.split(), "--metrics-jsonl", str(path)]
    run_distributed(train_with_flags, world_size, words, timeout_s=240.0, **layout)
    return [line["lm loss"] for line in read_metrics(path)]


def test_every_layout_trains_along_the_curve_of_one_process(tmp_path):
    expected = losses(tmp_path, 1, "")
    assert expected[-1] < expected[0]
    pipeline = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    for flags, layout in (
        (f"{pipeline} --sequence-parallel", {"tp": 2, "pp": 2}),
        ("--use-distributed-optimizer --pipeline-model-parallel-size 2"
         " --num-virtual-stages-per-pipeline-rank 2 --overlap-grad-reduce", {"pp": 2, "vp": 2}),
        ("--data-parallel-sharding-strategy optim_grads --num-distributed-optimizer-instances 2"
         " --micro-batch-size 1 --overlap-grad-reduce",
         {"num_distributed_optimizer_instances": 2}),
        ("--use-torch-fsdp2 --tensor-model-parallel-size 2", {"tp": 2}),
        ("--use-megatron-fsdp --pipeline-model-parallel-size 2 --log-params-norm"
         " --eval-interval 2 --eval-iters 1 --recompute-activations", {"pp": 2}),
        ("--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel"
         " --cp-comm-type p2p a2a all_gather p2p", {"cp": 2, "tp": 2}),
    ):  # fmt: skip
        found = losses(tmp_path, 4, flags, **layout)
        assert_close(found, expected, FP32_REORDERED_SUM, flags)


def test_batches_that_grow_with_tokens_give_one_curve_in_every_layout_and_after_a_resume(tmp_path):
    flags = "--step-batch-size-schedule '0:4 128:8 384:12' --train-iters 5".replace("'", '"')
    words = f"{SMALL.replace('--global-batch-size 8 ', '')} --log-interval 1"

    def run(world_size, more=""):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        command = [*words.split(), *shlex.split(f"{flags} {more}"), "--metrics-jsonl", str(path)]
        run_distributed(train_with_flags, world_size, command, timeout_s=120.0)
        lines = read_metrics(path)
        return [line["lm loss"] for line in lines], [line["batch-size"] for line in lines]

    expected, sizes = run(1)
    assert sizes == [4, 4, 8, 8, 12]
    shared, shared_sizes = run(2, "--use-distributed-optimizer")
    assert shared_sizes == sizes
    assert_close(shared, expected, FP32_REORDERED_SUM, "two replicas")
    save = f"--save {tmp_path / 'run'} --save-interval 3"
    first, _ = run(2, f"{save} --exit-interval 3")
    rest, rest_sizes = run(1, f"--load {tmp_path / 'run'}")
    assert rest_sizes == sizes[3:]
    assert_close([*first, *rest], expected, FP32_REORDERED_SUM, "resumed by one process")


def test_documents_and_a_checkpoint_cross_context_parallel_sizes(tmp_path):
    """Half of the run on two ranks that share sequences, the other half on one."""
    write_corpus(tmp_path / "short")
    corpus = f"--data-path {tmp_path / 'short'} --split 1,0,0 --vocab-size {VOCABULARY}"
    documents = f"{corpus} --reset-attention-mask --reset-position-ids --eod-mask-loss"
    expected = losses(tmp_path, 1, documents)
    joined = losses(tmp_path, 1, corpus)
    assert all(abs(a - b) > 1e-3 for a, b in zip(joined, expected, strict=True))
    saved = tmp_path / "run"
    saving = f"{documents} --save {saved} --save-interval 2 --exit-interval 2"
    first = losses(tmp_path, 2, f"{saving} --context-parallel-size 2", cp=2)
    rest = losses(tmp_path, 1, f"{documents} --load {saved}")
    assert len(first) == 2
    assert_close([*first, *rest], expected, FP32_REORDERED_SUM, "losses")


@pytest.mark.parametrize(
    ("name", "num_workers"),
    [
        ("one process, growing batch, cyclic data", 2),
        ("tp 2 x pp 2", 0),
        ("dp 2, distributed optimizer", 0),
    ],
)
def test_a_resumed_run_is_the_unbroken_one_to_the_bit(name, num_workers, tmp_path):
    """The whole table, with 20 steps, is `python -m tests.parity.resume`."""
    case = next(case for case in CASES if case.name == name)
    unbroken, broken = run_case(case, num_workers, tmp_path, num_steps=8)
    assert len(broken.metrics) == 8
    assert broken == unbroken


def train_with_poison(groups: ProcessGroupCollection, words: list[str]) -> list[float]:
    """Train with a loss that becomes NaN in the third step, on one micro batch of one replica."""
    calls = []

    def poisoned(data_iterator, model):
        output, loss_func = forward_step(data_iterator, model)
        calls.append(1)
        if len(calls) == 2 * 2 + 2 and groups.dp.rank() == 1:
            output = output * float("nan")
        return output, loss_func

    train_with_flags(groups, words, poisoned)


def test_a_loss_that_is_not_finite_stops_all_ranks_before_the_update(tmp_path):
    words = [*SMALL.split(), "--save", str(tmp_path / "run"), "--save-interval", "1"]
    words += ["--rerun-mode", "disabled"]
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(train_with_poison, 2, words, timeout_s=120.0)
    for outcome in caught.value.outcomes:
        assert outcome.error_type == NumericsError.__name__
        assert "rank 1: iteration 3: lm loss is nan in micro batch 1" in outcome.error_message
        # Step 3 begins after 16 samples; micro batch 1 of replica 1 is row 3.
        assert "(samples 22 to 23)" in outcome.error_message
    saved = sorted(p.name for p in (tmp_path / "run").iterdir() if p.name.startswith("iter_"))
    assert saved == ["iter_0000001", "iter_0000002"]


def test_a_nan_can_be_passed_over_without_the_check(tmp_path):
    path = tmp_path / "metrics.jsonl"
    words = [*SMALL.split(), "--no-check-for-nan-in-loss-and-grad", "--metrics-jsonl", str(path)]
    run_distributed(train_with_poison, 2, words, timeout_s=120.0)
    found = [line["lm loss"] for line in map(json.loads, path.read_text().splitlines())]
    assert [loss == loss for loss in found] == [True, True, False, True]


def test_a_missing_checkpoint_fails_on_request(tmp_path):
    words = [*SMALL.split(), "--load", str(tmp_path), "--exit-on-missing-checkpoint"]
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(train_with_flags, 2, words)
    for outcome in caught.value.outcomes:
        assert f"{tmp_path} contains no checkpoint" in outcome.error_message


def test_the_learning_rate_follows_its_curve(tmp_path):
    path = tmp_path / "metrics.jsonl"
    words = [*SMALL.split(), "--metrics-jsonl", str(path), "--lr-warmup-iters", "2"]
    words += ["--lr-decay-style", "cosine", "--min-lr", "2e-3"]
    run_distributed(train_with_flags, 1, words)
    found = [line["learning-rate"] for line in read_metrics(path)]
    # Two steps up to 1e-2, then half a cosine over the other two down to 2e-3.
    assert found == pytest.approx([0.0, 5e-3, 1e-2, 6e-3])


def test_fp16_skips_overflowing_steps_and_says_when_the_scale_has_no_room(tmp_path):
    path = tmp_path / "metrics.jsonl"
    words = [*SMALL.split(), "--fp16", "--initial-loss-scale", "1.8e19", "--hysteresis", "1"]
    log = ["--metrics-jsonl", str(path)]
    run_distributed(train_with_flags, 2, [*words, *log], timeout_s=120.0)
    scales = [json.loads(line)["loss-scale"] for line in path.read_text().splitlines()]
    assert scales == pytest.approx([0.9e19, 0.45e19, 0.225e19, 0.1125e19])
    stop = ["--min-loss-scale", "1.8e19", "--on-loss-scale-floor", "raise"]
    with pytest.raises(DistributedFailure) as caught:
        run_distributed(train_with_flags, 2, [*words, *stop], timeout_s=120.0)
    for outcome in caught.value.outcomes:
        assert outcome.error_type == NumericsError.__name__
        assert "iteration 1: fp16 gradients overflow" in outcome.error_message
        assert "is not finite on global rank" in outcome.error_message


def test_the_other_spelling_of_decayed_query_and_key_norms_decays_them(tmp_path):
    decay = "--qk-layernorm --weight-decay 0.5"
    plain = losses(tmp_path, 1, decay)
    expected = losses(tmp_path, 1, f"{decay} --apply-wd-to-qk-layernorm")
    assert expected != plain
    flag = "--no-weight-decay-cond-type apply_wd_to_qk_layernorm"
    assert losses(tmp_path, 1, f"{decay} {flag}") == expected


def test_the_other_spelling_of_the_save_interval_saves(tmp_path):
    save = tmp_path / "run"
    losses(tmp_path, 1, f"--save {save} --persistent-save-interval 3")
    found = sorted(path.name for path in save.glob("iter_*"))
    assert found == ["iter_0000003", "iter_0000004"]


def _where_it_ends(groups: ProcessGroupCollection, words: list[str]) -> str:
    begun = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_run, "RunStatus", lambda: begun.append(RunStatus()) or begun[0])
        patch.setattr(initialize, "open_tensorboard", _no_writer)
        with pytest.raises(OSError, match="no writer"):
            train_with_flags(groups, words)
    return begun[0].activity


def _no_writer(run: object) -> None:
    raise OSError("no writer")


def test_a_writer_that_fails_is_not_said_to_be_the_tokenizer():
    (where,) = run_distributed(_where_it_ends, 1, SMALL.split())
    assert where == "opening TensorBoard and W&B writers"
