"""Hyper-connections compute what Transformers' modules of DeepSeek-V4 and Hunyuan 4 compute."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.hyper_connection import HyperConnection
from megatron.core.transformer.residual_streams import stream_contraction, stream_expansion
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

STREAMS, HIDDEN, LENGTH, BATCH = 3, 8, 5, 2
ITERATIONS = {"DeepseekV4": 7, "HYV4": 0}


def config_with(**fields):
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, enable_mhc_connections=True,
        mhc_num_residual_streams=STREAMS, layernorm_epsilon=1e-5, mhc_epsilon=1e-3, **fields,
    )  # fmt: skip


def theirs(family, part):
    """A module of Transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(
        hidden_size=HIDDEN, hc_mult=STREAMS, hc_eps=1e-3, rms_norm_eps=1e-5,
        num_hidden_layers=1, **({"hc_magnitude": 1.5} if family == "HYV4" else
                                {"hc_sinkhorn_iters": ITERATIONS[family]}),
    )  # fmt: skip
    module_name = {"DeepseekV4": "deepseek_v4", "HYV4": "hy_v4"}[family]
    library = getattr(transformers.models, module_name)
    module = getattr(getattr(library, f"modeling_{module_name}"), f"{family}{part}")(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def with_their_weights(module, source):
    names = dict(zip(("weight", "bias", "alpha"), source.parameters(), strict=True))
    with torch.no_grad():
        for name, values in names.items():
            getattr(module, name).copy_(values)
    return module


def to_theirs(streams):
    """[s, b, n*h] as [b, s, n, h]."""
    return streams.unflatten(-1, (STREAMS, HIDDEN)).transpose(0, 1)


@pytest.mark.parametrize("family", ["DeepseekV4", "HYV4"])
def test_a_branch_reads_and_writes_the_streams_as_in_transformers(family):
    torch.manual_seed(3)
    expected = theirs(family, "HyperConnection")
    fields = {"mhc_post_magnitude": 1.5} if family == "HYV4" else {}
    config = config_with(mhc_sinkhorn_iterations=ITERATIONS[family], **fields)
    module = with_their_weights(HyperConnection(config, SINGLE_RANK), expected)
    streams = torch.randn(LENGTH, BATCH, STREAMS * HIDDEN, requires_grad=True)
    output = torch.randn(LENGTH, BATCH, HIDDEN)
    branch, residual = module(streams)
    after = residual.plus(output)

    x = to_theirs(streams)
    *weights, their_branch = expected(x)
    if family == "HYV4":
        post, their_branch = weights[0], their_branch
        mixed = x
    else:
        post, comb = weights
        mixed = torch.einsum("bsjk,bsjd->bskd", comb, x)
    their_after = mixed + post.unsqueeze(-1) * output.transpose(0, 1).unsqueeze(-2)
    assert_close(branch.transpose(0, 1), their_branch, FP32_REORDERED_SUM, "branch")
    assert_close(to_theirs(after), their_after, FP32_REORDERED_SUM, "streams")

    ours = torch.autograd.grad((branch.square().sum() + after.square().sum()), [
        streams, module.weight, module.bias, module.alpha])  # fmt: skip
    others = torch.autograd.grad(their_branch.square().sum() + their_after.square().sum(), [
        streams, *expected.parameters()])  # fmt: skip
    for found, wanted in zip(ours, others, strict=True):
        assert_close(found, wanted, FP32_REORDERED_SUM, "gradient")


@pytest.mark.parametrize("family", ["DeepseekV4", "HYV4"])
def test_the_streams_are_contracted_as_in_transformers(family):
    torch.manual_seed(4)
    expected = theirs(family, "HyperHead")
    config = config_with(mhc_learned_contraction=True)
    module = with_their_weights(stream_contraction(config, SINGLE_RANK), expected)
    streams = torch.randn(LENGTH, BATCH, STREAMS * HIDDEN)
    found = module(streams).transpose(0, 1)
    assert_close(found, expected(to_theirs(streams)), FP32_REORDERED_SUM, "sum")


def test_expanded_streams_have_the_hidden_states_as_their_mean():
    hidden_states = torch.randn(LENGTH, BATCH, HIDDEN)
    config = config_with()
    streams = stream_expansion(config, SINGLE_RANK)(hidden_states)
    assert streams.shape == (LENGTH, BATCH, STREAMS * HIDDEN)
    assert_close(stream_contraction(config, SINGLE_RANK)(streams), hidden_states,
                 FP32_REORDERED_SUM, "mean")  # fmt: skip


def test_mixing_keeps_the_sum_of_the_streams():
    torch.manual_seed(5)
    module = HyperConnection(config_with(mhc_sinkhorn_iterations=100), SINGLE_RANK).double()
    module.config.mhc_epsilon = 0.0
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.5)
    streams = torch.randn(LENGTH, BATCH, STREAMS * HIDDEN, dtype=torch.float64)
    _, residual = module(streams)
    after = residual.plus(torch.zeros(LENGTH, BATCH, HIDDEN, dtype=torch.float64))
    assert_close(to_theirs(after).sum(2), to_theirs(streams).sum(2), FP32_REORDERED_SUM, "sum")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"use_parallel_residual": True}, "drop --use-parallel-residual"),
        ({"apply_residual_connection_post_layernorm": True}, "drop --use-parallel-residual"),
        ({"encoder_num_layers": 1}, "an encoder and a decoder"),
    ],
)
def test_other_residual_connections_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        config_with(**fields)
