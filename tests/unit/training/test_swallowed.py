"""What is given and cannot act is refused or said, not dropped."""

import inspect
import logging
from types import SimpleNamespace

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolved import ResolvedRun
from megatron.training.initialize import _set_random_seed
from megatron.training.rules import resolve_and_check
from megatron.training.setup import initialize
from megatron.training.setup.distributed import set_numerics
from megatron.training.setup.model import _call_with_known

SMALL = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1"
    " --lr 1e-3 --train-iters 1 --mock-data"
)
CHUNK = {"pre_process": True, "post_process": False, "config": None, "pg_collection": None}


def test_a_provider_that_cannot_be_told_its_chunk_is_refused_where_there_are_several():
    def older(pre_process, post_process):
        return pre_process, post_process

    def newer(pre_process, post_process, vp_stage=None):
        return vp_stage

    assert _call_with_known(older, **CHUNK, vp_stage=None) == (True, False)
    assert _call_with_known(newer, **CHUNK, vp_stage=1) == 1
    assert _call_with_known(lambda **options: options["vp_stage"], **CHUNK, vp_stage=1) == 1
    with pytest.raises(ConfigError, match=r"older\(\) takes no vp_stage"):
        _call_with_known(older, **CHUNK, vp_stage=1)


def test_seeding_takes_the_names_of_megatron_and_no_others():
    parameters = inspect.signature(_set_random_seed).parameters.values()
    assert not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    _set_random_seed(3, te_rng_tracker=True)
    with pytest.raises(ConfigError, match="equal weights"):
        _set_random_seed(3, data_parallel_random_init=True)


def test_norms_that_contradict_the_config_are_refused():
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    get_gpt_decoder_block_spec(config, False, normalization="LayerNorm", pp_rank=0)
    with pytest.raises(ConfigError, match="RMSNorm"):
        get_gpt_decoder_block_spec(config, False, normalization="RMSNorm", pp_rank=0)


def test_a_run_without_a_key_of_wandb_is_recorded_offline(monkeypatch, capsys):
    class Error(Exception):
        pass

    begun = []

    def init(mode=None, **settings):
        begun.append((mode, settings["project"]))
        if mode is None:
            raise Error("api_key not configured (no-tty). call wandb.login(key=[your_api_key])")

    library = SimpleNamespace(Error=Error, init=init)
    monkeypatch.setattr(initialize.optional_imports, "require", lambda name, purpose: library)
    run = ResolvedRun().overlaid({"wandb_project": "p"})
    assert initialize.open_wandb(run) is library
    assert begun == [(None, "p"), ("offline", "p")]
    assert "wandb login" in capsys.readouterr().out


def numerics_of(*words):
    set_numerics(
        resolve_and_check(lambda: parse_command_line([*SMALL.split(), *words]), lambda c: 1)
    )


def test_the_level_of_logging_is_the_one_that_is_asked_for(caplog):
    root = logging.getLogger()
    before = root.level
    try:
        numerics_of()
        assert root.level == before
        numerics_of("--logging-level", "10")
        logging.getLogger("megatron.test").debug("shown")
        numerics_of("--logging-level", "40")
        logging.getLogger("megatron.test").warning("not shown")
    finally:
        root.setLevel(before)
    assert [record.message for record in caplog.records] == ["shown"]


def test_bf16_products_are_summed_in_fp32_where_it_is_asked_for():
    options = torch.backends.cuda.matmul
    before = options.allow_bf16_reduced_precision_reduction
    try:
        for allowed in (True, False):
            options.allow_bf16_reduced_precision_reduction = allowed
            numerics_of()
            assert options.allow_bf16_reduced_precision_reduction is allowed
            numerics_of("--disable-bf16-reduced-precision-matmul")
            assert options.allow_bf16_reduced_precision_reduction is False
    finally:
        options.allow_bf16_reduced_precision_reduction = before
