"""Permute tokens into the order of their experts and back.

Legend: t tokens, h hidden, e experts, n rows: one for each expert of each token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from torch import Tensor

from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable


class Permutation(Protocol):
    """One order of rows, by expert and then by token, of some tokens."""

    def permute(self, tokens: Tensor) -> Tensor:
        """Return the rows [n, h] of tokens [t, h]."""

    def weights(self, probs: Tensor, first_expert: int = 0) -> Tensor:
        """Return the weight of each row, [n], from probs [t, e].

        Args:
            first_expert: column of probs of the expert that is numbered 0 here.
        """

    def unpermute(self, rows: Tensor) -> Tensor:
        """Return the sum of the rows [n, h] of each token: [t, h], zeros where it has none."""


class IndexPermutation:
    """Uses torch's selection and sums of rows; on accelerators the order of the sums varies.

    Args:
        expert, token: int64 [n], of each row; num_tokens: t.
    """

    def __init__(self, expert: Tensor, token: Tensor, num_tokens: int) -> None:
        self.expert, self.token, self.num_tokens = expert, token, num_tokens

    def permute(self, tokens: Tensor) -> Tensor:
        """Return [n, h] of [t, h]; see `Permutation`."""
        return tokens.index_select(0, self.token)

    def weights(self, probs: Tensor, first_expert: int = 0) -> Tensor:
        """Return [n] of [t, e]; see `Permutation`."""
        return probs[self.token, self.expert + first_expert if first_expert else self.expert]

    def unpermute(self, rows: Tensor) -> Tensor:
        """Return [t, h] of [n, h]; see `Permutation`."""
        return rows.new_zeros((self.num_tokens, rows.shape[1])).index_add(0, self.token, rows)


MakePermutation: TypeAlias = Callable[[Tensor, Tensor, int], Permutation]
_INDEXED = Kernel("index", IndexPermutation)

PERMUTATION: KernelTable[MakePermutation] = KernelTable(
    "permutation of tokens",
    {
        "cpu": (_INDEXED,),
        OTHER_DEVICES: (triton_kernels.entry("permutation", "SortedPermutation"), _INDEXED),
    },
)
"""Functions of (expert [n], token [n], t)."""
