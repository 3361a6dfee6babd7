"""Directories that are not what they should be, and models that cannot be built, are refused."""

import json
import struct

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron.core.foundation.errors import CheckpointError, ConfigError, MegatronError
from megatron.core.transformer.yarn import yarn_inverse_frequencies
from megatron.hugging_face import family_of_settings, open_model, read_model_directory
from megatron.hugging_face.model_description import ModelDescription
from megatron.training.checkpointing.hugging_face import note_on_precision
from megatron.training.cli.parser import parse_command_line
from megatron.training.rules import resolve_and_check
from tests.unit.hugging_face.models import flags_for, saved

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    saved("llama", directory)
    return directory


@pytest.fixture
def model(original, tmp_path):
    for name in ("config.json", WEIGHTS):
        (tmp_path / name).write_bytes((original / name).read_bytes())
    return tmp_path


def change_config(model, **fields):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"attention_bias": True}, "attention_bias"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"a_field_of_tomorrow": 3}, "(?s)a_field_of_tomorrow.*delete its line"),
        ({"rope_scaling": {"rope_type": "su", "factor": 4.0}}, "rope_type"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5,
                           "original_max_position_embeddings": 16}}, "attention_factor"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 2.0}},
         "low_freq_factor"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"_sliding_window_pattern": 6}, "_sliding_window_pattern"),
        ({"_layer_version": 2}, "_layer_version"),
    ],
)  # fmt: skip
def test_a_config_that_is_not_understood_is_refused(model, fields, named):
    if "rope_scaling" in fields:
        change_config(model, rope_parameters=None)
    change_config(model, **fields)
    with pytest.raises(ConfigError, match=named):
        read_model_directory(model)


def test_yarn_without_the_length_before_it_stretches_as_transformers_does(model):
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5000.0}
    change_config(model, rope_parameters=scaling)
    settings = read_model_directory(model).settings
    config = transformers.AutoConfig.from_pretrained(model)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, device=torch.device("cpu"))
    found = yarn_inverse_frequencies(
        2 * len(expected), settings.rotary_base, factor=settings.rotary_scaling_factor,
        original_context=settings.original_max_position_embeddings,
        beta_fast=settings.beta_fast, beta_slow=settings.beta_slow,
    )  # fmt: skip
    torch.testing.assert_close(found, expected)


def test_what_a_program_notes_for_itself_does_not_stop_the_load(model):
    expected = read_model_directory(model).settings
    change_config(
        model, _name_or_path="SmolLM2", _model_name_or_path="Smollm2 135M 8k", unsloth_version="1",
        axolotl_version="0.4", name_or_path="here", language=["en"], _from_model_config=True,
        unsloth_fixed=True, repetition_penalty=1.1, tags=["x"],
    )  # fmt: skip
    assert read_model_directory(model).settings == expected


@pytest.mark.parametrize(
    ("stored", "trained", "flag"),
    [
        ("bfloat16", torch.float32, "--bf16"),
        ("float16", torch.float32, "--fp16"),
        ("bfloat16", torch.bfloat16, None),
        ("float32", torch.float32, None),
    ],
)
@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_a_half_precision_model_trained_in_fp32_is_told_the_flag(
    model, field, stored, trained, flag
):
    change_config(model, dtype=None, torch_dtype=None)
    change_config(model, **{field: stored})
    said = note_on_precision(model, trained)
    assert said is None if flag is None else f"trained in float32; {flag} computes" in said


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "up_proj"),
        (lambda t: t.update({"model.layers.0.extra.weight": torch.ones(2)}), "extra"),
        (lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.ones(95, 64)}),
         r"shape \(95, 64\)"),
        (lambda t: t.update({n: torch.ones(16, 64) for n in t if "k_proj" in n}), "k_proj"),
        (lambda t: t.update({n: torch.ones(64, 64) for n in t if "k_proj" in n}), "more rows"),
    ],
)  # fmt: skip
def test_weights_that_do_not_belong_to_the_config_are_refused(model, change, named):
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS)
    with pytest.raises(MegatronError, match=named):
        _load(model)


def _load(model):
    from tests.unit.hugging_face.models import our_model

    our_model(model)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        struct.pack("<Q", 1 << 60) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 4) + b"{nul",
        struct.pack("<Q", 60) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4000000]}}',
        struct.pack("<Q", 54) + b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}',
        struct.pack("<Q", 54) + b'{"a":{"dtype":"X32","shape":[1],"data_offsets":[0,4]} }',
    ],
)
def test_a_file_that_is_not_safetensors_is_refused(model, content):
    (model / WEIGHTS).write_bytes(content)
    with pytest.raises(CheckpointError, match=WEIGHTS):
        open_model(model)


def test_a_truncated_file_is_refused(model):
    whole = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=WEIGHTS):
        open_model(model)


def test_an_index_cannot_lead_out_of_the_directory(model):
    (model / WEIGHTS).unlink()
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="has a path in it"):
        open_model(model)


def test_pickled_weights_are_not_opened(model):
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="safe_serialization"):
        open_model(model)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_model(tmp_path / "nothing")


def test_flags_may_repeat_the_model_but_not_change_it(model):
    words = flags_for(model)
    parse_command_line([*words, "--num-layers", "4"])
    with pytest.raises(ConfigError) as caught:
        parse_command_line([*words, "--num-layers", "5", "--rotary-base", "7", "--preset", "gpt2"])
    for flag in ("--num-layers 5", "--rotary-base 7", "--preset"):
        assert flag in str(caught.value)


def test_a_model_that_no_family_can_express_is_not_exported():
    settings = ModelDescription(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=16,
        max_position_embeddings=8, untie_embeddings_and_output_weights=True, squared_relu=True,
        unpadded_vocab_size=16,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="squared_relu"):
        family_of_settings(settings)


def test_flags_that_contradict_a_model_bring_no_problems_of_a_missing_shape(model):
    words = [*flags_for(model), "--vocab-size", "96", "--num-layers", "7", "--clip-grad", "-1"]
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(lambda: parse_command_line(words), lambda config: 1)
    found = [problem.found.split()[0] for problem in caught.value.problems]
    assert sorted(found) == ["--clip-grad", "--num-layers", "--vocab-size"]


def test_problems_of_a_model_and_of_the_flags_are_one_list_without_headings_in_it(model):
    change_config(model, hidden_act="gelu", attention_bias=True)
    words = [*flags_for(model), "--clip-grad", "-1"]
    with pytest.raises(ConfigError) as caught:
        resolve_and_check(lambda: parse_command_line(words), lambda config: 1)
    told = str(caught.value)
    assert told.count(" problem") == 1
    assert [f"[{number}]" in told for number in (1, 2, 3, 4)] == [True, True, True, False]
    of_the_model = [one for one in caught.value.problems if "config.json" in one.found]
    assert len(of_the_model) == 2
