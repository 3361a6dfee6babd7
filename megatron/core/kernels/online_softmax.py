"""Attention by blocks, in plain PyTorch, from pieces that can be added up.

A block of queries attends to a run of keys: scores, softmax, product, and the logarithm of the
softmax's denominator ("lse"). Results over several runs of keys are merged by their lse (online
softmax: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", section 3, arXiv
1805.02867; T. Dao et al., "FlashAttention", section 3.1, arXiv 2205.14135). Backward computes the
probabilities again from the final lse, as in section 3.1 and appendix B of the same, so that
nothing of size [s, s] ever exists: memory grows with s.

Legend: s sequence, b micro batch, g key/value groups, r query heads per group, d width of a
query/key head, e width of a value head, z = b*g. Queries are [z, sq*r, d]: a position, and inside
it the heads that share a key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.kernels.attention_options import raise_max_logits
from megatron.core.kernels.block_mask import MaskSpec, Tile, masks_in_tile, tiles
from megatron.core.parameters.keyed_draws import AttentionKeepMask
from megatron.core.step_context.random_scope import SequenceShard

MAX_BLOCK_ROWS = 128
"""Query positions per block: smaller wastes less on the diagonal, larger feeds longer products."""
MIN_TILE_KEYS = 256
"""Keys of a tile: the cost of merging the results of tiles is spread over them."""
MAX_TILE_ELEMENTS = 2**20
"""Scores that exist at a time, whatever the length of the sequence."""


@dataclass(frozen=True)
class AttentionSpec:
    """Options that are the same for all tiles of one attention.

    Attributes:
        mask: which keys a query sees.
        scale: factor on the scores.
        batch, groups, heads_per_group: b, g and r of the tensors.
        softcap: bound c of the scaled scores, which become c * tanh(score / c), or None.
        dropout: keep mask of the probabilities, or None; first_head: the first local query head's
            index in the whole model, a key of the mask.
        max_logits: fp32 [g*r], raised to the largest score of each head; see `AttentionOptions`.
    """

    mask: MaskSpec
    scale: float
    batch: int
    groups: int
    heads_per_group: int
    dropout: AttentionKeepMask | None = None
    first_head: int = 0
    softcap: float | None = None
    max_logits: Tensor | None = None

    def tile_size(self, num_keys: int) -> tuple[int, int]:
        """Return how many query positions and keys to take at a time.

        Dropout is drawn once for whole rows: with dropout a tile has fewer queries and all keys.
        """
        heads = self.batch * self.groups * self.heads_per_group
        keys = max(num_keys, 1) if self.dropout else MIN_TILE_KEYS
        rows = max(16, MAX_TILE_ELEMENTS // (heads * keys))
        rows = min(MAX_BLOCK_ROWS, 1 << (rows.bit_length() - 1))
        return rows, max(keys, MAX_TILE_ELEMENTS // (heads * rows))


@dataclass
class PartialAttention:
    """Attention over the keys seen so far.

    out: fp32 [z, sq*r, e]; lse: fp32 [z, sq*r], minus infinity where no key was visible.
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(queries: Tensor, width: int) -> PartialAttention:
        """Start with no key seen; `width` is e."""
        shape, where = queries.shape[:2], queries.device
        lse = torch.full(shape, float("-inf"), dtype=torch.float32, device=where)
        out = torch.zeros((*shape, width), dtype=torch.float32, device=where)
        return PartialAttention(out, lse)

    def add(self, query_slice: slice, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of the queries `query_slice` to other keys.

        out: [z, rows, e], normalised; lse: fp32 [z, rows].
        """
        before = self.lse[:, query_slice]
        joined = torch.logaddexp(before, lse)
        # If no key was visible on either side, both weights are zero, not exp(inf - inf).
        base = joined.clamp_min(_LOWEST)
        held = self.out[:, query_slice]
        held.mul_((before - base).exp_().unsqueeze(-1))
        held.addcmul_(out.float(), (lse - base).exp_().unsqueeze(-1))
        self.lse[:, query_slice] = joined

    def add_sink(self, sink: Tensor, spec: AttentionSpec) -> None:
        """Count one more key, of score `sink` [g*r] and value zero, for every query.

        G. Xiao et al., "Efficient Streaming Language Models with Attention Sinks", section 3.2,
        arXiv 2309.17453, as a learned score per head.
        """
        joined = torch.logaddexp(self.lse, expand_sinks(sink, spec, self.lse))
        self.out.mul_((self.lse - joined).exp_().unsqueeze(-1))
        self.lse = joined


_LOWEST = torch.finfo(torch.float32).min


def expand_sinks(sink: Tensor, spec: AttentionSpec, lse: Tensor) -> Tensor:
    """Lay the sinks [g*r] out like an lse [z, sq*r]."""
    by_group = sink.float().view(1, spec.groups, 1, spec.heads_per_group)
    rows = lse.shape[1] // spec.heads_per_group
    return by_group.expand(spec.batch, spec.groups, rows, spec.heads_per_group).reshape(lse.shape)


def attend_block(
    result: PartialAttention,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_rows: SequenceShard,
    key_rows: SequenceShard,
    spec: AttentionSpec,
) -> None:
    """Attend to one more set of keys.

    Args:
        result: attention of the queries to the earlier sets; updated.
        queries: [z, sq*r, d]; keys: [z, sk, d]; values: [z, sk, e].
        query_rows, key_rows: the positions of these queries and keys.
    """
    r = spec.heads_per_group
    positions = key_rows.positions(keys.device)
    for tile in tiles(query_rows, key_rows, spec.mask, *spec.tile_size(key_rows.length)):
        query_slice = slice(tile.query.start * r, tile.query.stop * r)
        scores = _scores(queries[:, query_slice], keys[:, tile.key], tile, positions, spec)
        highest = scores.amax(-1)
        if spec.max_logits is not None:
            raise_max_logits(spec.max_logits, highest, spec.groups)
        p = torch.softmax(scores, -1)
        if tile.may_be_fully_masked:
            p.masked_fill_((highest == float("-inf")).unsqueeze(-1), 0.0)
        # The largest probability is exp(highest score - lse), and never tiny: at least 1 / keys.
        lse = highest - p.amax(-1).log().nan_to_num_(neginf=0.0)
        if spec.dropout is not None:
            p = _dropped(p, tile, positions, spec)
        result.add(query_slice, torch.bmm(p.to(values.dtype), values[:, tile.key]), lse)


def attend_block_backward(
    grad_out: Tensor,
    lse: Tensor,
    delta: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    query_rows: SequenceShard,
    key_rows: SequenceShard,
    spec: AttentionSpec,
    gradients: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Add the gradients that flow through one set of keys.

    Args:
        grad_out: [z, sq*r, e]; lse: [z, sq*r] over *all* keys (finite); delta: fp32 [z, sq*r],
            sum over e of out * grad_out.
        gradients: of queries, keys and values, fp32, added to.
    """
    r = spec.heads_per_group
    grad_queries, grad_keys, grad_values = gradients
    positions = key_rows.positions(keys.device)
    for tile in tiles(query_rows, key_rows, spec.mask, *spec.tile_size(key_rows.length)):
        query_slice = slice(tile.query.start * r, tile.query.stop * r)
        block, seen = queries[:, query_slice], keys[:, tile.key]
        p = _scores(block, seen, tile, positions, spec)
        slope = None
        if spec.softcap is not None:
            # tanh' = 1 - tanh^2; hidden scores are minus infinity and have no gradient anyway.
            slope = p.div(spec.softcap).square_().neg_().add_(1).clamp_min_(0)
        p = p.sub_(lse[:, query_slice].unsqueeze(-1)).exp_()
        block_grad = grad_out[:, query_slice]
        grad_p = torch.bmm(block_grad, values[:, tile.key].transpose(1, 2)).float()
        dropped = p
        if spec.dropout is not None:
            factors = _dropped(torch.ones_like(p), tile, positions, spec)
            dropped = p * factors
            grad_p.mul_(factors)
        half = keys.dtype
        _add_product(grad_values[:, tile.key], dropped.to(half).transpose(1, 2), block_grad)
        grad_scores = grad_p.sub_(delta[:, query_slice].unsqueeze(-1)).mul_(p).mul_(spec.scale)
        grad_scores = (grad_scores if slope is None else grad_scores.mul_(slope)).to(half)
        _add_product(grad_queries[:, query_slice], grad_scores, seen)
        _add_product(grad_keys[:, tile.key], grad_scores.transpose(1, 2), block)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to an fp32 total: only half-precision products are rounded, not their sums."""
    if a.dtype == total.dtype:
        total.baddbmm_(a, b)
    else:
        total.add_(torch.bmm(a, b))


def _scores(
    block: Tensor, seen: Tensor, tile: Tile, positions: Tensor, spec: AttentionSpec
) -> Tensor:
    """Return the scaled scores of a tile in fp32, minus infinity where hidden: [z, rows*r, run]."""
    z, count, run = block.shape[0], block.shape[1], seen.shape[1]
    unused = block.new_empty(1).expand(z, count, run)
    scores = torch.baddbmm(unused, block, seen.transpose(1, 2), beta=0, alpha=spec.scale).float()
    if spec.softcap is not None:
        scores.div_(spec.softcap).tanh_().mul_(spec.softcap)
    r = spec.heads_per_group
    by_head = scores.view(spec.batch, spec.groups, count // r, r, run)
    for part, mask in masks_in_tile(tile, spec.mask, positions):
        # Window masks [rows, run] hold for all samples, document masks [b, rows, run] for one.
        spread = mask.view(-1, 1, mask.shape[-2], 1, mask.shape[-1])
        by_head[..., part].masked_fill_(spread, float("-inf"))
    return scores


def _dropped(p: Tensor, tile: Tile, positions: Tensor, spec: AttentionSpec) -> Tensor:
    """Return the probabilities with dropout: draws of whole rows, cut to the tile's keys."""
    assert spec.dropout is not None
    count = tile.query.stop - tile.query.start
    total = spec.dropout.num_keys
    rows = SequenceShard(((tile.first_query, tile.first_query + count),), total)
    seen = positions[tile.key]
    r = spec.heads_per_group
    by_head = p.view(spec.batch, spec.groups, count, r, p.shape[-1]).clone()
    for sample in range(spec.batch):
        for head in range(spec.groups * r):
            draw = spec.dropout.draw(sample, spec.first_head + head, rows, p.dtype, p.device)
            factors = draw[:, seen].div_(spec.dropout.keep_probability)
            by_head[sample, head // r, :, head % r].mul_(factors)
    return by_head.view(p.shape)
