"""A dry run refuses what a run refuses, and advice is of use.

More command lines by `python -m tests.parity.dry_run` and `python -m tests.parity.advice`.
"""

import pytest

from megatron.core.foundation.errors import ConfigError
from tests.parity.advice import advice_on, draw_advice, followed
from tests.parity.dry_run import judged, planned
from tests.parity.mistakes import draw_command, with_changes, words_of, write_inputs
from tests.parity.random_layouts.cases import Case

MODEL = {
    "num-layers": 2, "hidden-size": 32, "num-attention-heads": 4, "seq-length": 16,
    "micro-batch-size": 1, "global-batch-size": 4, "train-iters": 2, "lr": 1e-3, "eval-iters": 0,
    "mock-data": True, "vocab-size": 89, "tokenizer-type": "NullTokenizer", "num-workers": 0,
    "distributed-backend": "gloo",
}  # fmt: skip


def case_with(changes, ranks=1):
    return Case(ranks, False, with_changes(MODEL, changes))


@pytest.mark.distributed
@pytest.mark.parametrize("index", range(12))
def test_a_dry_run_refuses_a_drawn_command_line_where_a_run_does(index, tmp_path):
    verdict = judged(draw_command(7, index), tmp_path / "case")
    assert verdict.agrees, str(verdict)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "changes",
    [
        {"spec": ("nowhere.to_be_found", "layers")},
        {"spec": ("megatron.core.models.gpt.gpt_layer_specs", "get_gpt_decoder_block_spec")},
        {"data-path": "EMPTY", "mock-data": None},
        {"data-path": "TRUNCATED", "mock-data": None, "tokenizer-type": "NullTokenizer"},
        {"tensorboard-dir": "/dev/null/x"},
    ],
)
def test_a_dry_run_finds_what_only_building_finds(changes, tmp_path):
    verdict = judged(case_with(changes), tmp_path / "case")
    assert verdict.run, "the run takes it"
    assert verdict.agrees, str(verdict)


@pytest.mark.distributed
@pytest.mark.parametrize("sharding", ["use-torch-fsdp2", "use-megatron-fsdp"])
def test_a_dry_run_accepts_rows_that_ranks_do_not_share_evenly(sharding, tmp_path):
    assert planned(words_of(case_with({sharding: True}), {}), 2)[1] == []


def test_a_spec_that_cannot_be_imported_is_told_with_all_other_problems():
    changes = {"spec": ("nowhere.to_be_found", "layers"), "lr": -1}
    found = " ".join(p.found for p in planned(words_of(case_with(changes), {}), 1)[1])
    assert "cannot import 'layers' from 'nowhere.to_be_found'" in found
    assert "--lr -1" in found


def test_advice_on_drawn_mistakes_is_never_in_vain(tmp_path):
    found = draw_advice(7, 60, tmp_path / "case")
    assert sum(one.changed is not None for one in found) > 20
    assert [str(one) for one in found if one.is_in_vain] == []


@pytest.mark.parametrize("low", [None, -2, 1e-5])
def test_advice_on_a_negative_learning_rate_gives_one_that_is_positive(low, tmp_path):
    words = words_of(case_with({"lr": -1, "min-lr": low}), write_inputs(tmp_path))
    (advice,) = advice_on(words, 1, tmp_path)
    assert advice.changed is not None
    assert advice.after == []


@pytest.mark.parametrize(
    ("fix", "expected"),
    [
        ("use --lr 3e-4 --min-lr 0", "--bf16 --lr 3e-4 --min-lr 0"),
        ("drop --bf16", "--lr 1"),
        ("keep --fp16", "--lr 1"),
        ("leave --bf16 out", "--lr 1"),
        ("add --swiglu, --geglu or both", "--lr 1 --bf16 --swiglu"),
        ("start 6 ranks, or use smaller sizes", "--lr 1 --bf16 --dry-run-world-size 6"),
        ("check the path", None),
    ],
)
def test_advice_is_followed_as_it_is_written(fix, expected, tmp_path):
    problem = ConfigError("a problem.", flags=["--bf16", "--fp16"], fix=fix)
    found = followed(["--lr", "1", "--bf16"], problem, tmp_path)
    assert found == (None if expected is None else expected.split())
