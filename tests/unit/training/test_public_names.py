"""What scripts written for Megatron import from `megatron.training` is there."""

import importlib
from argparse import Namespace

import pytest

from megatron.core.enums import ModelType
from megatron.core.foundation.errors import ConfigError
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import (
    core_transformer_config_from_args,
    parse_args,
    pretrain_cfg_container_from_args,
    validate_args,
)
from megatron.training.config import PretrainConfigContainer, RunConfig
from megatron.training.global_vars import (
    get_args,
    get_timers,
    get_tokenizer,
    set_global_variables,
    unset_global_variables,
)
from megatron.training.training import PretrainCall

SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32"
    " --micro-batch-size 2 --lr 1e-3 --train-iters 10 --mock-data --swiglu"
)


@pytest.fixture(autouse=True)
def _empty_slots():
    yield
    unset_global_variables()


def arguments(more: str = "") -> Namespace:
    return parse_args(args=(SMALL + " " + more).split())


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("arguments", ["parse_args", "validate_args", "parse_and_validate_args",
                       "core_transformer_config_from_args", "pretrain_cfg_container_from_args"]),
        ("checkpointing", ["load_checkpoint", "save_checkpoint"]),
        ("global_vars", ["get_args", "set_args", "set_global_variables", "get_timers",
                         "get_tokenizer", "get_tensorboard_writer", "destroy_global_vars"]),
        ("initialize", ["initialize_megatron", "_set_random_seed"]),
        ("training", ["pretrain", "get_model", "setup_model_and_optimizer", "train_step"]),
        ("utils", ["print_rank_0", "print_rank_last", "unwrap_model", "calc_params_l2_norm",
                   "average_losses_across_data_parallel_group", "get_batch_on_this_cp_rank"]),
    ],
)  # fmt: skip
def test_modules_have_the_names_of_megatron(module, names):
    found = importlib.import_module(f"megatron.training.{module}")
    assert [name for name in names if not hasattr(found, name)] == []


def test_validate_args_derives_in_place():
    args = arguments()
    assert args.ffn_hidden_size is None
    assert validate_args(args) is args
    assert (args.ffn_hidden_size, args.data_parallel_size, args.train_samples) == (128, 1, 20)
    assert validate_args(args).ffn_hidden_size == 128  # twice is as good as once


def test_validate_args_takes_a_scripts_defaults():
    args = validate_args(arguments(), {"weight_decay": 0.5, "hidden_size": 128})
    assert (args.weight_decay, args.hidden_size) == (0.5, 64)


def test_validate_args_raises_all_problems():
    with pytest.raises(ConfigError) as caught:
        validate_args(arguments("--global-batch-size 3 --perform-rl-step"))
    assert len(caught.value.problems) == 2


def test_the_models_config_comes_from_args():
    args = validate_args(arguments("--apply-layernorm-1p --norm-epsilon 1e-6 --bf16"))
    config = core_transformer_config_from_args(args)
    assert type(config) is TransformerConfig
    assert config.gated_linear_unit
    assert config.layernorm_zero_centered_gamma
    assert config.layernorm_epsilon == 1e-6
    assert config.bf16

    class OwnConfig(TransformerConfig):
        pass

    assert type(core_transformer_config_from_args(args, OwnConfig)) is OwnConfig


def test_a_partial_namespace_is_enough_for_the_models_config():
    args = Namespace(num_layers=2, hidden_size=16, num_attention_heads=2, hidden_dropout=0.3)
    config = core_transformer_config_from_args(args)
    assert (config.ffn_hidden_size, config.hidden_dropout) == (64, 0.3)


def test_slots_are_filled_from_args():
    with pytest.raises(ConfigError, match="args does not exist yet"):
        get_args()
    set_global_variables(validate_args(arguments("--vocab-size 99")))
    assert get_args().num_layers == 4
    assert get_tokenizer().vocab_size == 99
    assert get_timers()("x") is not None


def test_pretrain_takes_providers_first_or_a_config_first():
    data, model, step = (lambda n: n), (lambda: 0), (lambda i, m: 0)
    kind = ModelType.encoder_or_decoder
    old = PretrainCall.of((data, model, kind, step), {"args_defaults": {"lr": 1.0}})
    config = pretrain_cfg_container_from_args(arguments())
    assert isinstance(config, PretrainConfigContainer)
    new = PretrainCall.of((config, data, kind, step, model), {})
    named = PretrainCall.of((config, data, kind, step), {"model_provider": model})
    for call in (old, new, named):
        assert (call.dataset_provider, call.model_provider) == (data, model)
        assert call.forward_step is step
    assert new.read().config is config
    assert old.args_defaults == {"lr": 1.0}


def test_pretrain_names_what_is_missing():
    with pytest.raises(TypeError, match="is missing model_provider, forward_step_func"):
        PretrainCall.of((RunConfig(), lambda n: n), {})
