"""A model of Transformers and ours from the same files: equal logits, gradients, files again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from megatron.core.agreement import SingleProcess
from megatron.core.dist_checkpointing import save
from megatron.core.dist_checkpointing.loader import open_contents
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.hugging_face import family_of_settings, read_model_directory, write_model
from megatron.hugging_face.families import family_misfit
from megatron.hugging_face.families.family import geometry_of
from megatron.hugging_face.reading import full_name
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.hugging_face.models import CASES, LENGTH, VOCAB, our_model, saved


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case, tmp_path):
    theirs = saved(case, tmp_path)
    ours, settings = our_model(tmp_path)
    ids, labels = tokens(), tokens(1)
    expected = theirs(ids).logits
    assert_close(ours(ids, None, None)[..., :VOCAB], expected, FP32_REORDERED_SUM, "logits")

    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    ours(ids, None, None, labels=labels).mean().backward()
    found = dict(ours.named_parameters())
    names = dict(theirs.named_parameters())
    if "lm_head.weight" in names:
        names.setdefault("embed_out.weight", names["lm_head.weight"])  # so GPT-NeoX's file has it
    model = read_model_directory(tmp_path)
    compared = 0
    for rule in model.family.rules(model.settings):
        for mine, others in rule.names(geometry_of(settings)):
            mine = mine.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
            mine = mine.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")
            grads = [names[full_name(n, model.family.prefixes[0])].grad for n in others]
            grads = [g.t() if rule.is_transposed else g for g in grads]
            for rows in rule.arrangement(geometry_of(settings), [len(g) for g in grads]):
                part = grads[rows.source].narrow(0, rows.begin, rows.length)
                own = found[mine].grad.narrow(0, rows.place, rows.length)
                assert_close(own, part, FP32_REORDERED_SUM, mine)
                compared += part.numel()
    assert compared == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize("case", CASES)
def test_the_way_out_gives_the_same_files(case, tmp_path):
    import transformers

    theirs = saved(case, tmp_path / "in")
    ours, settings = our_model(tmp_path / "in")
    state = sharded_state_dict_of(ours, pg_collection=ProcessGroupCollection.single())
    save(state, tmp_path / "ours", process_group=SingleProcess())
    contents = open_contents(tmp_path / "ours", peers=SingleProcess())
    written = write_model(
        contents, tmp_path / "out", settings=settings, companion=tmp_path / "in", file_bytes=100_000
    )
    before = load_file(tmp_path / "in" / "model.safetensors")
    after = {}
    for name in written.files:
        after |= load_file(tmp_path / "out" / name)
    assert len(written.files) > 1
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)


@pytest.mark.parametrize("case", CASES)
def test_settings_survive_the_way_out_and_back(case, tmp_path):
    saved(case, tmp_path)
    model = read_model_directory(tmp_path)
    assert not family_misfit(model.family, model.settings)
    # Another family may be able to express the same model: a Mistral without a window is a Llama.
    assert not family_misfit(family_of_settings(model.settings), model.settings)
