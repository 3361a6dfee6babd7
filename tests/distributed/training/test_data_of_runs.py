"""What the data flags do to a whole run: orders, masks, validation sets, phases, resumes."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.training.datasets.audit import Audit, read_audit
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.parity.training_run import train_with_flags
from tests.unit.datasets.corpora import write_corpus

SMALL = [
    "--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "16",
    "--lr", "1e-2", "--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "6",
    "--log-interval", "1", "--hidden-dropout", "0", "--attention-dropout", "0",
    "--tokenizer-type", "ByteTokenizer", "--num-workers", "0",
]  # fmt: skip


@pytest.fixture
def corpora(tmp_path):
    """Three corpora of documents that end with the byte tokenizer's end of document."""
    random = np.random.RandomState(0)
    return [
        write_corpus(
            tmp_path / name,
            [np.append(random.randint(0, 256, random.randint(3, 30)), 256) for _ in range(count)],
        )
        for name, count in (("a", 300), ("b", 200), ("c", 60))
    ]


def train(folder: Path, *words: str, world_size: int = 1, **layout: int) -> list[dict]:
    """Train and return all lines of the metrics."""
    path = folder / f"{len(list(folder.iterdir()))}.jsonl"
    flags = [*SMALL, *words, "--metrics-jsonl", str(path)]
    run_distributed(train_with_flags, world_size, flags, timeout_s=120.0, **layout)
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(lines: list[dict]) -> list[float]:
    return [line["lm loss"] for line in lines if "lm loss" in line]


def test_the_native_order_trains_in_every_layout_and_resumes_to_the_bit(corpora, tmp_path):
    blend = ["--data-path", "1", corpora[0], "2", corpora[1], "--split", "1"]
    flags = [*blend, "--sample-order", "native"]
    whole = losses(train(tmp_path, *flags))
    assert whole != losses(train(tmp_path, *blend))
    parallel = train(tmp_path, *flags, "--tensor-model-parallel-size", "2", world_size=2, tp=2)
    assert losses(parallel) == pytest.approx(whole, rel=1e-5)
    save = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    first = losses(train(tmp_path, *flags, *save, "--exit-interval", "2"))
    second = losses(train(tmp_path, *flags, *save, "--num-workers", "2"))
    assert first + second == whole


def test_documents_that_are_cut_are_the_same_in_every_layout_and_after_a_resume(tmp_path):
    random = np.random.RandomState(0)
    letters = [np.append(random.randint(97, 123, random.randint(8, 15)), 256) for _ in range(200)]
    (tmp_path / "runs").mkdir()
    corpus = ["--data-path", write_corpus(tmp_path / "text", letters), "--split", "1"]
    flags = [*corpus, "--fim-data"]
    for number, name in enumerate(("prefix", "middle", "suffix"), 1):
        flags += [f"--fim-{name}-token", f"<0x0{number}>"]

    def losses_of(*words, **layout):
        return losses(train(tmp_path / "runs", *words, **layout))

    whole = losses_of(*flags)
    assert whole != losses_of(*corpus)
    assert losses_of(*flags, world_size=2) == pytest.approx(whole, rel=1e-5)
    save = ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    first = losses_of(*flags, *save, "--exit-interval", "2")
    with pytest.raises(DistributedFailure, match="fill_in_middle"):
        losses_of(*flags, *save, "--fim-rate", "0.25")
    assert first + losses_of(*flags, *save, "--num-workers", "2") == whole


def test_documents_are_kept_apart_by_the_mask_made_on_the_device(corpora, tmp_path):
    flags = ["--data-path", corpora[0], "--split", "1"]
    resets = ["--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss"]
    apart = losses(train(tmp_path, *flags, *resets))
    assert apart != losses(train(tmp_path, *flags))
    stages = train(
        tmp_path, *flags, *resets, "--pipeline-model-parallel-size", "2", world_size=2, pp=2
    )
    assert losses(stages) == pytest.approx(apart, rel=1e-5)


def test_each_validation_set_is_reported_by_its_name(corpora, tmp_path):
    settings = {"train": {corpora[0]: 1.0}, "valid": corpora[1:]}
    (tmp_path / "blend.json").write_text(json.dumps(settings))
    flags = ["--per-split-data-args-path", str(tmp_path / "blend.json"), "--eval-interval", "3"]
    several = [*flags, "--multiple-validation-sets", "--eval-iters", "2"]
    lines = train(tmp_path, *several, "--pipeline-model-parallel-size", "2", world_size=2, pp=2)
    found = [line for line in lines if "lm loss validation b" in line]
    assert len(found) == 3, "after steps 3 and 6, and at the end"
    assert len([line for line in lines if "lm loss validation c" in line]) == 3
    whole = train(tmp_path, *several, "--full-validation", "--train-iters", "3")
    one = ["--train-data-path", corpora[0], "--valid-data-path", corpora[2], "--eval-interval", "3"]
    alone = train(tmp_path, *one, "--full-validation", "--eval-iters", "1", "--train-iters", "3")
    expected = [line["lm loss validation"] for line in alone if "lm loss validation" in line]
    got = [line["lm loss validation c"] for line in whole if "lm loss validation c" in line]
    assert got == expected


def test_a_phase_ends_the_run_and_the_next_begins_other_data_at_their_first_sample(
    corpora, tmp_path
):
    save = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    phases = [*save, "--phase-transition-iterations", "2,4", "--split", "1"]
    seen = []
    for number, corpus in enumerate(corpora):
        lines = train(tmp_path, *phases, "--data-path", corpus)
        steps = [line["iteration"] for line in lines if "lm loss" in line]
        assert steps == [2 * number + 1, 2 * number + 2]
        seen += losses(lines)
    assert losses(train(tmp_path, "--data-path", corpora[0], "--split", "1"))[:2] == seen[:2]


def test_the_audit_proves_that_resumes_in_other_layouts_consume_each_sample_once(corpora, tmp_path):
    folder = tmp_path / "audit"
    flags = ["--data-path", corpora[0], "--split", "1", "--data-audit-path", str(folder)]
    save = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    train(tmp_path, *flags, *save, "--exit-interval", "2")
    train(tmp_path, *flags, *save, "--exit-interval", "4", "--num-workers", "2", world_size=2)
    tp = ["--tensor-model-parallel-size", "2"]
    train(tmp_path, *flags, *save, *tp, world_size=2, tp=2)
    assert read_audit(str(folder)) == Audit(24, 0, [], [])
    train(tmp_path, *flags, "--train-iters", "1", "--micro-batch-size", "1")
    assert read_audit(str(folder)) == Audit(24, 4, [], [])
    train(tmp_path, *flags, "--train-iters", "1", "--seed", "5")
    found = read_audit(str(folder))
    assert (found.num_samples, found.num_repeated) == (24, 4)
    assert found.contradictions == [0, 1, 2, 3]
    lines = (folder / "dp00000.jsonl").read_text().splitlines(keepends=True)
    (folder / "dp00000.jsonl").write_text("".join(lines[:3] + lines[4:9]) + "[12, [")
    assert read_audit(str(folder)).missing


def test_conversations_train_alike_in_one_and_in_two_stages(tmp_path):
    random = np.random.RandomState(0)
    packs = [random.randint(0, 256, random.randint(4, 17)) for _ in range(40)]
    prefix = write_corpus(tmp_path / "talks", packs)
    write_corpus(f"{prefix}_mask", [np.arange(len(pack)) > 1 for pack in packs], np.uint8)
    flags = ["--sft", "--data-path", prefix, "--split", "1", "--train-iters", "3"]
    whole = losses(train(tmp_path, *flags))
    stages = ["--pipeline-model-parallel-size", "2"]
    assert losses(train(tmp_path, *flags, *stages, world_size=2, pp=2)) == pytest.approx(
        whole, rel=1e-5
    )


def test_a_resume_with_other_data_is_refused_on_all_ranks_unless_allowed(corpora, tmp_path):
    world_size = 2
    save = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run"), "--split", "1"]
    blend = ["--data-path", "1", corpora[0], "3", corpora[1]]
    train(tmp_path, *save, *blend, "--exit-interval", "2", world_size=world_size)
    # The same type, sizes and lengths, and other tokens.
    rewritten = str(tmp_path / "rewritten")
    shutil.copy(corpora[1] + ".idx", rewritten + ".idx")
    tokens = np.fromfile(corpora[1] + ".bin", np.uint16)
    np.where(tokens < 200, tokens + 1, tokens).tofile(rewritten + ".bin")
    for changed, told in (
        (["--data-path", "1", corpora[0], "2", corpora[1]], "the weights of the blend"),
        (["--data-path", "1", corpora[0], "3", corpora[2]], "the contents of a corpus"),
        (["--data-path", "1", corpora[0], "3", rewritten], "the contents of a corpus"),
        ([*blend, "--sample-order", "native"], "the kind of order (megatron, now native)"),
        (
            [*blend, "--dataloader-type", "cyclic"],
            "the order of samples over ranks (None, now cyclic)",
        ),
        ([*blend, "--seed", "5"], "the seed of the shuffles (1234, now 5)"),
    ):
        with pytest.raises(DistributedFailure) as caught:
            train(tmp_path, *save, *changed, world_size=world_size)
        assert len(caught.value.outcomes) == world_size
        for outcome in caught.value.outcomes:
            assert "has consumed 8 samples of other data" in outcome.error_message
            assert told in outcome.error_message
    for suffix in (".bin", ".idx"):
        Path(corpora[0] + suffix).rename(tmp_path / f"moved{suffix}")
    same = ["--data-path", "1", str(tmp_path / "moved"), "3", corpora[1]]
    assert len(losses(train(tmp_path, *save, *same, "--exit-interval", "4"))) == 2
    other = ["--data-path", corpora[2], "--allow-changed-data"]
    assert len(losses(train(tmp_path, *save, *other))) == 2


def test_a_cyclic_order_is_equal_in_every_layout_and_after_a_resume_in_another(corpora, tmp_path):
    """The corpus has fewer samples than the run takes: epochs end within batches."""
    flags = ["--data-path", corpora[2], "--split", "1", "--dataloader-type", "cyclic"]
    flags += ["--train-iters", "8", "--global-batch-size", "12", "--num-workers", "1"]
    flags += ["--eval-interval", "4", "--eval-iters", "2"]
    whole = losses(train(tmp_path, *flags))
    small = losses(train(tmp_path, *flags, "--micro-batch-size", "3"))
    assert small == pytest.approx(whole, rel=1e-5)
    replicas = losses(train(tmp_path, *flags, world_size=2))
    assert replicas == pytest.approx(whole, rel=1e-5)
    save = ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    begun = losses(train(tmp_path, *flags, *save, "--exit-interval", "3", world_size=2))
    ended = losses(train(tmp_path, *flags, *save, "--micro-batch-size", "1"))
    assert begun + ended == pytest.approx(whole, rel=1e-5)


def test_megatrons_cyclic_order_warns_and_its_resume_with_other_replicas_is_refused(
    corpora, tmp_path
):
    flags = ["--data-path", corpora[0], "--split", "1", "--dataloader-type", "cyclic-megatron"]
    flags += ["--save", str(tmp_path / "run"), "--load", str(tmp_path / "run")]
    printed = run_distributed(train_with_flags, 1, [*SMALL, *flags, "--exit-interval", "2"])
    assert "cyclic is equal in every layout" in printed[0]
    with pytest.raises(DistributedFailure, match="1 replicas, micro batch size 2, now cyclic"):
        train(tmp_path, *flags, world_size=2)
