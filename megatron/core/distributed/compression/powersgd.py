"""Gradients of matrices as products of two thin ones.

T. Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
algorithms 1 and 2, arXiv 1905.13727: one step of subspace iteration, begun from the subspace of the
step before, instead of a decomposition.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.parameters.rng import derive_seed


class LowRankMatrices:
    """The matrices of a bucket; what is no matrix, or too small to gain, is sent as it is."""

    def __init__(self, matrices: list[tuple[int, int, int]], numel: int, rank: int) -> None:
        """
        Args:
            matrices: (begin, rows, columns) in the bucket.
        """
        self._rank = rank
        self._matrices = [m for m in matrices if (m[1] + m[2]) * rank < m[1] * m[2] / 2]
        self._rest: list[tuple[int, int]] = []
        """[begin, end) of what is sent as it is."""
        end = 0
        for begin, rows, columns in self._matrices:
            self._rest.append((end, begin))
            end = begin + rows * columns
        self._rest = [(b, e) for b, e in [*self._rest, (end, numel)] if b < e]
        self._right: list[Tensor] = []
        """[columns, rank] of each matrix: the subspace of the last step."""
        self._left: list[Tensor] = []
        """[rows, rank], orthonormal: of this step."""
        self._own: Tensor | None = None

    def _views(self, values: Tensor) -> list[Tensor]:
        return [values[b : b + r * c].view(r, c) for b, r, c in self._matrices]

    def project(self, values: Tensor, multiple: int) -> Tensor:
        """Return what is to be summed first, flat [k]: M Q of each matrix, and what is no matrix.

        Args:
            multiple: zeros at the end make the length one of it.
        """
        if not self._right:
            # Equal on all ranks: from the place in the bucket alone.
            for offset, (_, _, columns) in enumerate(self._matrices):
                generator = torch.Generator().manual_seed(derive_seed("low rank", offset))
                start = torch.randn(columns, self._rank, generator=generator)
                self._right.append(start.to(values.device))
        parts = [(m @ q).view(-1) for m, q in zip(self._views(values), self._right, strict=True)]
        return _padded([*parts, *(values[b:e] for b, e in self._rest)], multiple)

    def project_back(self, values: Tensor, message: Tensor, multiple: int) -> Tensor:
        """Return what is summed next, flat [k]: M^T P of each matrix, P the orthonormal sum of M Q.

        Args:
            values: [n], the bucket. message: [k], the sums of `project`.
        """
        offset, parts = 0, []
        self._left = []
        for m in self._views(values):
            length = m.shape[0] * self._rank
            summed = message[offset : offset + length].view(m.shape[0], self._rank)
            # An overflow has no subspace; it reaches the result through `rebuild`.
            left = torch.linalg.qr(summed.nan_to_num(0.0, 0.0, 0.0))[0]
            self._left.append(left)
            parts.append((m.T @ left).view(-1))
            offset += length
        joined = _padded([*parts, values.new_zeros(0)], multiple)
        self._own = joined.clone()
        return joined

    def rebuild(self, values: Tensor, message: Tensor, back: Tensor) -> None:
        """Write the sum: P (M^T P)^T of each matrix, and what was sent as it is."""
        offset = 0
        for number, (m, left) in enumerate(zip(self._views(values), self._left, strict=True)):
            length = m.shape[1] * self._rank
            right = back[offset : offset + length].view(m.shape[1], self._rank)
            torch.mm(left, right.T, out=m)
            self._right[number] = right.nan_to_num(0.0, 0.0, 0.0)
            offset += length
        offset = sum(m.shape[0] for m in self._views(values)) * self._rank
        for begin, end in self._rest:
            values[begin:end].copy_(message[offset : offset + end - begin])
            offset += end - begin

    def keep_error(self, own: Tensor, error: Tensor) -> None:
        """Write what this rank's gradient `own` has beyond the subspace into `error`."""
        assert self._own is not None
        error.zero_()
        offset = 0
        for m, e, left in zip(self._views(own), self._views(error), self._left, strict=True):
            length = m.shape[1] * self._rank
            right = self._own[offset : offset + length].view(m.shape[1], self._rank)
            torch.sub(m, left @ right.T, out=e)
            offset += length
        error.nan_to_num_(0.0, 0.0, 0.0)


def _padded(parts: list[Tensor], multiple: int) -> Tensor:
    joined = torch.cat(parts)
    return torch.nn.functional.pad(joined, (0, -joined.numel() % multiple))
