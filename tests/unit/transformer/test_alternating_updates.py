"""AltUp, the residual branch of low rank and sparse activations compute what Transformers' modules
of Gemma 3n compute."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.activation_sparsity import above_quantile
from megatron.core.transformer.alternating_updates import AlternatingUpdates
from megatron.core.transformer.low_rank_residual import LowRankResidual
from megatron.core.transformer.residual_streams import stream_contraction, stream_expansion
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

STREAMS, ACTIVE, HIDDEN, RANK, LENGTH, BATCH, FFN = 3, 1, 8, 4, 5, 2, 24
CLIP = 0.7


def config_with(**fields):
    return TransformerConfig(
        num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, normalization="RMSNorm",
        layernorm_epsilon=1e-5, altup_num_inputs=STREAMS, altup_active_idx=ACTIVE,
        altup_coef_clip=CLIP, laurel_rank=RANK, **fields,
    )  # fmt: skip


def theirs(part, **options):
    """A module of Transformers with random weights."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Gemma3nTextConfig(
        hidden_size=HIDDEN, altup_num_inputs=STREAMS, altup_active_idx=ACTIVE, num_hidden_layers=1,
        altup_coef_clip=CLIP, laurel_rank=RANK, rms_norm_eps=1e-5, intermediate_size=FFN,
        num_kv_shared_layers=0, activation_sparsity_pattern=[0.6], vocab_size=16,
        vocab_size_per_layer_input=16, hidden_size_per_layer_input=4,
    )  # fmt: skip
    module = getattr(transformers.models.gemma3n.modeling_gemma3n, f"Gemma3nText{part}")(
        config, **options
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def copy(module, source, names):
    with torch.no_grad():
        for mine, other in names.items():
            module.get_parameter(mine).copy_(source.get_parameter(other))


def to_theirs(streams):
    """[s, b, n*h] as [n, b, s, h]."""
    return streams.unflatten(-1, (STREAMS, HIDDEN)).permute(2, 1, 0, 3)


ALTUP = {
    "router": "modality_router.weight", "prediction": "prediction_coefs.weight",
    "correction": "correction_coefs.weight", "norm.weight": "router_norm.weight",
}  # fmt: skip

LAUREL = {
    "left.weight": "linear_left.weight", "right.weight": "linear_right.weight",
    "norm.weight": "post_laurel_norm.weight",
}  # fmt: skip


@pytest.mark.parametrize("is_trained", [True, False])
def test_streams_are_predicted_and_corrected_as_in_transformers(is_trained):
    torch.manual_seed(3)
    expected = theirs("AltUp").train(is_trained)
    module = AlternatingUpdates(config_with(), SINGLE_RANK).train(is_trained)
    copy(module, expected, ALTUP)
    streams = torch.randn(LENGTH, BATCH, STREAMS * HIDDEN, requires_grad=True)
    output = torch.randn(LENGTH, BATCH, HIDDEN, requires_grad=True)
    predicted, active = module(streams)
    corrected = module.corrected(predicted, output)
    # In training Transformers clamps the prediction's matrix in place: its gradients are not zero.
    their_predicted = expected.predict(to_theirs(streams))
    their_corrected = expected.correct(their_predicted, output.transpose(0, 1))
    assert_close(to_theirs(predicted), their_predicted, FP32_REORDERED_SUM, "predicted")
    assert torch.equal(active.transpose(0, 1), to_theirs(predicted)[ACTIVE])
    assert_close(to_theirs(corrected), their_corrected, FP32_REORDERED_SUM, "corrected")

    trained = [name for name in ALTUP if name != "prediction" or not is_trained]
    ours = torch.autograd.grad(
        corrected.square().sum(), [streams, output, *map(module.get_parameter, trained)]
    )
    others = torch.autograd.grad(
        their_corrected.square().sum(),
        [streams, output, *(expected.get_parameter(ALTUP[name]) for name in trained)],
    )
    for found, wanted in zip(ours, others, strict=True):
        assert_close(found, wanted, FP32_REORDERED_SUM, "gradient")


def test_added_streams_have_the_length_of_the_first_one():
    torch.manual_seed(4)
    config = config_with(init_method_std=1.0)
    expand, join = stream_expansion(config, SINGLE_RANK), stream_contraction(config, SINGLE_RANK)
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    streams = expand(x).unflatten(-1, (STREAMS, HIDDEN))
    lengths = streams.square().mean(-1).sqrt()
    assert_close(lengths, lengths[..., :1].expand_as(lengths), FP32_REORDERED_SUM, "length")
    directions = torch.einsum("ohi,sbi->sboh", expand.weight.unflatten(0, (-1, HIDDEN)), x)
    cosine = torch.cosine_similarity(streams[..., 1:, :], directions, -1)
    assert_close(cosine, torch.ones_like(cosine), FP32_REORDERED_SUM, "direction")

    other = torch.randn(LENGTH, BATCH, STREAMS, HIDDEN)
    projected = torch.einsum(
        "ohi,sboi->sboh", join.weight.unflatten(0, (-1, HIDDEN)), other[..., 1:, :]
    )
    factor = other[..., :1, :].square().mean(-1, True) / projected.square().mean(-1, True)
    mean = torch.cat((other[..., :1, :], projected * factor.sqrt()), -2).mean(-2)
    assert_close(join(other.flatten(-2)), mean, FP32_REORDERED_SUM, "mean")


def test_streams_of_a_zero_token_have_finite_gradients():
    x = torch.zeros(1, 1, HIDDEN, requires_grad=True)
    module = stream_expansion(config_with(), SINGLE_RANK)
    module(x).sum().backward()
    assert x.grad.isfinite().all()
    assert module.weight.grad.isfinite().all()


def test_the_branch_of_low_rank_is_that_of_transformers():
    torch.manual_seed(5)
    expected = theirs("LaurelBlock")
    groups = ProcessGroupCollection(tp=SINGLE_RANK)
    module = LowRankResidual(config_with(), groups)
    copy(module, expected, LAUREL)
    x, total = torch.randn(2, LENGTH, BATCH, HIDDEN).unbind()
    wanted = (total + expected(x)) / 2**0.5
    assert_close(module.added(total, x), wanted, FP32_REORDERED_SUM, "sum")


def test_activations_below_the_quantile_are_zero_as_in_transformers():
    torch.manual_seed(6)
    expected = theirs("MLP", layer_idx=0)
    x = (torch.randn(LENGTH, BATCH, FFN) * 2 + 1).requires_grad_()
    found, wanted = above_quantile(x, 0.6, SINGLE_RANK), expected._gaussian_topk(x)
    assert_close(found, wanted, FP32_REORDERED_SUM, "activations")
    weights = torch.randn_like(x)
    ours, others = (torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, wanted))
    assert_close(ours, others, FP32_REORDERED_SUM, "gradient")


def test_equal_activations_have_finite_gradients():
    x = torch.ones(1, 1, FFN, requires_grad=True)
    above_quantile(x, 0.3, SINGLE_RANK).sum().backward()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("gated", [True, False])
def test_an_mlp_drops_activations_before_the_nonlinearity(gated):
    torch.manual_seed(7)
    config = config_with(
        activation_sparsity=0.5, gated_linear_unit=gated, activation_func=torch.nn.functional.silu
    )
    groups = ProcessGroupCollection(tp=SINGLE_RANK)
    mlp = build_module(
        get_gpt_layer_local_spec().submodules.mlp, config=config, pg_collection=groups
    )
    x = torch.randn(LENGTH, BATCH, HIDDEN)
    first, *up = (x @ mlp.linear_fc1.weight.T).chunk(1 + gated, -1)
    first = torch.nn.functional.silu(above_quantile(first, 0.5, SINGLE_RANK))
    expected = first * up[0] if gated else first
    assert_close(mlp.fc1_and_act(x), expected, FP32_REORDERED_SUM, "activations")


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"enable_mhc_connections": True}, "drop --enable-mhc-connections"),
        ({"use_parallel_residual": True}, "drop --use-parallel-residual"),
        ({"num_moe_experts": 2, "activation_sparsity": 0.5}, "drop --activation-sparsity"),
        ({"activation_sparsity": 1.0}, "use --activation-sparsity 0.0"),
    ],
)
def test_other_combinations_are_refused(fields, fix):
    with pytest.raises(ConfigError) as caught:
        config_with(**fields)
    assert fix in str(caught.value)


def test_the_active_stream_is_one_of_the_streams():
    with pytest.raises(ConfigError, match="use --altup-active-idx 0"):
        TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, altup_num_inputs=2,
            altup_active_idx=2,
        )  # fmt: skip
