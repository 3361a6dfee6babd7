"""Core attention: every path gives the numbers of the formula in fp64."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron.core.kernels import torch_attention as block_module
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec, key_range, masked_keys
from megatron.core.kernels.torch_attention import cpu_block_attention
from megatron.core.parameters.rng import rng_state
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnBackend, AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

SCALE = 0.3


def draw(s, b, n, g, d, dtype=torch.float32):
    shapes = ((s, b, n, d), (s, b, g, d), (s, b, g, d))
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def formula(q, k, v, hidden):
    """Return softmax(q k^T SCALE, hidden at -inf) v of [s, b, n, d] tensors, as [s, b, n*d]."""
    n, g = q.shape[2], k.shape[2]
    k, v = (t.repeat_interleave(n // g, 2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k) * SCALE
    p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return torch.einsum("bnst,tbnd->sbnd", p, v).flatten(2)


def window_mask(s, left, right):
    i, j = torch.arange(s)[:, None], torch.arange(s)[None]
    hidden = torch.zeros(s, s, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    return hidden


def gradients(out, inputs, weight):
    return torch.autograd.grad((out * weight).sum(), inputs)


def make_core(backend=AttnBackend.auto, mask_type=AttnMaskType.causal, n=4, g=4, d=8, **fields):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=n * d,
        num_attention_heads=n,
        num_query_groups=g,
        softmax_scale=SCALE,
        attention_backend=backend,
        **{"attention_dropout": 0.0, **fields},
    )
    return DotProductAttention(config, 2, mask_type, "self")


def test_recomputed_probabilities_give_the_same_bits_as_kept_ones(monkeypatch):
    q, k, v = draw(20, 2, 4, 2, 8)
    weight, options = (
        torch.randn(20, 2, 32),
        AttentionOptions(SCALE, MaskSpec((-1, 0)), dropout=0.3),
    )
    results = []
    for kept in (64, 8):
        monkeypatch.setattr(block_module, "MAX_KEPT_KEYS", kept)
        with rng_state().in_scope("decoder", 1):
            out = cpu_block_attention(q, k, v, options)
        results.append((out, *gradients(out, (q, k, v), weight)))
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def test_a_window_touches_only_the_keys_it_sees():
    assert key_range(128, 256, 1024, (-1, 0)) == (0, 256)
    assert key_range(128, 256, 1024, (100, 0)) == (28, 256)
    assert key_range(128, 256, 1024, (100, 50)) == (28, 306)
    assert masked_keys(128, 256, 0, 128, (-1, 0), torch.device("cpu")) is None


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.flash, AttnBackend.unfused])
@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.no_mask])
@pytest.mark.parametrize("window", [None, (3, 0)])
@pytest.mark.parametrize("g", [4, 2])
def test_all_backends_equal_the_formula(backend, mask_type, window, g):
    core = make_core(backend, mask_type, g=g, window_size=window)
    q, k, v = draw(9, 2, 4, g, 8)
    left, right = window or (-1, -1)
    hidden = window_mask(9, left, 0 if mask_type == AttnMaskType.causal else right)
    expected = formula(q.double(), k.double(), v.double(), hidden)
    assert_close(core(q, k, v, None), expected, FP32_REORDERED_SUM, "output")


@pytest.mark.parametrize("backend", [AttnBackend.auto, AttnBackend.unfused])
def test_a_given_mask_hides_keys_in_addition_to_the_causal_ones(backend):
    core = make_core(backend)
    q, k, v = draw(8, 2, 4, 4, 8)
    # Two documents: positions 0-2 and 3-7 do not see each other.
    document = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])
    mask = (document[:, None] != document[None])[None, None]
    hidden = mask | window_mask(8, -1, 0)
    expected = formula(q.double(), k.double(), v.double(), hidden)
    assert_close(core(q, k, v, mask), expected, FP32_REORDERED_SUM, "output")


def test_queries_at_the_end_of_longer_keys_see_all_earlier_ones():
    core = make_core(mask_type=AttnMaskType.causal_bottom_right)
    q, k, v = draw(9, 1, 4, 4, 8)
    expected = formula(q, k, v, window_mask(9, -1, 0))[6:]
    assert_close(core(q[6:], k, v, None), expected, FP32_REORDERED_SUM, "output")


def test_layer_scaling_changes_nothing_in_fp32():
    plain, scaled = make_core(), make_core(apply_query_key_layer_scaling=True)
    q, k, v = draw(7, 2, 4, 4, 8)
    assert_close(scaled(q, k, v, None), plain(q, k, v, None), FP32_REORDERED_SUM, "output")


def test_bf16_attention_on_the_cpu_has_less_than_twice_the_error_of_torchs_kernel():
    q, k, v = (t.detach().bfloat16().requires_grad_() for t in draw(200, 2, 4, 2, 32))
    weight = torch.randn(200, 2, 128).bfloat16()
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = formula(*exact, window_mask(200, -1, 0))
    expected_grads = gradients(expected, exact, weight.double())
    errors = {}
    for backend, g in ((AttnBackend.auto, 2), (AttnBackend.flash, 4)):
        # torch 2.7 has no kernel on the CPU for fewer key heads: it would compute all in fp32.
        heads = (t.repeat_interleave(g // 2, 2) for t in (k, v))
        core = make_core(backend, n=4, g=g, d=32)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            grads = gradients(core(q, *heads, None), (q, k, v), weight)
        errors[backend] = [
            float((a.double() - e).norm() / e.norm())
            for a, e in zip(grads, expected_grads, strict=True)
        ]
    for ours, torchs in zip(errors[AttnBackend.auto], errors[AttnBackend.flash], strict=True):
        assert ours < 2 * torchs, errors
