"""What libraries are asked to compute, by stand-ins that have their documented signatures.

The stand-ins attend by the formula on the CPU; that the libraries do the same is theirs to keep.
"""

import types

import pytest
import torch
import torch.nn.functional as F

from megatron.core.foundation import optional_imports
from megatron.core.kernels import library_attention
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.blockwise_attention import blockwise_attention
from megatron.core.kernels.torch_attention import sdpa
from megatron.core.parameters.rng import rng_state
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

S, B, N, G, D = 24, 2, 4, 2, 8


def formula(q, k, v, scale, causal, window, softcap, dropout):
    """Attend one sequence: [s, n, d], [s, g, d], [s, g, e] -> [s, n, e]."""
    s, n = q.shape[:2]
    k, v = (x.repeat_interleave(n // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("snd,tnd->nst", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window[0], 0 if causal else window[1]
    distance = torch.arange(s)[None] - torch.arange(s)[:, None]  # key - query
    hidden = torch.zeros(s, s, dtype=torch.bool)
    if right >= 0:
        hidden |= distance > right
    if left >= 0:
        hidden |= distance < -left
    p = F.dropout(scores.masked_fill(hidden, float("-inf")).softmax(-1), dropout)
    return torch.einsum("nst,tne->sne", p, v)


def flash_attn_func(
    q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    alibi_slopes=None, deterministic=False, return_attn_probs=False,
):  # fmt: skip
    """[b, s, n, d] as in flash-attention 2."""
    assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.stride(-1) == 1
    how = (softmax_scale, causal, window_size, softcap, dropout_p)
    return torch.stack([formula(*x, *how) for x in zip(q, k, v, strict=True)])


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """[t, n, d] as in flash-attention 2."""
    assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
    lengths = cu_seqlens_q.diff().tolist()
    assert max(lengths) == max_seqlen_q == max_seqlen_k
    pieces = zip(*(x.split(lengths) for x in (q, k, v)), strict=True)
    how = (softmax_scale, causal, window_size, softcap, dropout_p)
    return torch.cat([formula(*x, *how) for x in pieces])


class TEAttention:
    """The module of Transformer Engine, for the arguments that the kernel gives."""

    def __init__(
        self, num_attention_heads, kv_channels, *, num_gqa_groups, attention_dropout,
        attn_mask_type="causal", window_size, softmax_scale,
    ):  # fmt: skip
        widths = kv_channels if isinstance(kv_channels, tuple) else (kv_channels, kv_channels)
        self.sizes = (num_attention_heads, num_gqa_groups, *widths)
        left, right = window_size
        if attn_mask_type == "causal":  # as the library does
            right = 0
        assert attn_mask_type == "causal" or (left < 0) == (right < 0)
        self.how = softmax_scale, (left, right), attention_dropout

    def __call__(
        self, q, k, v, *, qkv_format, attn_mask_type, cu_seqlens_q=None, cu_seqlens_kv=None,
        max_seqlen_q=None, max_seqlen_kv=None,
    ):  # fmt: skip
        assert (q.shape[-2], k.shape[-2], q.shape[-1], v.shape[-1]) == self.sizes
        scale, window, dropout = self.how
        causal = attn_mask_type.endswith("causal")
        how = dict(softmax_scale=scale, causal=causal, window_size=window, dropout_p=dropout)
        if qkv_format == "thd":
            assert attn_mask_type.startswith("padding")
            out = flash_attn_varlen_func(
                q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv, **how
            )
            return out.flatten(-2)
        assert qkv_format == "sbhd"
        options = (scale, causal, window, 0.0, dropout)
        samples = zip(*(x.unbind(1) for x in (q, k, v)), strict=True)
        return torch.stack([formula(*x, *options) for x in samples], 1).flatten(-2)


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Import the stand-ins; no module of another test is used again."""
    flash = types.SimpleNamespace(
        flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func
    )
    engine = types.SimpleNamespace(DotProductAttention=TEAttention)
    found = {"flash_attn": flash, "transformer_engine.pytorch": engine}
    monkeypatch.setattr(library_attention, "require", lambda name, purpose: found[name])
    library_attention._attention_module.cache_clear()
    yield
    library_attention._attention_module.cache_clear()


KERNELS = [library_attention.flash_attn, library_attention.transformer_engine]


@pytest.mark.parametrize("value_width", [D, 6])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), (5, 0), (5, 2), (5, -1)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_library_is_asked_for_the_same_attention(kernel, window, with_documents, value_width):
    documents = (torch.rand(B, S) < 0.15).cumsum(1).int() if with_documents else None
    shapes = ((S, B, N, D), (S, B, G, D), (S, B, G, value_width))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    options = AttentionOptions(0.3, MaskSpec(window, documents))
    weight = torch.randn(S, B, N * value_width)
    found = []
    for run in (kernel, blockwise_attention):
        out = run(*inputs, options)
        found.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for name, ours, expected in zip(("output", "q", "k", "v"), *found, strict=True):
        assert_close(ours, expected, FP32_REORDERED_SUM, name)


def test_flash_attention_caps_scores():
    q, k, v = torch.randn(S, B, N, D), torch.randn(S, B, G, D), torch.randn(S, B, G, D)
    options = AttentionOptions(1.0, MaskSpec((-1, 0)), softcap=1.5)
    ours = library_attention.flash_attn(q, k, v, options)
    assert_close(ours, blockwise_attention(q, k, v, options), FP32_REORDERED_SUM, "output")


@pytest.mark.parametrize("kernel", [*KERNELS, sdpa])
def test_what_a_library_drops_is_drawn_again_at_the_same_place(kernel):
    """Recomputation and resumed runs see the same; samples, heads and layers differ."""
    q, k, v = torch.randn(S, B, N, D), torch.randn(S, B, N, D), torch.randn(S, B, N, D)
    before = torch.get_rng_state()

    def attend(layer, first_head=0):
        options = AttentionOptions(0.3, MaskSpec((-1, 0)), dropout=0.3, first_head=first_head)
        with rng_state().in_scope("decoder", layer):
            return kernel(q, k, v, options)

    first = attend(1)
    assert torch.equal(first, attend(1))
    assert not torch.equal(first, attend(2))
    assert not torch.equal(first, attend(1, first_head=N))
    assert torch.equal(before, torch.get_rng_state())


def test_a_library_that_cannot_be_loaded_is_missing(monkeypatch):
    """Transformer Engine raises RuntimeError where its compiled part is not installed."""

    def broken(name):
        raise RuntimeError("no compiled part")

    reason = optional_imports.why_missing.__wrapped__
    assert reason("flash_attn") == "needs flash-attention, which is not installed"
    monkeypatch.setattr(optional_imports, "has", lambda name: True)
    monkeypatch.setattr(optional_imports.importlib, "import_module", broken)
    assert reason("transformer_engine.pytorch") == (
        "needs NVIDIA Transformer Engine, which cannot be loaded: no compiled part"
    )
