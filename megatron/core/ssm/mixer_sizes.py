"""Sizes, parameters, products and memory of a recurrent mixer. Pure arithmetic.

Legend: h hidden, g blocks of heads that share keys, n heads, d width of a key, e of a value. The
state of a head has d*e elements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MixerSizes:
    """Sizes of a mixer, for all tensor-parallel ranks together.

    A token is projected to g blocks of features; each rank has whole blocks. Some of the features
    pass a short convolution.
    """

    num_blocks: int
    num_heads: int
    key_width: int
    value_width: int
    taps: int
    rows_of_block: tuple[int, ...]
    """Output features of a block, in memory order, for each part."""
    convolved: slice
    """The parts that pass the convolution."""
    state_products: int
    """Multiplications per element of the state and token."""
    vector_parameters: int
    """Parameters other than the matrices and the taps."""
    inner_matrices: int = 0
    """Elements of the matrices between the two projections."""

    @property
    def values(self) -> int:
        """Width of all value heads, n*e, which is the input width of the output projection."""
        return self.num_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.num_blocks * sum(self.rows_of_block[self.convolved])

    @property
    def projected(self) -> int:
        """Output width of the input projection."""
        return self.num_blocks * sum(self.rows_of_block)

    @property
    def state_elements(self) -> int:
        """Elements of the state of a sequence."""
        return self.num_heads * self.key_width * self.value_width

    def matrices(self, hidden: int) -> int:
        """Elements of all matrices."""
        return hidden * (self.projected + self.values) + self.inner_matrices

    def parameters(self, hidden: int) -> int:
        """All parameters of the mixer."""
        return self.matrices(hidden) + self.channels * self.taps + self.vector_parameters

    @property
    def token_products(self) -> int:
        """Multiplications per token with states and taps; independent of the sequence length."""
        return self.state_products * self.state_elements + self.channels * self.taps
