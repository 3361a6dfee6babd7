"""A model of Transformers and ours from the same files: equal logits, gradients, files again."""

import dataclasses
import json
import re

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing import save
from megatron.core.dist_checkpointing.loader import open_contents
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.core.transport.object_collectives import SingleProcess
from megatron.hugging_face import (
    family_of_settings,
    open_model,
    read_model_directory,
    write_model,
)
from megatron.hugging_face.families import family_misfit
from megatron.hugging_face.model_description import FLAG_OF, described_fields
from megatron.training.config.run import all_flags
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.hugging_face.gradients import compare_gradients
from tests.unit.hugging_face.models import (
    CASES,
    LENGTH,
    VOCAB,
    our_model,
    saved,
    their_class,
)

DESCRIPTION_DEFAULTS = {
    FLAG_OF.get(field.name, field.name): field.default
    for field in described_fields()
    if field.default is not dataclasses.MISSING
}


def test_what_a_description_leaves_out_has_the_default_of_its_flag():
    flags = {
        name: spec.default for name, spec in all_flags().items() if name in DESCRIPTION_DEFAULTS
    }
    assert flags == DESCRIPTION_DEFAULTS


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_transformers(case, tmp_path):
    theirs = saved(case, tmp_path)
    ours, _ = our_model(tmp_path)
    ids, labels = tokens(), tokens(1)
    expected = theirs(ids).logits
    assert_close(ours(ids, None, None)[..., :VOCAB], expected, FP32_REORDERED_SUM, "logits")

    F.cross_entropy(expected.flatten(0, 1), labels.flatten()).backward()
    ours(ids, None, None, labels=labels).mean().backward()
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    compare_gradients(tmp_path, theirs, gradients)


@pytest.mark.parametrize("case", CASES)
def test_the_way_out_gives_the_same_files(case, tmp_path):
    theirs = saved(case, tmp_path / "in")
    ours, settings = our_model(tmp_path / "in")
    state = sharded_state_dict_of(ours, pg_collection=ProcessGroupCollection.single())
    save(state, tmp_path / "ours", process_group=SingleProcess())
    contents = open_contents(tmp_path / "ours", peers=SingleProcess())
    written = write_model(
        contents, tmp_path / "out", settings=settings, companion=tmp_path / "in", file_bytes=100_000
    )
    before = load_file(tmp_path / "in" / "model.safetensors")
    left_out = re.compile("|".join([*read_model_directory(tmp_path / "in").family.left_out, "-"]))
    before = {name: tensor for name, tensor in before.items() if not left_out.match(name)}
    after = {}
    for name in written.files:
        after |= load_file(tmp_path / "out" / name)
    assert len(written.files) > 1
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    again = their_class(config).from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert torch.equal(again(tokens()).logits, theirs(tokens()).logits)


def test_layers_that_predict_later_tokens_are_left_out_with_a_line_that_says_so(tmp_path):
    saved("deepseek v3", tmp_path)
    file = tmp_path / "model.safetensors"
    extra = {"model.layers.4.eh_proj.weight": torch.ones(4, 8)}
    save_file(load_file(file) | extra, file, {"format": "pt"})
    assert any("predicts later tokens is left out" in note for note in open_model(tmp_path).notes)


@pytest.mark.parametrize("case", CASES)
def test_settings_survive_the_way_out_and_back(case, tmp_path):
    saved(case, tmp_path)
    model = read_model_directory(tmp_path)
    assert not family_misfit(model.family, model.settings)
    # Another family may be able to express the same model: a Mistral without a window is a Llama.
    assert not family_misfit(family_of_settings(model.settings), model.settings)


OF_IMAGES = {"hidden_size": 32, "intermediate_size": 48}
WITH_IMAGES = {
    "Kimi_K25": (
        "deepseek v3",
        {**OF_IMAGES, "num_hidden_layers": 2, "num_attention_heads": 2},
        {"projection_hidden_size": 32},
    ),
    "Qwen3_5": ("qwen3_5", {**OF_IMAGES, "depth": 2, "num_heads": 2, "out_hidden_size": 64}, {}),
    "Qwen3_5Moe": (
        "qwen3_5 with experts",
        {**OF_IMAGES, "depth": 2, "num_heads": 2, "out_hidden_size": 64},
        {},
    ),
}
"""Name of Transformers' classes -> case of the language model, fields of the encoder, others."""


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_the_language_model_inside_a_model_with_images_is_read_and_written_alone(name, tmp_path):
    import transformers

    case, vision, others = WITH_IMAGES[name]
    torch.manual_seed(3)
    text = {**CASES[case][1], "tie_word_embeddings": False}
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, tie_word_embeddings=False, **others
    )
    kind = getattr(transformers, f"{name}ForConditionalGeneration")
    theirs = kind._from_config(config, attn_implementation="eager").eval()
    theirs.save_pretrained(tmp_path / "in")
    expected = theirs(tokens()).logits
    ours, settings = our_model(tmp_path / "in")
    assert_close(ours(tokens(), None, None)[..., :VOCAB], expected, FP32_REORDERED_SUM, "logits")
    opened = open_model(tmp_path / "in")
    assert any("the encoder of images is left out" in note for note in opened.notes)
    write_model(opened, tmp_path / "out", settings=settings, companion=tmp_path / "in")
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    assert torch.equal(again(tokens()).logits, expected)


def test_a_kimi_k2_is_a_deepseek_v3(tmp_path):
    saved("deepseek v3", tmp_path)
    before, config = read_model_directory(tmp_path), tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "kimi_k2"}))
    after = read_model_directory(tmp_path)
    assert (after.family, after.settings) == (before.family, before.settings)


@pytest.mark.parametrize(
    ("config", "vision", "case"),
    [
        ("Gemma3Config", "SiglipVisionConfig", "gemma3"),
        ("Mistral3Config", "PixtralVisionConfig", "ministral3"),
    ],
)
def test_of_a_model_with_images_the_language_model_is_read(config, vision, case, tmp_path):
    kind, arguments = CASES[case]
    images = getattr(transformers, vision)(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        image_size=28, patch_size=14,
    )  # fmt: skip
    text = getattr(transformers, kind)(**arguments)
    whole = getattr(transformers, config)(
        text_config=text, vision_config=images, tie_word_embeddings=text.tie_word_embeddings
    )
    model = transformers.AutoModelForImageTextToText.from_config(whole, attn_implementation="eager")
    model.eval().save_pretrained(tmp_path)
    ours, _ = our_model(tmp_path)
    expected = model(input_ids=tokens()).logits
    assert_close(ours(tokens(), None, None)[..., :VOCAB], expected, FP32_REORDERED_SUM, "logits")
    assert any("encoder of images is left out" in note for note in open_model(tmp_path).notes)


def test_of_a_gemma_3n_as_it_is_published_the_language_model_is_read(tmp_path):
    theirs = saved("gemma3n", tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    text = json.loads(config.read_text())
    whole = transformers.Gemma3nConfig(text_config=text)
    config.write_text(whole.to_json_string(use_diff=False))
    tensors = {
        name.replace("model.", "model.language_model.", 1): value
        for name, value in load_file(file).items()
    }
    parts = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
    tensors |= {f"model.{part}.weight": torch.zeros(2, 2) for part in parts}
    save_file(tensors, file, {"format": "pt"})
    ours, _ = our_model(tmp_path)
    expected = theirs(tokens()).logits
    assert_close(ours(tokens(), None, None)[..., :VOCAB], expected, FP32_REORDERED_SUM, "logits")
    assert any("encoder of sound is left out" in note for note in open_model(tmp_path).notes)


def test_ax_k1_is_read_as_it_is_published(tmp_path):
    """Published files have norms that dense layers do not use, and no bias that chooses."""
    theirs = saved("axk1", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = {n: t for n, t in load_file(file).items() if "e_score_correction_bias" not in n}
    stored["model.layers.0.post_mlp_layernorm.weight"] = torch.full((64,), 7.0)
    save_file(stored, file, {"format": "pt"})
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.zero_()
    ours, _ = our_model(tmp_path)
    logits = ours(tokens(), None, None)[..., :VOCAB]
    assert_close(logits, theirs(tokens()).logits, FP32_REORDERED_SUM, "logits")
    assert "2 vectors that no file contains are zero" in open_model(tmp_path).notes


def published_kimi(directory):
    """Name fields and tensors as the files do that are published."""
    file, config = directory / "model.safetensors", directory / "config.json"
    fields = json.loads(config.read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_conv_kernel_dim"):
        del fields[name]
    sizes = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
    linear = {name: fields.pop(newer) for name, newer in sizes.items()}
    linear |= {"full_attn_layers": [3], "kda_layers": [1, 2, 4], "short_conv_kernel_size": 4}
    fields |= {
        "linear_attn_config": linear, "first_k_dense_replace": 1, "moe_layer_freq": 1,
        "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "use_grouped_topk": True,
        "rope_theta": 10000.0, "rope_scaling": None, "num_nextn_predict_layers": 0,
    }  # fmt: skip
    config.write_text(json.dumps(fields))
    dense = "layers.0.block_sparse_moe."
    named = {n.replace(dense, "layers.0.mlp."): tensor for n, tensor in load_file(file).items()}
    save_file(named, file, {"format": "pt"})
    return fields


def test_kimi_linear_is_read_as_it_is_published(tmp_path):
    theirs = saved("kimi_linear", tmp_path)
    fields = published_kimi(tmp_path)
    ours, _ = our_model(tmp_path)
    logits = ours(tokens(), None, None)[..., :VOCAB]
    assert_close(logits, theirs(tokens()).logits, FP32_REORDERED_SUM, "logits")

    fields["linear_attn_config"]["num_heads"] = 5
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="linear_num_heads 5"):
        read_model_directory(tmp_path)


@pytest.mark.parametrize("case", ["sarvam with experts", "sarvam with latents"])
def test_sarvam_is_read_as_it_is_published(tmp_path, case):
    theirs = saved(case, tmp_path)
    config = tmp_path / "config.json"
    fields = json.loads(config.read_text())
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    if case.endswith("experts"):
        names["attention_bias"] = "use_qkv_bias"
    else:
        rope = fields.pop("rope_parameters")
        base = rope.pop("rope_theta")
        fields |= {"rope_theta": base, "rope_scaling": {**rope, "rope_type": "deepseek_yarn"}}
    fields |= {published: fields.pop(name) for name, published in names.items()}
    config.write_text(json.dumps(fields))
    ours, _ = our_model(tmp_path)
    logits = ours(tokens(), None, None)[..., :VOCAB]
    assert_close(logits, theirs(tokens()).logits, FP32_REORDERED_SUM, "logits")
