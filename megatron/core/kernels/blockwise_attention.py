"""Attention over sets of keys that are processed one after the other, as one autograd function.

An exchange yields sets of keys and values in forward. In backward it yields them again, each with a
buffer for its gradient. A single rank has one set, its own; `context_parallel` receives the sets of
other ranks.

Legend: s sequence, b micro batch, n query heads, g key/value heads, r = n/g, d and e widths of key
and value heads, z = b*g.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.online_softmax import (
    AttentionSpec,
    PartialAttention,
    attend_block,
    attend_block_backward,
    expand_sinks,
)
from megatron.core.parameters.keyed_draws import AttentionKeepMask
from megatron.core.step_context.random_scope import SequenceShard


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
        query: [s, b, n, d]; key: [s, b, g, d]; value: [s, b, g, e]; query head i uses key head
            i // (n/g).
        exchange: yields the sets of keys to attend to; None is the given keys alone.
        rows: positions of the s queries in the sequence; None is all.
    Returns:
        [s, b, n*e], contiguous.
    Communication:
        performed by the exchange.
    """
    s, b, n, d = query.shape
    g, e = key.shape[2], value.shape[3]
    r = n // g
    rows = rows or SequenceShard.full(s)
    keep_mask = None
    if options.dropout:
        keep_mask = AttentionKeepMask.next(1.0 - options.dropout, rows.total)
    spec = AttentionSpec(
        mask=options.mask,
        scale=options.scale,
        batch=b,
        groups=g,
        heads_per_group=r,
        dropout=keep_mask,
        first_head=options.first_head,
        softcap=options.softcap,
        max_logits=options.max_logits,
    )
    queries = query.reshape(s, b, g, r, d).permute(1, 2, 0, 3, 4).reshape(b * g, s * r, d)
    keys = key.permute(1, 2, 0, 3).reshape(b * g, s, d)
    values = value.permute(1, 2, 0, 3).reshape(b * g, s, e)
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
        lse = lse.clamp_min(torch.finfo(torch.float32).min)
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
