"""Samples of the tables of encoders; all of them: `python -m tests.parity.encoders`."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron.hugging_face import open_model, read_model_directory, write_model
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.encoder_case import write_vocabulary
from tests.parity.encoders import (
    PUBLISHED,
    against_one_process,
    against_transformers,
    answered,
    curves,
    embeddings_against_one_process,
    reloaded,
    saved,
    written,
)
from tests.parity.layouts import LayoutCase
from tests.parity.table import exceeds

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoders")
    write_vocabulary(path)
    return path


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("bert", LayoutCase(tp=2, sp=True, pp=2, dp=2, stage=3, micro_batch_size=2)),
        ("bert", LayoutCase(pp=2, vp=2, cp=2, micro_batch_size=2)),
        ("bert, post-norm, rope", LayoutCase(tp=2, sp=True, cp=2, micro_batch_size=2)),
        ("t5", LayoutCase(pp=2, micro_batch_size=2, letters="Et|tttttL")),
        ("t5", LayoutCase(tp=2, sp=True, pp=2, micro_batch_size=2, letters="Etttt|ttL")),
        ("t5, untied", LayoutCase(pp=2, vp=2, dp=2, stage=3, letters="Et|tt|t|ttL")),
        ("t5, learned positions", LayoutCase(pp=4, micro_batch_size=2, letters="Ett||tttt|L")),
        ("vlm, states added, recomputed", LayoutCase(tp=2, sp=True, pp=2, micro_batch_size=2)),
        ("vlm, frozen encoder", LayoutCase(pp=2, dp=2, stage=3, micro_batch_size=1)),
    ],
    ids=str,
)
def test_an_encoder_with_dropout_trains_as_in_one_process(case, layout, folder):
    errors = against_one_process(case, layout, folder)
    assert not exceeds(errors), errors


@pytest.mark.parametrize(
    "layout",
    [
        LayoutCase(tp=2, sp=True, cp=2, dp=2, stage=1, micro_batch_size=2),
        LayoutCase(pp=2, dp=2, micro_batch_size=4),
    ],
    ids=str,
)
def test_embeddings_learn_from_the_keys_of_all_replicas_as_in_one_process(layout, folder):
    errors = embeddings_against_one_process(layout, folder)
    assert not exceeds(errors), errors


@pytest.mark.parametrize(
    "case", ["bert", "megatron-bert", "t5", "t5 1.1", "qwen2.5-vl", "qwen3-vl"]
)
def test_logits_and_gradients_are_those_of_transformers(case, folder):
    against_transformers(case, LayoutCase(tp=2, pp=2, micro_batch_size=2), folder)


def test_losses_fall_as_those_of_transformers(folder):
    theirs, ours = curves("bert", LayoutCase(tp=2, sp=True, micro_batch_size=2), folder, 5)
    assert_close(ours, theirs, FP32_REORDERED_SUM, "losses")


@pytest.mark.parametrize(
    ("case", "layouts"),
    [
        ("t5", (LayoutCase(pp=2, letters="Et|tttttL"), LayoutCase(tp=2, sp=True))),
        (
            "t5",
            (
                LayoutCase(tp=2, pp=2, letters="Ettttt|tL"),
                LayoutCase(pp=2, vp=2, letters="E|tt|ttt|tL"),
            ),
        ),
        ("vlm, states added", (LayoutCase(pp=2, letters="Ettt|tL"), LayoutCase(tp=2, sp=True))),
    ],
    ids=str,
)
def test_a_checkpoint_of_both_stacks_loads_in_another_layout(case, layouts, tmp_path):
    before, after = (run.weights for run in reloaded(case, *layouts, tmp_path / "checkpoint"))
    assert before.keys() ^ after.keys() <= {
        "output_layer.weight"
    }  # of a tied head, one stage's copy
    assert all(torch.equal(before[name], after[name]) for name in before.keys() & after.keys())


@pytest.mark.parametrize(
    "layout",
    [LayoutCase(tp=2, sp=True), LayoutCase(pp=2, vp=2, letters="Et|tt|tt|tL")],
    ids=str,
)
def test_a_t5_writes_the_tokens_that_transformers_writes(layout, folder):
    expected, *found = written("t5 1.1", layout, folder)
    assert found == [expected] * layout.world_size


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("qwen2.5-vl", LayoutCase(tp=2, sp=True)),
        ("qwen3-vl", LayoutCase(pp=2, vp=2, letters="Ett|t||tL")),
    ],
    ids=str,
)
def test_a_model_answers_about_images_as_transformers_does(case, layout, folder):
    expected, *found = answered(case, layout, folder)
    assert found == [expected] * layout.world_size


@pytest.mark.parametrize("case", PUBLISHED)
def test_a_model_comes_out_as_it_went_in(case, tmp_path):
    model = saved(case, tmp_path / "in")
    settings = read_model_directory(tmp_path / "in", reads_images=True).settings.stated()
    contents = open_model(tmp_path / "in", reads_images=True)
    write_model(contents, tmp_path / "out", settings=settings)
    before, after = (load_file(tmp_path / d / "model.safetensors") for d in ("in", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    fields = json.loads((tmp_path / "out" / "config.json").read_text())
    loaded = getattr(transformers, fields["architectures"][0]).from_pretrained(tmp_path / "out")
    assert type(loaded) is type(model)
    ids = torch.arange(20).view(2, 10)
    given = {"decoder_input_ids": ids} if loaded.config.is_encoder_decoder else {}
    assert torch.equal(loaded(ids, **given)[0], model(ids, **given)[0])
