"""Blockwise attention: its roundings, its tiles, and never an [s, s] tensor."""

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
from megatron.core.step_context.random_scope import SequenceShard
from tests.harness.tolerances import BF16_WHOLE_MODEL, assert_close

S, B, N, G, D, E = 40, 2, 4, 2, 8, 6
SCALE = 0.3
CAUSAL = (-1, 0)


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
