"""Products of a linear layer in units of fixed shape, for `layout_invariant_mode`.

The split dimension of a weight is cut into units that all layouts share; a rank computes the
products of its units one by one. So a kernel sees the same operands in every layout. Sums over
units are added in a binary tree over the number of the unit: a rank adds the subtree of its own
units, and the group completes the tree (`collectives.start_all_reduce`).

Kernels choose their code by the shape and the alignment of their operands, so each operand starts
at a multiple of 64 bytes.

Shapes: `t` rows, `i`/`o` features of this rank, `u` units of this rank, `b` blocks (`stride` of the
parameter: 2 for the gate and the other half of an MLP's first layer), each of `u` pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.transport.transport import tree_sum

_ALIGNMENT = 64
ROWS = 32
"""Rows of a block of `Units.has_row_blocks`."""


@dataclass(frozen=True)
class Units:
    """The pieces of the split dimension of one weight on one rank."""

    dim: int
    """Split dimension of the weight [o, i]: 0 or 1."""
    count: int
    """Units of this rank."""
    blocks: int = 1
    """Blocks of the split dimension; a unit is one piece of each block."""
    has_row_blocks: bool = False
    """Compute the outputs of `ROWS` rows at a time (`batch_invariant_mode`)."""

    def pieces(self, x: Tensor, dim: int) -> list[Tensor]:
        """Cut a dimension of x [..., n, ...]: [..., n/(u b), ...] each, the part of unit j of block
        k at k * count + j."""
        return list(x.tensor_split(self.count * self.blocks, dim))

    def tree(self, terms: Sequence[Tensor]) -> Tensor:
        """Add one term [...] per piece, over the blocks of a unit, then over units in a tree."""
        count = self.count
        sums = [
            _add(terms[u + b * count] for b in range(self.blocks)) if self.blocks > 1 else terms[u]
            for u in range(count)
        ]
        return tree_sum(sums)

    def forward(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Return rows [t, i] @ weight.T: [t, o], or for `dim` 1 the sum of this rank, fp32."""
        product = self._spread if self.dim == 0 else self._contract
        if not self.has_row_blocks:
            return product(rows, weight.t())
        # Kernels choose their code by the number of rows, but not by the index of a row.
        blocks = F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).split(ROWS)
        return torch.cat([product(block, weight.t()) for block in blocks])[: len(rows)]

    def input_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        """Return grad [t, o] @ weight: [t, i], or for `dim` 0 the sum of this rank, fp32."""
        return self._contract(grad, weight) if self.dim == 0 else self._spread(grad, weight)

    def weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        """Return grad.T @ rows: [o, i]."""
        if self.dim == 0:
            return self._spread(grad.t(), rows, 0)
        return self._spread(grad.t(), rows, 1)

    def _spread(self, left: Tensor, right: Tensor, dim: int = 1) -> Tensor:
        """Return left @ right, whose dimension `dim` is cut into pieces."""
        if dim == 0:
            right = aligned(right)
            parts = [aligned(part) @ right for part in self.pieces(left, 0)]
        else:
            left = aligned(left)
            parts = [left @ aligned(part) for part in self.pieces(right, 1)]
        return torch.cat(parts, dim)

    def _contract(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right, whose summed dimension is cut into pieces."""
        pairs = zip(self.pieces(left, 1), self.pieces(right, 0), strict=True)
        return self.tree([(aligned(a) @ aligned(b)).float() for a, b in pairs])


def _add(terms: Iterable[Tensor]) -> Tensor:
    first, *others = terms
    for term in others:
        first.add_(term)
    return first


def aligned(x: Tensor) -> Tensor:
    """Return x [m, n], or a copy, whose rows or columns are dense and start at aligned addresses.

    They are contiguous, or on the CPU the pieces of longer ones: its kernels copy blocks of their
    operands. Other devices choose kernels by the distance of two rows, too.
    """
    rows = x.t() if x.stride(0) == 1 else x
    has_gaps = rows.stride(0) > rows.shape[1] and x.device.type == "cpu"
    is_dense = rows.is_contiguous() or (has_gaps and rows.stride(1) == 1)
    distance = rows.stride(0) * x.element_size() if has_gaps else 0
    if is_dense and x.data_ptr() % _ALIGNMENT == 0 and distance % _ALIGNMENT == 0:
        return x
    return rows.contiguous() if rows is x else rows.contiguous().t()
