"""Products of a linear layer in units of fixed shape, for `layout_invariant_mode`.

The split dimension of a weight is cut into units that all layouts share; a rank computes the
products of its units one by one. So a kernel sees the same operands in every layout. Sums over
units are added in a binary tree over the number of the unit: a rank adds the subtree of its own
units, and the group completes the tree (`collectives.start_all_reduce`).

The rows are cut into units of the sequence, too. Their products are computed one by one, and a
weight gradient is the exact sum over them: a context-parallel rank may hold any of them.

Kernels choose their code by the shape and the alignment of their operands, so each operand starts
at a multiple of 64 bytes.

Shapes: `t` rows, `i`/`o` features of this rank, `u` units of this rank, `b` blocks (`stride` of the
parameter: 2 for the gate and the other half of an MLP's first layer), each of `u` pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.parameters.exact_sum import on_grid
from megatron.core.topology.group import Group
from megatron.core.transport import collectives
from megatron.core.transport.transport import tree_sum

_ALIGNMENT = 64
_VECTOR = 64
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
    runs: int = 1
    """Units of the sequence on this rank: equal runs of rows."""
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
        """Return grad.T [o, t] @ rows [t, i]: [o, i], for several runs of rows their exact sum."""
        pairs = list(zip(self._runs(grad), self._runs(rows), strict=True))
        if len(pairs) == 1:
            return self._weight_gradient(grad, rows)
        return _add(on_grid(self._weight_gradient(*pair)) for pair in pairs)

    def _weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        if self.dim == 0:
            rows = aligned(rows)
            return torch.cat([aligned(part) @ rows for part in self.pieces(grad.t(), 0)])
        grad = aligned(grad.t())
        return torch.cat([grad @ aligned(part) for part in self.pieces(rows, 1)], 1)

    def _runs(self, rows: Tensor) -> list[Tensor]:
        """Cut rows [t, n] into runs; rows of another number, as in generation, are one run."""
        return [rows] if len(rows) % self.runs else list(rows.chunk(self.runs))

    def _spread(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right, whose columns are cut into pieces."""
        runs = [aligned(run) for run in self._runs(left)]
        return torch.cat([_product(runs, part) for part in self.pieces(right, 1)], 1)

    def _contract(self, left: Tensor, right: Tensor) -> Tensor:
        """Return left @ right, whose summed dimension is cut into pieces."""
        pairs = zip(self.pieces(left, 1), self.pieces(right, 0), strict=True)
        return self.tree([_product(self._runs(a), b).float() for a, b in pairs])


def _product(runs: Sequence[Tensor], right: Tensor) -> Tensor:
    """Multiply each run of rows; return all rows."""
    right = aligned(right)
    products = [aligned(run) @ right for run in runs]
    return products[0] if len(products) == 1 else torch.cat(products)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, count: int, units: int, group: Group) -> Tensor:
        ctx.settings = dim, units, group
        return x.unsqueeze(dim).expand(*x.shape[:dim], count, *x.shape[dim:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dim, units, group = ctx.settings
        of_units = grad.to(torch.float32, copy=True).chunk(units, dim)
        total = tree_sum([_add(part.unbind(dim)) for part in of_units]).contiguous()
        if group.size() > 1 and total.numel():
            total = collectives.all_reduce(total, group)
        return total.to(grad.dtype), None, None, None, None


def copies(x: Tensor, dim: int, count: int, units: int, group: Group) -> Tensor:
    """Return x [...] with a new dimension `dim` of `count` copies, which belong to `units` units.

    Args:
        group: ranks that use x for the other units.
    Communication:
        in backward an all-reduce of the gradient of x.
    """
    return _Copies.apply(x, dim, count, units, group)


def in_full_vectors(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a function of single rows to rows [t, ...]; return its t results.

    Rows of zeros fill the last vector: kernels compute the elements after the last full vector by
    other instructions, and the number of rows depends on the layout.
    """
    filled = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, -len(rows) % _VECTOR))
    return function(filled)[: len(rows)]


def _add(terms: Iterable[Tensor]) -> Tensor:
    terms = iter(terms)
    total = next(terms)
    for term in terms:
        total.add_(term)
    return total


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
