"""Reading the command line and YAML: values, precedence, and all problems in one message."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigError
from megatron.core.transformer.enums import AttnBackend
from megatron.training.cli.parser import parse_command_line
from megatron.training.cli.suggest import suggestion


def values(*words: str, **options):
    return parse_command_line(list(words), **options).config.flat()


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--num-layers", "12"], "num_layers", 12),
        (["--lr=3e-4"], "lr", 3e-4),
        (["--swiglu"], "swiglu", True),
        (["--window-size", "4096,0"], "window_size", (4096, 0)),
        (["--window-size", "-1,0"], "window_size", (-1, 0)),
        (["--moe-layer-freq", "([0]*2+[1])*2"], "moe_layer_freq", [0, 0, 1, 0, 0, 1]),
        (["--moe-layer-freq", "4"], "moe_layer_freq", 4),
        (["--attention-backend", "flash"], "attention_backend", AttnBackend.flash),
        (["--rampup-batch-size", "8", "8", "1000"], "rampup_batch_size", [8, 8, 1000]),
        (["--data-path", "0.3", "a", "0.7", "b"], "data_path", ["0.3", "a", "0.7", "b"]),
        (["--moe-aux-loss-coeff", "0.1"], "moe_aux_loss_coeff", 0.1),
        (["--moe-aux-loss-coeff", "0.1", "0.2"], "moe_aux_loss_coeff", [0.1, 0.2]),
        (["--profile-ranks", "0"], "profile_ranks", [0]),
        (["--recompute-modules", "core_attn"], "recompute_modules", ["core_attn"]),
        (["--fp8-format", "hybrid"], "fp8", "hybrid"),
        (["--local-rank=3"], "local_rank", 3),
    ],
)
def test_a_value_has_the_type_of_its_field(words, name, value):
    assert values(*words)[name] == value


def test_a_later_flag_wins():
    assert values("--lr", "1", "--lr", "2")["lr"] == 2.0


def test_all_problems_of_a_command_line_come_together():
    words = ["--nun-layers", "3", "--lr", "fast", "--optimizer", "adamw", "--moe-layer-freq", "x("]
    with pytest.raises(ConfigError) as caught:
        values(*words)
    assert len(caught.value.problems) == 4
    text = str(caught.value)
    assert "did you mean --num-layers?" in text
    assert "'fast' is not a float" in text
    assert "'adamw' is not one of adam, sgd" in text


def test_list_expressions_are_not_python():
    with pytest.raises(ConfigError, match="is not a number or a list expression"):
        values("--moe-layer-freq", "__import__('os').getpid()")


def test_a_stray_value_is_named():
    with pytest.raises(ConfigError, match="'64' on the command line belongs to no flag"):
        values("--swiglu", "64")


def test_a_missing_value_is_named():
    with pytest.raises(ConfigError, match="argument --lr: expected one argument"):
        values("--lr", "--swiglu")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--num-layer", "--num-layers"),
        ("--batch-size", "--micro-batch-size"),
        ("--tp", "--tensor-model-parallel-size"),
        ("--parallel-size-tensor-model", "--tensor-model-parallel-size"),
        ("--hidden_size", "--hidden-size"),
        ("--qqqqq", ""),
    ],
)
def test_a_misspelled_flag_is_recognised(wrong, right):
    assert suggestion(wrong) == right


def test_scripts_add_their_own_flags():
    def add(parser):
        parser.add_argument("--my-flag", type=int, default=7)
        parser.add_argument("--my-other", type=str)
        return parser

    command = parse_command_line(["--my-other", "x"], extra_args_provider=add)
    assert command.extra == {"my_flag": 7, "my_other": "x"}


def test_unknown_flags_can_be_left_to_the_caller():
    assert values("--theirs", "1", "--lr", "2", ignore_unknown_args=True)["lr"] == 2.0


def test_yaml_takes_flat_names_and_sections(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "num_layers: 4\nmodel:\n  hidden-size: 64\n  disable_bias_linear: true\n"
        "schedule:\n  lr: 1e-3\n  rampup_batch_size: [2, 2, 10]\n  iterations_to_skip: 3\n"
        "window_size: [16, 0]\nno_rope_freq: [0, 1]\nattention_backend: local\n"
    )
    found = values("--yaml-cfg", str(file))
    assert found["num_layers"] == 4
    assert found["hidden_size"] == 64
    assert found["add_bias_linear"] is False
    assert found["lr"] == 1e-3  # YAML reads 1e-3 as text
    assert found["rampup_batch_size"] == [2, 2, 10]
    assert found["iterations_to_skip"] == [3]
    assert found["window_size"] == (16, 0)
    assert found["no_rope_freq"] == [0, 1]
    assert found["attention_backend"] is AttnBackend.local


def test_the_command_line_wins_over_yaml_over_preset_over_script(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num_layers: 4\npreset: gpt2-124m\n")
    script = {"num_layers": 1, "hidden_size": 1, "seq_length": 1}
    found = values("--yaml-cfg", str(file), "--hidden-size", "32", args_defaults=script)
    assert (found["num_layers"], found["hidden_size"]) == (4, 32)
    assert (found["num_attention_heads"], found["seq_length"]) == (12, 1)


def test_problems_of_yaml_come_together_with_those_of_the_command_line(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("num_layerz: 4\nlr: fast\nswiglu: 3\nhidden_size: 1\nhidden-size: 2\n")
    with pytest.raises(ConfigError) as caught:
        values("--yaml-cfg", str(file), "--micro-batch-size", "x")
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert "did you mean num_layers?" in text
    assert "3 in" in text
    assert "is not true or false" in text
    assert "--hidden-size is set twice" in text


@pytest.mark.parametrize("content", ["- a\n- b\n", "a: [1\n"])
def test_a_broken_yaml_file_is_refused(tmp_path, content):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError, match="the settings file"):
        values("--yaml-cfg", str(file))


def test_an_unknown_preset_suggests_near_ones():
    with pytest.raises(ConfigError, match="llama3-8b"):
        values("--preset", "llama3-8")


def test_a_preset_gives_the_published_sizes():
    found = values("--preset", "llama3-8b")
    assert (found["num_layers"], found["hidden_size"], found["num_query_groups"]) == (32, 4096, 8)
    assert found["group_query_attention"]
    assert found["swiglu"]
    assert found["untie_embeddings_and_output_weights"]
    assert found["rotary_base"] == 500_000
