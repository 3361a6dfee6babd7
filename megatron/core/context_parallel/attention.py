"""Attention of a sequence that is split over ranks, with one of four kinds of communication.

- `p2p`: keys and values travel round a ring (`RingExchange`). H. Liu, M. Zaharia, P. Abbeel, "Ring
  Attention with Blockwise Transformers for Near-Infinite Context", section 3, arXiv 2310.01889.
- `all_gather`: keys and values are gathered (`AllGatherExchange`). "The Llama 3 Herd of Models",
  section 3.3.2, arXiv 2407.21783.
- `a2a`: an all-to-all exchanges the sequence shards for shards of the heads. S. A. Jacobs et al.,
  "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
  Transformer Models", section 3, arXiv 2309.14509. If there are too few key heads to split, each is
  sent to every rank whose query heads use it.
- `a2a+p2p`: heads are split inside a group of near ranks, with a ring between such groups.

The blockwise kernel attends to keys that arrive in blocks. With `a2a` each rank has the whole
sequence during attention, so any kernel works.

In `layout_invariant_mode` all four kinds gather the keys (`attend_in_units`).

Legend: s sequence, b micro batch, n query heads, g key/value heads (both of this tensor-parallel
rank), d and e widths of key and value heads, cp ranks that share the sequence, u ranks of an
all-to-all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel.partition import join_zigzag, split_zigzag
from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.attention_options import AttentionKernel, AttentionOptions
from megatron.core.kernels.block_mask import key_range
from megatron.core.kernels.blockwise_attention import (
    KVBlock,
    KVExchange,
    LocalKV,
    blockwise_attention,
)
from megatron.core.parameters.param_meta import in_rows
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.context import current_step
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.tensor_parallel.mappings import CollectivePair
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transport import collectives
from megatron.core.transport.transport import tree_sum
from megatron.core.transport.work import Work
from megatron.core.utils import divide

CP_COMM_TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")


@dataclass(frozen=True)
class ContextParallelGroups:
    """Ranks that share a sequence.

    Attributes:
        cp: all these ranks.
        hierarchical: the same ranks in nested groups, innermost first, for `a2a+p2p`.
    """

    cp: Group = SINGLE_RANK
    hierarchical: tuple[Group, ...] = ()


@dataclass(frozen=True)
class _Plan:
    """Communication of one attention.

    Attributes:
        heads: group of the all-to-all of heads.
        exchange: exchange of keys after the all-to-all; None if this rank has all positions then.
        rows: positions of this rank after the all-to-all.
    """

    heads: Group
    exchange: KVExchange | None
    rows: SequenceShard


def _plan(cp_comm_type: str, groups: ContextParallelGroups, num_local_rows: int) -> _Plan:
    total = num_local_rows * groups.cp.size()
    if groups.cp.size() == 1 or cp_comm_type == "a2a":
        return _Plan(groups.cp, None, SequenceShard.full(total))
    heads: Group = SINGLE_RANK
    ring = groups.cp
    if cp_comm_type == "a2a+p2p":
        if len(groups.hierarchical) != 2:
            raise ConfigError(
                f"a2a+p2p over {len(groups.hierarchical)} levels of context-parallel groups.",
                rule="it exchanges heads in the inner level and keys in the outer level",
                flags=["--hierarchical-context-parallel-sizes", "--cp-comm-type"],
                fix="give two sizes whose product is the context-parallel size",
            )
        heads, ring = groups.hierarchical
    rows = SequenceShard.zigzag(total, ring.rank(), ring.size())
    if ring.size() == 1:
        return _Plan(heads, None, rows)
    if cp_comm_type == "all_gather":
        return _Plan(heads, AllGatherExchange(ring, total), rows)
    return _Plan(heads, RingExchange(ring, total), rows)


def context_parallel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    cp_comm_type: str,
    groups: ContextParallelGroups,
    kernel: AttentionKernel = blockwise_attention,
) -> Tensor:
    """Attend to the whole sequence; this rank holds its zigzag shard.

    Args:
        query: [s/cp, b, n, d]; key: [s/cp, b, g, d]; value: [s/cp, b, g, e]; query head i uses
            key head i // (n/g).
        options: for the whole sequence and the heads of this tensor-parallel rank.
        cp_comm_type: one of `CP_COMM_TYPES`.
        kernel: attends to the whole sequence with `a2a`; the other kinds use the blockwise kernel.
    Returns:
        [s/cp, b, n*e], contiguous.
    Communication:
        on `groups.cp`, or on its levels with `a2a+p2p`.
    Raises:
        ConfigError: heads cannot be split over the ranks of an all-to-all.
    """
    num_heads = query.shape[2]
    plan = _plan(cp_comm_type, groups, query.shape[0])
    ranks, rank = plan.heads.size(), plan.heads.rank()
    if ranks > 1:
        picked = key_heads_for_ranks(num_heads, key.shape[2], ranks)
        if picked is not None:
            index = torch.tensor(picked, device=key.device)
            key, value = key.index_select(2, index), value.index_select(2, index)
        query, key, value = heads_to_sequence((query, key, value), plan.heads)
        own = slice(rank * query.shape[2], (rank + 1) * query.shape[2])
        options = replace(
            options,
            first_head=options.first_head + own.start,
            sink=None if options.sink is None else options.sink[own],
            max_logits=None if options.max_logits is None else options.max_logits[own],
        )
    if plan.exchange is None:
        out = kernel(query, key, value, options)
    else:
        out = blockwise_attention(query, key, value, options, plan.exchange, plan.rows)
    if ranks > 1:
        return sequence_to_heads(out, plan.heads).flatten(2)
    return out


def attend_in_units(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: AttentionOptions,
    *,
    group: Group,
    num_units: int,
    attend: Callable[..., Tensor],
) -> Tensor:
    """Attend with the queries of one unit of the sequence at a time, to all keys that they see.

    The units have the same shape in every layout, and so have their keys. The gradients of keys
    are added over the units in a tree whose leaves are the pairs of units (i, last - i): a rank's
    zigzag shard consists of whole subtrees.

    Args:
        query, key, value, options: see `context_parallel_attention`.
        group: the ranks that share the sequence.
        num_units: units of this rank; a power of two if there are several ranks.
        attend: (kernel, query, key, value, options) -> attention by this kernel.
    Returns:
        [s/cp, b, n*e].
    Communication:
        two all-gathers on `group`; two reduce-scatters in backward.
    """
    rows = SequenceShard.zigzag(query.shape[0] * group.size(), group.rank(), group.size())
    length = divide(query.shape[0], num_units)
    units = [rows.run(n * length, (n + 1) * length) for n in range(num_units)]
    window = options.mask.window
    seen = [key_range(*unit.ranges[0], rows.total, window) for unit in units]
    keys, values = (_KeysOfUnits.apply(x, group, seen) for x in (key, value))
    sinks: Sequence[Tensor | None] = [None] * num_units
    if options.sink is not None:
        sinks = in_rows(options.sink, torch.Size((num_units, len(options.sink)))).unbind()
    outputs, scope = [], rng_state().scope
    for n, (unit, run) in enumerate(zip(units, seen, strict=True)):
        current_step().random_scope = scope  # the draws of all units are one draw
        exchange = LocalKV(SequenceShard((run,), rows.total))
        kernel = partial(blockwise_attention, exchange=exchange, rows=unit)
        of_unit = replace(options, sink=sinks[n])
        queries = query[n * length : (n + 1) * length]
        outputs.append(attend(kernel, queries, keys[n], values[n], of_unit))
    return torch.cat(outputs)


class _KeysOfUnits(torch.autograd.Function):
    """Keys [s/cp, b, g, d] -> for each unit of queries the run of all keys that it sees."""

    @staticmethod
    def forward(
        ctx: Any, local: Tensor, group: Group, runs: list[tuple[int, int]]
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.runs = group, runs
        keys = local.contiguous().unsqueeze(0)
        if group.size() > 1:
            keys = collectives.all_gather(keys, group)
        full = join_zigzag(keys)
        ctx.total = len(full)
        return tuple(full[begin:end] for begin, end in runs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        size, count = ctx.group.size(), len(grads)
        shape = (ctx.total, *grads[0].shape[1:])
        sums = []
        for n in range(count // 2):
            total = grads[n].new_zeros(shape, dtype=torch.float32)
            for unit in (n, count - 1 - n):
                begin, end = ctx.runs[unit]
                total[begin:end] += grads[unit]
            sums.append(total)
        grad = tree_sum(sums)
        if size > 1:
            shards = split_zigzag(grad, size).flatten(0, 1)
            grad = collectives.reduce_scatter(shards, ctx.group)
        return grad.to(grads[0].dtype), None, None


@dataclass(frozen=True)
class AllGatherExchange:
    """One block with all keys: an all-gather in forward, a reduce-scatter of the gradient.

    Between forward and backward a rank keeps only its own keys, [s/cp], as with the ring; backward
    gathers again. Communication per rank, in units of (cp - 1) times the bytes of its own keys and
    values: forward 1, backward 2 (the gradient has the dtype of the keys).
    """

    group: Group
    total: int

    def _gathered(self, local: KVBlock) -> KVBlock:
        size = self.group.size()
        pieces = collectives.all_gather(local.flat, self.group).view(size, -1)
        cut = local.keys.numel()
        keys = join_zigzag(pieces[:, :cut].view(size, *local.keys.shape), dim=2)
        values = join_zigzag(pieces[:, cut:].reshape(size, *local.values.shape), dim=2)
        return KVBlock(pieces, keys, values)

    def blocks(self, local: KVBlock) -> Iterator[tuple[KVBlock, SequenceShard]]:
        """Yield one block with the keys of all ranks."""
        yield self._gathered(local), SequenceShard.full(self.total)

    def blocks_backward(
        self, local: KVBlock, gradient: KVBlock
    ) -> Iterator[tuple[KVBlock, SequenceShard, KVBlock]]:
        """Yield the block again; then sum the gradients and keep this rank's shard."""
        size, block = self.group.size(), self._gathered(local)
        grad_keys = torch.zeros_like(block.keys, dtype=torch.float32)
        grad_values = torch.zeros_like(block.values, dtype=torch.float32)
        buffer = KVBlock(block.flat, grad_keys, grad_values)
        yield block, SequenceShard.full(self.total), buffer
        parts = [
            split_zigzag(g.to(local.flat.dtype), size, dim=1) for g in (grad_keys, grad_values)
        ]
        message = torch.cat([part.reshape(size, -1) for part in parts], dim=1)
        gradient.flat.copy_(collectives.reduce_scatter(message.flatten(), self.group))


@dataclass(frozen=True)
class RingExchange:
    """The next block of keys is in flight while the current block is used.

    Communication per rank, in units of (cp - 1) times the bytes of its own keys and values: forward
    1; backward 2, for the keys and for their gradient, which travels one step later and is rounded
    to the dtype of the keys at each step.
    """

    group: Group
    total: int

    def blocks(self, local: KVBlock) -> Iterator[tuple[KVBlock, SequenceShard]]:
        """Yield this rank's keys, then the keys of the previous ranks, nearest first."""
        for block, source in self._ring(local):
            yield block, SequenceShard.zigzag(self.total, source, self.group.size())

    def blocks_backward(
        self, local: KVBlock, gradient: KVBlock
    ) -> Iterator[tuple[KVBlock, SequenceShard, KVBlock]]:
        """Yield the blocks again; the gradient of a block follows it and ends at its owner."""
        size = self.group.size()
        coming: Work[Tensor] | None = None
        for step, (block, source) in enumerate(self._ring(local)):
            rows = SequenceShard.zigzag(self.total, source, size)
            if step == 0:
                yield block, rows, gradient
                continue
            buffer = local.zeros()
            yield block, rows, buffer
            if coming is not None:
                # The gradient of this block from the previous ranks.
                buffer.flat.add_(coming.wait())
            coming = collectives.start_ring_shift(buffer.flat.to(local.flat.dtype), self.group)
        if coming is not None:
            gradient.flat.add_(coming.wait())

    def _ring(self, local: KVBlock) -> Iterator[tuple[KVBlock, int]]:
        """Yield (block, owner); start to receive the next block before each yield."""
        size, rank = self.group.size(), self.group.rank()
        block = local
        for step in range(size):
            is_last = step + 1 == size
            coming = None if is_last else collectives.start_ring_shift(block.flat, self.group)
            yield block, (rank - step) % size
            if coming is not None:
                block = local.like(coming.wait())


def key_heads_for_ranks(num_heads: int, num_key_heads: int, num_ranks: int) -> list[int] | None:
    """Return the key heads to send, in rank order with repeats; None sends each head once.

    Rank i gets query heads i*n/u ... (i+1)*n/u - 1 and an equal share of the list. In this share,
    too, consecutive query heads share a key head.

    Raises:
        ConfigError: the number of query heads is not a multiple of the number of ranks.
    """
    if num_heads % num_ranks:
        raise ConfigError(
            f"{num_heads} query heads cannot be exchanged between {num_ranks} ranks.",
            rule="in an all-to-all each context-parallel rank attends with a whole number of the"
            " query heads of its tensor-parallel rank",
            flags=["--cp-comm-type", "--num-attention-heads", "--tensor-model-parallel-size"],
            fix="use --cp-comm-type p2p, or a number of heads that divides by tensor- times"
            " context-parallel size",
        )
    if num_key_heads % num_ranks == 0:
        return None
    per_key = num_heads // num_key_heads
    if num_ranks % num_key_heads == 0:
        return [rank * num_key_heads // num_ranks for rank in range(num_ranks)]
    return [head // per_key for head in range(num_heads)]


def heads_to_sequence(parts: Sequence[Tensor], group: Group) -> list[Tensor]:
    """Exchange sequence shards for head shards: all positions of the group, 1/u of the heads.

    Args:
        parts: tensors [s/u, b, heads, width], each with its own number of heads (divisible by u)
            and width; they are sent in one message.
    Returns:
        tensors [s, b, heads/u, width], positions ascending.
    Communication:
        one all-to-all forward and one backward on `group`.
    """
    u = group.size()
    s, b = parts[0].shape[:2]
    by_rank = [part.reshape(s, b, u, -1) for part in parts]
    joined = CollectivePair.apply(torch.cat(by_rank, 3), group, _to_sequence, _to_heads)
    pieces = joined.split([part.shape[3] for part in by_rank], 2)
    return [
        piece.reshape(*piece.shape[:2], -1, part.shape[3])
        for piece, part in zip(pieces, parts, strict=True)
    ]


def sequence_to_heads(x: Tensor, group: Group) -> Tensor:
    """Undo `heads_to_sequence`: [s, b, n/u, d] -> [s/u, b, u, n/u * d], heads in rank order."""
    return CollectivePair.apply(x.flatten(2), group, _to_heads, _to_sequence)


def _to_sequence(x: Tensor, group: Group) -> Tensor:
    """[s/u, b, u, w] -> [s, b, w]."""
    u = group.size()
    received = collectives.all_to_all(x.movedim(2, 0).contiguous(), group)
    return join_zigzag(received.view(u, *x.shape[:2], x.shape[3]))


def _to_heads(x: Tensor, group: Group) -> Tensor:
    """[s, b, w] -> [s/u, b, u, w]."""
    received = collectives.all_to_all(split_zigzag(x, group.size()), group)
    return received.movedim(0, 2).contiguous()
