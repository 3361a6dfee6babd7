"""How queries come to see the keys of other ranks: all at once, or round a ring.

An exchange hands out sets of keys and values, one after the other; backward it hands them out
again, each with a buffer for its gradient, and sees to it that the gradients come home.

RingExchange: H. Liu, M. Zaharia, P. Abbeel, "Ring Attention with Blockwise Transformers for
Near-Infinite Context", section 3, arXiv 2310.01889. Gathered keys: "The Llama 3 Herd of Models",
section 3.3.2, arXiv 2407.21783.

Legend: s whole sequence, z = b*g, d and e widths of key and value heads, cp size of the group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.context_parallel.partition import join_zigzag, split_zigzag
from megatron.core.kernels.blockwise_attention import KVBlock
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.topology.group import Group
from megatron.core.transport import collectives
from megatron.core.transport.work import Work


@dataclass(frozen=True)
class AllGatherExchange:
    """All keys at once: an all-gather before, and a reduce-scatter of their gradient.

    Only the own keys are kept between forward and backward, which gathers once more: held memory
    is [s/cp], as on the ring. Communication per rank, in units of (cp - 1) times the bytes of own
    keys and values: forward 1, backward 2 (the gradient in the dtype of the keys).
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
        """Yield the keys of all ranks in one set."""
        yield self._gathered(local), SequenceShard.full(self.total)

    def blocks_backward(
        self, local: KVBlock, gradient: KVBlock
    ) -> Iterator[tuple[KVBlock, SequenceShard, KVBlock]]:
        """Yield that set again; then sum the gradients and keep the own part."""
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
    """Keys travel from rank to rank while those at hand are worked on.

    Communication per rank, in units of (cp - 1) times the bytes of own keys and values: forward
    1; backward 2, the keys and their gradient, which travels one step later and is rounded to
    the dtype of the keys at each step.
    """

    group: Group
    total: int

    def blocks(self, local: KVBlock) -> Iterator[tuple[KVBlock, SequenceShard]]:
        """Yield own keys, then those of the ranks before, nearest first."""
        for block, source in self._ring(local):
            yield block, SequenceShard.zigzag(self.total, source, self.group.size())

    def blocks_backward(
        self, local: KVBlock, gradient: KVBlock
    ) -> Iterator[tuple[KVBlock, SequenceShard, KVBlock]]:
        """Yield them again; the gradient of a set follows it and ends at its owner."""
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
                # What the ranks before found for this set.
                buffer.flat.add_(coming.wait())
            coming = collectives.start_ring_shift(buffer.flat.to(local.flat.dtype), self.group)
        if coming is not None:
            gradient.flat.add_(coming.wait())

    def _ring(self, local: KVBlock) -> Iterator[tuple[KVBlock, int]]:
        """Yield (set, owner); the next set is in flight while one is worked on."""
        size, rank = self.group.size(), self.group.rank()
        block = local
        for step in range(size):
            is_last = step + 1 == size
            coming = None if is_last else collectives.start_ring_shift(block.flat, self.group)
            yield block, (rank - step) % size
            if coming is not None:
                block = local.like(coming.wait())
