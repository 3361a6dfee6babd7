"""What a mixer with a state holds, computes and keeps. Pure arithmetic.

Legend: h hidden, g blocks of heads that share keys, n heads, d width of a key, e of a value: the
state of a head has d*e elements.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MixerSizes:
    """Widths of a mixer, of all tensor-parallel ranks together.

    A token is projected to g blocks of rows; ranks own whole blocks. Some of the rows pass a short
    convolution.
    """

    num_blocks: int
    num_heads: int
    key_width: int
    value_width: int
    taps: int
    rows_of_block: tuple[int, ...]
    """Rows of a block as they lie, one number for each part."""
    convolved: slice
    """Which of the parts pass the convolution."""
    state_products: int
    """Products of an element of the state for each token."""
    vector_parameters: int
    """Parameters beside the matrices and the taps."""
    inner_matrices: int = 0
    """Elements of matrices between the two projections."""
    kept_elements: float
    """Elements in fp32 that the backward of a token needs between the two projections. Measured on
    the plain implementation."""

    @property
    def values(self) -> int:
        """Width of all value heads, n e: what enters the last projection."""
        return self.num_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.num_blocks * sum(self.rows_of_block[self.convolved])

    @property
    def projected(self) -> int:
        """Width of what a token projects to."""
        return self.num_blocks * sum(self.rows_of_block)

    @property
    def state_elements(self) -> int:
        """Elements of the state of a sequence."""
        return self.num_heads * self.key_width * self.value_width

    def matrices(self, hidden: int) -> int:
        """Elements of the matrices that a token is multiplied with."""
        return hidden * (self.projected + self.values) + self.inner_matrices

    def parameters(self, hidden: int) -> int:
        """All parameters of the mixer."""
        return self.matrices(hidden) + self.channels * self.taps + self.vector_parameters

    @property
    def token_products(self) -> int:
        """Multiplications of a token with states and taps, which do not grow with the sequence."""
        return self.state_products * self.state_elements + self.channels * self.taps

    def activation_bytes(self, item: int, *, recomputes_core: bool) -> float:
        """Return what the backward of one token needs between the two projections.

        Args:
            item: bytes of an activation.
            recomputes_core: what is between them is computed again in backward.
        """
        if recomputes_core:
            return float(item * (self.projected + self.values))
        return 4 * self.kept_elements
