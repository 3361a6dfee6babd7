"""Blockwise attention: the numbers of the formula in fp64, and never an [s, s] tensor."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.context_parallel.attention import key_heads_for_ranks
from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels import blockwise_attention as kernel
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec, tiles
from megatron.core.kernels.blockwise_attention import blockwise_attention
from megatron.core.parameters.keyed_draws import keyed_attention_keep_mask
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.random_scope import SequenceShard
from tests.harness.tolerances import BF16_WHOLE_MODEL, FP32_REORDERED_SUM, assert_close

S, B, N, G, D, E = 40, 2, 4, 2, 8, 6
SCALE = 0.3
CAUSAL, WINDOW, EVERYTHING = (-1, 0), (7, 0), (-1, -1)


def hidden_pairs(window, documents):
    """Return [b, 1, s, s], True where a key is hidden."""
    i, j = torch.arange(S)[:, None], torch.arange(S)[None]
    left, right = window
    hidden = torch.zeros(S, S, dtype=torch.bool)
    if left >= 0:
        hidden |= j < i - left
    if right >= 0:
        hidden |= j > i + right
    hidden = hidden.expand(B, 1, S, S)
    if documents is None:
        return hidden
    return hidden | (documents[:, None, :, None] != documents[:, None, None, :])


def formula(q, k, v, hidden, sink, keep_mask):
    """Return the whole attention in fp64, [s, b, n*e]."""
    k, v = (t.repeat_interleave(N // G, 2) for t in (k, v))
    scores = torch.einsum("sbnd,tbnd->bnst", q, k).double() * SCALE
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        scores = torch.cat((scores, sink.double().view(1, N, 1, 1).expand(B, N, S, 1)), -1)
    p = scores.softmax(-1)[..., :S]
    if keep_mask is not None:
        p = p * keep_mask
    return torch.einsum("bnst,tbnd->sbnd", p, v.double()).flatten(2)


@pytest.mark.parametrize("tile_keys", [5, 64])
@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("with_documents", [False, True])
@pytest.mark.parametrize("window", [CAUSAL, WINDOW, EVERYTHING])
def test_output_and_gradients_are_those_of_the_formula(
    monkeypatch, window, with_documents, dropout, with_sink, tile_keys
):
    monkeypatch.setattr(kernel, "MAX_BLOCK_ROWS", 8)
    monkeypatch.setattr(kernel, "MIN_TILE_KEYS", tile_keys)
    monkeypatch.setattr(kernel, "MAX_TILE_ELEMENTS", B * N * 8 * tile_keys)
    torch.manual_seed(0)
    documents = (torch.rand(B, S) < 0.1).cumsum(1).int() if with_documents else None
    shapes = ((S, B, N, D), (S, B, G, D), (S, B, G, E))
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    if with_sink:
        inputs.append(torch.randn(N, requires_grad=True))
    keep_mask = None
    if dropout:
        with rng_state().in_scope("here"):
            keep_mask = keyed_attention_keep_mask(
                (B, N, S, S), 1 - dropout, first_head=0, dtype=torch.float32,
                device=torch.device("cpu"),
            ) / (1 - dropout)  # fmt: skip
    sink = inputs[3] if with_sink else None
    with rng_state().in_scope("here"):
        options = AttentionOptions(SCALE, MaskSpec(window, documents), dropout=dropout, sink=sink)
        out = blockwise_attention(*inputs[:3], options)
    expected = formula(*inputs[:3], hidden_pairs(window, documents), sink, keep_mask)
    assert_close(out, expected, FP32_REORDERED_SUM, "output")
    weight = torch.randn(expected.shape)
    actual = torch.autograd.grad((out * weight).sum(), inputs)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), inputs)
    for name, a, e in zip(("query", "key", "value", "sink"), actual, wanted, strict=False):
        assert_close(a, e, FP32_REORDERED_SUM, f"gradient of the {name}")


def test_bf16_is_as_exact_as_its_roundings():
    """Scores and probabilities are rounded before they continue, as in every unfused attention."""
    shapes = ((S, B, N, D), (S, B, G, D), (S, B, G, E))
    exact = [torch.randn(shape).bfloat16().float().requires_grad_() for shape in shapes]
    half = [x.detach().bfloat16().requires_grad_() for x in exact]
    options = AttentionOptions(SCALE, MaskSpec(CAUSAL))
    outputs = [blockwise_attention(*x, options) for x in (half, exact)]
    assert_close(*outputs, BF16_WHOLE_MODEL, "output")
    for out in outputs:
        out.float().square().sum().backward()
    for name, a, e in zip(("query", "key", "value"), half, exact, strict=True):
        assert_close(a.grad, e.grad, BF16_WHOLE_MODEL, f"gradient of the {name}")


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not leaf._is_view():
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_nothing_grows_with_the_square_of_the_sequence(monkeypatch, dropout):
    """The largest tensor of forward and backward doubles with the length, and is no [s, s]."""
    monkeypatch.setattr(kernel, "MIN_TILE_KEYS", 64)
    monkeypatch.setattr(kernel, "MAX_TILE_ELEMENTS", 2**12)
    monkeypatch.setattr("megatron.core.parameters.keyed_draws.MAX_ATTENTION_BLOCK_ELEMENTS", 2**14)
    largest = {}
    for s in (512, 1024):
        q, k, v = (torch.randn(s, 1, 1, 8, requires_grad=True) for _ in range(3))
        with LargestTensor() as seen:
            options = AttentionOptions(1.0, MaskSpec(CAUSAL), dropout=dropout)
            out = blockwise_attention(q, k, v, options)
            out.sum().backward()
        largest[s] = seen.elements
    assert largest[1024] <= 2 * largest[512]
    assert largest[1024] <= 1024 * 1024 / 32


def test_causal_tiles_of_a_ring_step_leave_out_what_lies_ahead():
    """With zigzag every rank has the same number of scores to form at every step."""
    total, size = 64, 4
    for step in range(1, size):
        work = set()
        for rank in range(size):
            mine = SequenceShard.zigzag(total, rank, size)
            theirs = SequenceShard.zigzag(total, (rank - step) % size, size)
            work.add(
                sum(
                    (t.query.stop - t.query.start) * (t.key.stop - t.key.start)
                    for t in tiles(mine, theirs, MaskSpec(CAUSAL), 8, 3)
                )
            )
        assert work == {16 * 8}, "half of the 16 x 16 pairs"


def test_key_heads_are_sent_once_or_as_often_as_they_are_used():
    assert key_heads_for_ranks(8, 4, 4) is None
    assert key_heads_for_ranks(8, 2, 4) == [0, 0, 1, 1]
    assert key_heads_for_ranks(12, 3, 4) == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(ConfigError, match="6 query heads cannot be exchanged between 4"):
        key_heads_for_ranks(6, 6, 4)
