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
from megatron.core.kernels.blockwise_attention import KeysAndValues
from megatron.core.parameters.rng import SequenceRows
from megatron.core.process_groups_config import AxisGroup
from megatron.core.transport import collectives
from megatron.core.transport.work import Work


@dataclass(frozen=True)
class AllGatherExchange:
    """All keys at once: an all-gather before, and a reduce-scatter of their gradient.

    Only the own keys are kept between forward and backward, which gathers once more: held memory
    is [s/cp], as on the ring. Communication per rank, in units of (cp - 1) times the bytes of own
    keys and values: forward 1, backward 2 (the gradient in the dtype of the keys).
    """

    group: AxisGroup
    total: int

    def _gathered(self, own: KeysAndValues) -> KeysAndValues:
        size = self.group.size()
        pieces = collectives.all_gather(own.flat, self.group).view(size, -1)
        cut = own.keys.numel()
        keys = join_zigzag(pieces[:, :cut].view(size, *own.keys.shape), dim=2)
        values = join_zigzag(pieces[:, cut:].reshape(size, *own.values.shape), dim=2)
        return KeysAndValues(pieces, keys, values)

    def visit(self, own: KeysAndValues) -> Iterator[tuple[KeysAndValues, SequenceRows]]:
        """Yield the keys of all ranks in one set."""
        yield self._gathered(own), SequenceRows.whole(self.total)

    def visit_backward(
        self, own: KeysAndValues, gradient: KeysAndValues
    ) -> Iterator[tuple[KeysAndValues, SequenceRows, KeysAndValues]]:
        """Yield that set again; then sum the gradients and keep the own part."""
        size, held = self.group.size(), self._gathered(own)
        grad_keys = torch.zeros_like(held.keys, dtype=torch.float32)
        grad_values = torch.zeros_like(held.values, dtype=torch.float32)
        buffer = KeysAndValues(held.flat, grad_keys, grad_values)
        yield held, SequenceRows.whole(self.total), buffer
        parts = [split_zigzag(g.to(own.flat.dtype), size, dim=1) for g in (grad_keys, grad_values)]
        message = torch.cat([part.reshape(size, -1) for part in parts], dim=1)
        gradient.flat.copy_(collectives.reduce_scatter(message.flatten(), self.group))


@dataclass(frozen=True)
class RingExchange:
    """Keys travel from rank to rank while those at hand are worked on.

    Communication per rank, in units of (cp - 1) times the bytes of own keys and values: forward
    1; backward 2, the keys and their gradient, which travels one step later and is rounded to
    the dtype of the keys at each step.
    """

    group: AxisGroup
    total: int

    def visit(self, own: KeysAndValues) -> Iterator[tuple[KeysAndValues, SequenceRows]]:
        """Yield own keys, then those of the ranks before, nearest first."""
        for held, source in self._travel(own):
            yield held, SequenceRows.zigzag(self.total, source, self.group.size())

    def visit_backward(
        self, own: KeysAndValues, gradient: KeysAndValues
    ) -> Iterator[tuple[KeysAndValues, SequenceRows, KeysAndValues]]:
        """Yield them again; the gradient of a set follows it and ends at its owner."""
        size = self.group.size()
        coming: Work[Tensor] | None = None
        for step, (held, source) in enumerate(self._travel(own)):
            rows = SequenceRows.zigzag(self.total, source, size)
            if step == 0:
                yield held, rows, gradient
                continue
            buffer = own.zeros()
            yield held, rows, buffer
            if coming is not None:
                # What the ranks before found for this set.
                buffer.flat.add_(coming.wait())
            coming = collectives.start_ring_shift(buffer.flat.to(own.flat.dtype), self.group)
        if coming is not None:
            gradient.flat.add_(coming.wait())

    def _travel(self, own: KeysAndValues) -> Iterator[tuple[KeysAndValues, int]]:
        """Yield (set, owner); the next set is in flight while one is worked on."""
        size, rank = self.group.size(), self.group.rank()
        held = own
        for step in range(size):
            is_last = step + 1 == size
            coming = None if is_last else collectives.start_ring_shift(held.flat, self.group)
            yield held, (rank - step) % size
            if coming is not None:
                held = own.like(coming.wait())
