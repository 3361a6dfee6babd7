"""Attention over sets of keys that are processed one after the other, as one autograd function.

An exchange yields sets of keys and values in forward. In backward it yields them again, each with a
buffer for its gradient. A single rank has one set, its own; `context_parallel` receives the sets of
other ranks.

A block of queries attends to a run of keys: scores, softmax, product, and the logarithm of the
softmax's denominator ("lse"). Results over several runs of keys are merged by their lse (online
softmax: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", section 3, arXiv
1805.02867; T. Dao et al., "FlashAttention", section 3.1, arXiv 2205.14135). Backward computes the
probabilities again from the final lse, as in section 3.1 and appendix B of the same, so no tensor
of size [s, s] ever exists: memory grows with s.

Legend: s sequence, b micro batch, n query heads, g key/value groups, r = n/g query heads per group,
d and e widths of query/key and of value heads, z = b*g. Queries are [z, sq*r, d]: a position, and
inside it the heads that share a key.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions, raise_max_logits
from megatron.core.kernels.block_mask import Tile, masks_in_tile, tiles
from megatron.core.parameters.keyed_draws import AttentionKeepMask
from megatron.core.step_context.random_scope import SequenceShard

MAX_BLOCK_ROWS = 128
"""Query positions per block: smaller wastes less on the diagonal, larger feeds longer products."""
MIN_TILE_KEYS = 256
"""Keys of a tile: the cost of merging the results of tiles is spread over them."""
MAX_TILE_ELEMENTS = 2**20
"""Scores that exist at a time, whatever the length of the sequence."""
_LOWEST = torch.finfo(torch.float32).min


@dataclass(frozen=True)
class AttentionSpec:
    """Options and sizes that are the same for all tiles of one attention.

    Attributes:
        batch, groups, heads_per_group: b, g and r of the tensors.
        dropout: keep mask of the probabilities, or None.
    """

    options: AttentionOptions
    batch: int
    groups: int
    heads_per_group: int
    dropout: AttentionKeepMask | None = None

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
    for tile in tiles(query_rows, key_rows, spec.options.mask, *spec.tile_size(key_rows.length)):
        query_slice = slice(tile.query.start * r, tile.query.stop * r)
        scores = _scores(queries[:, query_slice], keys[:, tile.key], tile, positions, spec)
        highest = scores.amax(-1)
        if spec.options.max_logits is not None:
            raise_max_logits(spec.options.max_logits, highest, spec.groups)
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
    for tile in tiles(query_rows, key_rows, spec.options.mask, *spec.tile_size(key_rows.length)):
        query_slice = slice(tile.query.start * r, tile.query.stop * r)
        block, seen = queries[:, query_slice], keys[:, tile.key]
        p = _scores(block, seen, tile, positions, spec)
        slope = None
        if spec.options.softcap is not None:
            # tanh' = 1 - tanh^2; hidden scores are minus infinity and have no gradient anyway.
            slope = p.div(spec.options.softcap).square_().neg_().add_(1).clamp_min_(0)
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
        grad_scores = (
            grad_p.sub_(delta[:, query_slice].unsqueeze(-1)).mul_(p).mul_(spec.options.scale)
        )
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
    scores = torch.baddbmm(
        unused, block, seen.transpose(1, 2), beta=0, alpha=spec.options.scale
    ).float()
    if spec.options.softcap is not None:
        scores.div_(spec.options.softcap).tanh_().mul_(spec.options.softcap)
    r = spec.heads_per_group
    by_head = scores.view(spec.batch, spec.groups, count // r, r, run)
    for part, mask in masks_in_tile(tile, spec.options.mask, positions):
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
            draw = spec.dropout.draw(
                sample, spec.options.first_head + head, rows, p.dtype, p.device
            )
            factors = draw[:, seen].div_(spec.dropout.keep_probability)
            by_head[sample, head // r, :, head % r].mul_(factors)
    return by_head.view(p.shape)


@dataclass(frozen=True)
class KVBlock:
    """Keys [z, n, d] and values [z, n, e] of n positions, in one piece of memory.

    One message moves both.
    """

    flat: Tensor
    keys: Tensor
    values: Tensor

    @staticmethod
    def of(keys: Tensor, values: Tensor) -> KVBlock:
        """Copy keys and values into one piece."""
        flat = torch.cat((keys.flatten(), values.flatten()))
        return KVBlock.over(flat, keys.shape, values.shape)

    @staticmethod
    def over(flat: Tensor, key_shape: torch.Size, value_shape: torch.Size) -> KVBlock:
        """View a piece of memory as keys and values."""
        cut = key_shape.numel()
        return KVBlock(flat, flat[:cut].view(key_shape), flat[cut:].view(value_shape))

    def like(self, flat: Tensor) -> KVBlock:
        """View other memory in the same shapes."""
        return self.over(flat, self.keys.shape, self.values.shape)

    def zeros(self) -> KVBlock:
        """Return a buffer for gradients, fp32."""
        return self.like(torch.zeros_like(self.flat, dtype=torch.float32))


class KVExchange(Protocol):
    """Bring the keys of all ranks to this rank's queries, and return gradients to their owners."""

    def blocks(self, local: KVBlock) -> Iterator[tuple[KVBlock, SequenceShard]]:
        """Yield all sets of keys with their positions."""

    def blocks_backward(
        self, local: KVBlock, gradient: KVBlock
    ) -> Iterator[tuple[KVBlock, SequenceShard, KVBlock]]:
        """Yield all sets again, each with an fp32 buffer to add its gradient to.

        Args:
            gradient: zeros; when the iterator ends it holds the gradient of `local` from all ranks.
        """


@dataclass(frozen=True)
class LocalKV:
    """This rank holds all keys; no communication."""

    rows: SequenceShard

    def blocks(self, local: KVBlock) -> Iterator[tuple[KVBlock, SequenceShard]]:
        """Yield the rank's own keys."""
        yield local, self.rows

    def blocks_backward(
        self, local: KVBlock, gradient: KVBlock
    ) -> Iterator[tuple[KVBlock, SequenceShard, KVBlock]]:
        """Yield them again with the gradient itself."""
        yield local, self.rows, gradient


def blockwise_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    exchange: KVExchange | None = None,
    rows: SequenceShard | None = None,
) -> Tensor:
    """Attend, a block of queries and a run of keys at a time.

    Args:
        query: [s, b, n, d]; key: [k, b, g, d]; value: [k, b, g, e]; query head i uses key head
            i // (n/g).
        exchange: yields the sets of keys to attend to; None is the given keys alone.
        rows: positions of the s queries in the sequence; None is all.
    Returns:
        [s, b, n*e], contiguous.
    Communication:
        performed by the exchange.
    """
    s, b, n, d = query.shape
    num_keys, _, g, e = value.shape
    r = n // g
    rows = rows or SequenceShard.full(s)
    keep_mask = None
    if options.dropout:
        keep_mask = AttentionKeepMask.next(1.0 - options.dropout, rows.total)
    spec = AttentionSpec(options, b, g, r, keep_mask)
    queries = query.reshape(s, b, g, r, d).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)
    keys = key.permute(1, 2, 0, 3).reshape(b * g, num_keys, d)
    values = value.permute(1, 2, 0, 3).reshape(b * g, num_keys, e)
    exchange = exchange or LocalKV(rows)
    out = _BlockwiseAttention.apply(queries, keys, values, options.sink, spec, exchange, rows)
    return out.view(b, g, s, r, e).permute(2, 0, 1, 3, 4).reshape(s, b, n * e)


class _BlockwiseAttention(torch.autograd.Function):
    """queries [z, s*r, d], keys [z, s, d], values [z, s, e] -> [z, s*r, e]."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sink: Tensor | None,
        spec: AttentionSpec,
        exchange: KVExchange,
        rows: SequenceShard,
    ) -> Tensor:
        local = KVBlock.of(keys, values)
        result = PartialAttention.empty(queries, values.shape[2])
        for block, key_rows in exchange.blocks(local):
            attend_block(result, queries, block.keys, block.values, rows, key_rows, spec)
        if sink is not None:
            result.add_sink(sink, spec)
        out = result.out.to(queries.dtype)
        ctx.spec, ctx.exchange, ctx.rows = spec, exchange, rows
        ctx.key_shape, ctx.value_shape = keys.shape, values.shape
        ctx.save_for_backward(queries, local.flat, out, result.lse, sink)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:
        queries, flat, out, lse, sink = ctx.saved_tensors
        local = KVBlock.over(flat, ctx.key_shape, ctx.value_shape)
        delta = (out.float() * grad_out.float()).sum(-1)
        # A query that saw nothing has probabilities exp(-inf - lowest) = 0.
        lse = lse.clamp_min(_LOWEST)
        grad_queries = torch.zeros_like(queries, dtype=torch.float32)
        gradient = local.zeros()
        for block, key_rows, buffer in ctx.exchange.blocks_backward(local, gradient):
            attend_block_backward(
                grad_out, lse, delta, queries, block.keys, block.values, ctx.rows, key_rows,
                ctx.spec, (grad_queries, buffer.keys, buffer.values),
            )  # fmt: skip
        grad_sink = None
        if sink is not None:
            weight = (expand_sinks(sink, ctx.spec, lse) - lse).exp_().mul_(delta)
            by_head = weight.view(ctx.spec.batch, ctx.spec.groups, -1, ctx.spec.heads_per_group)
            grad_sink = by_head.sum((0, 2)).flatten().neg_().to(sink.dtype)
        return (
            grad_queries.to(queries.dtype),
            gradient.keys.to(queries.dtype),
            gradient.values.to(queries.dtype),
            grad_sink,
            None,
            None,
            None,
        )
