"""Reading the command line and YAML: values, precedence, and all problems in one message."""

import argparse

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import parse_args
from megatron.training.cli.parser import UnreadableCommandError, parse_command_line
from megatron.training.cli.suggest import suggestion
from megatron.training.config.run import flags_by_spelling, opposites_by_spelling
from megatron.training.rules import resolve_and_check


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


def test_a_flag_of_a_script_stands_for_a_namesake_that_nothing_reads():
    def add(parser):
        parser.add_argument("--tokenizer-metadata", type=str)
        return parser

    command = parse_command_line(["--tokenizer-metadata", "x"], extra_args_provider=add)
    assert command.extra == {"tokenizer_metadata": "x"}
    assert command.config.flat()["tokenizer_metadata"] is None
    args = parse_args(extra_args_provider=add, args=["--tokenizer-metadata", "x"])
    assert args.tokenizer_metadata == "x"


def test_a_flag_of_a_script_cannot_replace_one_that_acts():
    def add(parser):
        parser.add_argument("--lr", type=str)

    with pytest.raises(argparse.ArgumentError, match="conflicting option string: --lr"):
        parse_command_line([], extra_args_provider=add)


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


def settings_problems(text: str, world_size: int = 1) -> list[str]:
    """Return all problems of a command line, of reading it and of its rules."""
    try:
        resolve_and_check(lambda: parse_command_line(text.split()), lambda config: world_size)
    except ConfigError as error:
        return [problem.describe() for problem in error.problems]
    return []


def test_mistakes_of_every_kind_come_in_one_message_without_what_follows_from_them(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("hiden_size: 64\nseq_length: long\n")
    found = settings_problems(
        "--num-layer 4 --num-attention-heads 3 --micro-batch-size 2 --lr 1e-3"
        f" --train-iters 10 --foo --min-lr 1 --global-batch-size 0 --yaml-cfg {path} --adam-beta1 x"
        " --position-embedding-type mrope --rampup-batch-size 1 2"
    )
    expected = [
        "--adam-beta1 'x'", "--rampup-batch-size", "unknown flag --num-layer.",
        "unknown flag --foo", "unknown setting 'hiden_size'", "seq_length: 'long'",
        "--global-batch-size 0", "--position-embedding-type mrope", "--lr 0.001 with --min-lr 1",
    ]  # fmt: skip
    assert len(found) == len(expected)
    for text in expected:
        assert any(text in problem for problem in found), text


def test_what_an_unreadable_source_would_have_set_is_not_missed():
    sizes = "--seq-length 8 --micro-batch-size 1 --train-iters 1 --lr 1"
    found = settings_problems(f"--preset gpt2-smal {sizes} --min-lr 2")
    assert len(found) == 2
    assert "gpt2-smal" in found[0]
    assert "--min-lr 2" in found[1]


def test_a_layout_with_prediction_stages_is_right_beside_another_mistake():
    found = settings_problems(
        "--num-layers 2 --hidden-size 64 --num-attention-heads 3 --seq-length 8 --lr 1"
        " --micro-batch-size 1 --train-iters 1 --pipeline-model-parallel-size 2"
        " --mtp-num-layers 1 --pipeline-model-parallel-layout Ett|mL",
        world_size=2,
    )
    assert len(found) == 1
    assert "num_attention_heads=3" in found[0] or "not divisible" in found[0]


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("--use-checkpoint-opt_param-scheduler", "use_checkpoint_opt_param_scheduler", True),
        ("--num_layers=4", "num_layers", 4),
        ("--deepspeed-config=x.json", "deepspeed_config", "x.json"),
        ("--ckpt-fully-parallel-save", "ckpt_fully_parallel_save", True),
        ("--add-bias-linear", "add_bias_linear", True),
        ("--no-swiglu", "swiglu", False),
        ("--load-optim", "no_load_optim", False),
    ],
)
def test_underscores_and_the_spelling_of_a_default_are_understood(word, name, value):
    try:
        command = parse_command_line([word])
    except UnreadableCommandError as error:
        command = error.command
    assert name in command.given
    assert command.config.value_of(name) == value


def test_yaml_takes_the_spelling_of_a_default(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("no_swiglu: true\nbias_linear: false\nno_rope_fusion: true\n")
    found = parse_command_line(["--yaml-cfg", str(path)]).config
    assert not found.model.swiglu
    assert not found.model.add_bias_linear
    assert not found.model.apply_rope_fusion


def test_no_spelling_of_a_switch_means_two_things():
    assert not set(opposites_by_spelling()) & set(flags_by_spelling())


def shown_by(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        parse_command_line(list(words))
    assert not caught.value.code
    return capsys.readouterr().out


def test_help_shows_everything_one_group_or_what_has_a_word(capsys):
    everything = shown_by(capsys, "--help")
    assert "--num-layers" in everything
    assert "--help GROUP shows the flags of one group: model, latent_attention" in everything
    group = shown_by(capsys, "--help", "latent-attention", "--num-layers", "2")
    assert "--multi-latent-attention" in group
    assert "--num-layers" not in group
    assert len(group.splitlines()) < 60
    found = shown_by(capsys, "-h", "rope_scaling")
    assert "--use-rope-scaling" in found
    assert "--lr " not in found
    assert "--tensorboard-dir" in shown_by(capsys, "--help=TensorBoard")
    with pytest.raises(ConfigError, match="groups are model, latent_attention"):
        parse_command_line(["--help", "nothing-like-it"])
