"""Derived values, each with its formula."""

import contextlib
import copy
import io
import os
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.arguments import run_as_in
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.config.resolved import Machine, pad_vocabulary, resolve_vocabulary
from megatron.training.rules import resolve_and_check
from megatron.training.setup.stages import is_dataset_built_on_rank


def words_of(text: str) -> list[str]:
    """Split a command line."""
    return text.split()


SMALL = words_of(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size "
    "2 --lr 1e-3 --train-iters 10"
)


def run(*words: str, world_size: int = 1, machine: Machine | None = None):
    config = parse_command_line([*SMALL, *words]).config
    return resolve(config, world_size=world_size, machine=machine)


@pytest.mark.parametrize(
    ("words", "world_size", "name", "value"),
    [
        ("", 1, "ffn_hidden_size", 256),
        ("--swiglu", 1, "ffn_hidden_size", 128),  # 4*64*2/3 = 170 -> 128
        ("--hidden-size 4096 --swiglu", 1, "ffn_hidden_size", 10880),
        ("", 1, "kv_channels", 16),
        ("", 1, "num_query_groups", 4),
        ("--group-query-attention", 1, "num_query_groups", 1),
        ("--group-query-attention --num-query-groups 2", 1, "num_query_groups", 2),
        ("", 1, "max_position_embeddings", 32),
        # (0.1 ln 1 + 1)^2 / sqrt(16)
        ("--position-embedding-type yarn", 1, "softmax_scale", 0.25),
        ("--tensor-model-parallel-size 2", 8, "data_parallel_size", 4),
        ("", 8, "global_batch_size", 16),
        ("--global-batch-size 64", 8, "global_batch_size", 64),
        ("--sequence-parallel", 1, "sequence_parallel", False),
        ("--sequence-parallel --tensor-model-parallel-size 2", 2, "sequence_parallel", True),
        ("--bf16", 1, "params_dtype", torch.bfloat16),
        ("--bf16", 1, "grad_reduce_in_fp32", True),
        ("--bf16 --grad-reduce-in-bf16", 1, "grad_reduce_in_fp32", False),
        (
            "--bf16 --grad-reduce-in-bf16 --accumulate-allreduce-grads-in-fp32",
            1,
            "grad_reduce_in_fp32",
            False,
        ),
        ("--fp16", 1, "params_dtype", torch.float16),
        ("--use-rotary-position-embeddings", 1, "position_embedding_type", "rope"),
        ("--no-position-embedding", 1, "position_embedding_type", "none"),
        ("--multi-latent-attention", 1, "position_embedding_type", "rope"),
        (
            "--no-position-embedding --position-embedding-type rope",
            1,
            "position_embedding_type",
            "rope",
        ),
        ("--no-rope-freq 2", 1, "no_rope_freq", [0, 1, 0, 1]),
        ("--recompute-activations", 1, "recompute_granularity", "selective"),
        ("", 1, "train_samples", 20),
        ("", 1, "lr_decay_steps", 20),
        ("--lr-warmup-iters 3", 1, "lr_warmup_steps", 6),
        ("--lr-warmup-fraction 0.25", 1, "lr_warmup_steps", 5),
        ("--lr-decay-iters 7 --global-batch-size 4", 1, "lr_decay_steps", 28),
        ("--weight-decay 0.1", 1, "end_weight_decay", 0.1),
        ("--mock-data", 1, "tokenizer_type", "NullTokenizer"),
        ("", 1, "mock_data", True),
        ("--data-path corpus", 1, "mock_data", False),
        ("--data-path corpus", 1, "split", "969,30,1"),
        ("--train-data-path corpus", 1, "split", None),
        ("", 2, "data_parallel_sharding_strategy", "no_shard"),
        ("--use-distributed-optimizer", 2, "data_parallel_sharding_strategy", "optim"),
        ("--use-megatron-fsdp", 2, "data_parallel_sharding_strategy", "optim_grads_params"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim",
            2,
            "data_parallel_sharding_strategy",
            "optim",
        ),
        ("--data-parallel-sharding-strategy optim_grads", 2, "use_distributed_optimizer", True),
        ("--use-tp-pp-dp-mapping", 1, "rank_order", "tp-cp-ep-pp-dp"),
        ("", 1, "transformer_impl", "local"),
        ("", 1, "distributed_backend", "gloo"),
        ("--global-batch-size 7 --decrease-batch-size-if-needed", 1, "global_batch_size", 6),
    ],
)
def test_a_value_is_derived(words, world_size, name, value):
    assert run(*words.split(), world_size=world_size).values[name] == value


@pytest.mark.parametrize(
    ("words", "chunks"),
    [
        (["--num-virtual-stages-per-pipeline-rank", "2"], 2),
        (["--num-layers-per-virtual-pipeline-stage", "1"], 2),
        (["--num-layers-per-virtual-pipeline-stage", "2"], None),
        (["--pipeline-model-parallel-layout", "Et|t|t|tL"], 2),
        ([], None),
    ],
)
def test_the_number_of_virtual_stages_follows_from_each_way_of_saying_it(words, chunks):
    found = run("--pipeline-model-parallel-size", "2", *words, world_size=2)
    assert found.parallelism.virtual_pipeline_model_parallel_size == chunks


def test_a_run_in_samples_counts_its_steps():
    config = parse_command_line(
        [*SMALL[:-2], "--train-samples", "1000", "--global-batch-size", "8"]
    ).config
    assert resolve(config, world_size=1).schedule.train_iters == 125


def test_a_run_in_samples_with_a_growing_batch_counts_its_steps():
    words = [*SMALL[:-2], "--train-samples", "100", "--global-batch-size", "8"]
    words += ["--rampup-batch-size", "4", "4", "20"]
    config = parse_command_line(words).config
    # 4 samples a step up to sample 20, then 8: 5 * 4 + 10 * 8 = 100.
    assert resolve(config, world_size=1).schedule.train_iters == 15


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["--global-batch-size", "8"], "10 steps of 8 samples"),
        (
            ["--global-batch-size", "8", "--rampup-batch-size", "4", "4", "20"],
            "10 steps of the sizes of --rampup-batch-size, up to 8 samples",
        ),
        (
            ["--step-batch-size-schedule", "0:4 512:8"],
            "10 steps of the sizes of --step-batch-size-schedule",
        ),
    ],
)
def test_the_formula_of_a_growing_batch_does_not_claim_one_size(words, sizes):
    (found,) = (row for row in run(*words).derivations if row.name == "train_samples")
    assert found.formula == sizes


def test_every_derived_value_says_its_formula():
    found = run("--swiglu", "--bf16", world_size=4)
    named = {derivation.name: derivation for derivation in found.derivations}
    assert {"ffn_hidden_size", "data_parallel_size", "params_dtype"} <= set(named)
    assert all(derivation.formula for derivation in found.derivations)
    assert "4 ranks / (tp 1 * pp 1 * cp 1)" in str(named["data_parallel_size"])


class Unreadable(dict):
    """An environment that must not be read."""

    def _refuse(self, *_: object) -> None:
        raise AssertionError("the environment was read")

    __getitem__ = __contains__ = __iter__ = get = _refuse


FLAGS_THAT_DERIVE = st.lists(
    st.sampled_from(
        [
            "--swiglu", "--bf16", "--fp16", "--sequence-parallel", "--group-query-attention",
            "--multi-latent-attention", "--use-distributed-optimizer", "--use-megatron-fsdp",
            "--recompute-activations", "--position-embedding-type yarn", "--train-samples 64",
            "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2",
            "--pipeline-schedule dualpipe-v", "--num-layers-per-virtual-pipeline-stage 1",
            "--global-batch-size 8", "--rampup-batch-size 4 4 20", "--lr-warmup-fraction 0.1",
            "--weight-decay-incr-style linear", "--data-path corpus", "--vocab-size 99",
            "--no-rope-freq 2", "--distributed-backend gloo", "--transformer-impl local",
        ]
    ),
    unique=True,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    flags=FLAGS_THAT_DERIVE,
    world_size=st.sampled_from([1, 2, 8]),
    machine=st.builds(
        Machine,
        rank=st.integers(0, 7),
        communication_backend=st.sampled_from(["gloo", "nccl"]),
        has_engine_layers=st.booleans(),
    ),
)
def test_resolve_is_a_pure_function(flags, world_size, machine):
    config = parse_command_line([*SMALL, *" ".join(flags).split()]).config
    before, output = copy.deepcopy(config), io.StringIO()
    first = resolve(config, world_size=world_size, machine=machine)
    with mock.patch.object(os, "environ", Unreadable()), contextlib.redirect_stdout(output):
        second = resolve(config, world_size=world_size, machine=machine)
    assert second == first
    assert second.derivations == first.derivations
    assert config == before == first.config
    assert output.getvalue() == ""
    assert first.topology.rank == machine.rank


@pytest.mark.parametrize(
    ("size", "multiple", "tp", "padded"),
    [(50257, 128, 1, 50304), (50257, 128, 8, 51200), (128, 128, 1, 128), (1, 128, 2, 256)],
)
def test_the_vocabulary_is_padded_for_equal_shards(size, multiple, tp, padded):
    assert pad_vocabulary(size, multiple=multiple, tp=tp) == padded


def rows_of(found):
    return found.model.unpadded_vocab_size, found.tokenizer.padded_vocab_size


def test_the_vocabulary_comes_from_the_tokenizer():
    found = resolve_vocabulary(run(), 300)
    assert rows_of(found) == (50257, 50304)
    found = resolve_vocabulary(run("--vocab-size", "100"), 300)
    assert rows_of(found) == (300, 384)


def test_a_tokenizer_adds_no_classes_to_the_loss_of_a_model_that_is_loaded():
    for of_model in ({"load_hf": "some/model"}, {"use_checkpoint_args": True}):
        model = run("--vocab-size", "131").overlaid(of_model)
        found = resolve_vocabulary(model, 132)
        assert rows_of(found) == (131, 256)
        assert "the tokenizer has 132 ids" in str(found.derivations[-2])
        assert resolve_vocabulary(model, 100).model.unpadded_vocab_size == 131


@pytest.mark.parametrize(("words", "found"), [([], "transformer_engine"), (["local"], "local")])
def test_latent_attention_takes_local_layers_beside_those_of_transformer_engine(words, found):
    machine = Machine(has_engine_layers=True)
    words = [word for each in words for word in ("--transformer-impl", each)]
    assert run(*words, machine=machine).model.transformer_impl == found
    latent = run("--multi-latent-attention", *words, machine=machine)
    assert latent.model.transformer_impl == "local"


@pytest.mark.parametrize("kind", ["rope", "yarn"])
def test_the_rotation_of_latent_attention_is_chosen_by_rope_type(kind):
    resolved = run("--multi-latent-attention", "--rope-type", kind)
    assert resolved.transformer_config.rope_type == kind


def test_the_config_of_the_model_is_built_once(monkeypatch):
    built = []
    post_init = TransformerConfig.__post_init__
    monkeypatch.setattr(
        TransformerConfig, "__post_init__", lambda self: [built.append(self), post_init(self)]
    )
    command = parse_command_line(SMALL)
    checked = resolve_and_check(lambda: command, lambda config: 1)
    found = resolve_vocabulary(checked, 300)
    args = found.namespace()
    assert run_as_in(args) is found
    assert is_dataset_built_on_rank(found)
    assert built == [checked.transformer_config]
    assert found.transformer_config.unpadded_vocab_size == found.model.unpadded_vocab_size

    args.num_layers = 6
    assert run_as_in(args).transformer_config.num_layers == 6
