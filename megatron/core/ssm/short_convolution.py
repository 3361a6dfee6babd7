"""The gated short convolution of LFM2: the only memory of a sequence are the taps.

Liquid AI, "LFM2 Technical Report", arXiv 2511.23404. A token is projected to B, C and x, and the
output is the projection of C * conv(B * x), with a causal depthwise convolution without bias.

Legend: s sequence, b micro batch, h hidden, g blocks, w = h/g. A block has w channels of B, C and
x each; ranks own whole blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.core.kernels.chunks import DocumentRows
from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.recurrent_mixer import RecurrentMixer
from megatron.core.ssm.sequence_pieces import SequencePieces
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer


class GatedShortConvolution(RecurrentMixer):
    """Mix a few neighbouring tokens by a convolution between two gates."""

    has_activation = False

    @staticmethod
    def sizes_of(config: Any) -> MixerSizes:
        """Return the sizes; there are as many blocks as heads of attention, if that is possible."""
        blocks = math.gcd(config.hidden_size, config.num_attention_heads)
        width = config.hidden_size // blocks
        return MixerSizes(
            num_blocks=blocks,
            num_heads=blocks,
            key_width=0,
            value_width=width,
            taps=config.linear_conv_kernel_dim,
            rows_of_block=(width, width, width),
            convolved=slice(2, 3),
            state_products=0,
            vector_parameters=0,
        )

    def add_parameters(self, layer: ParallelLayer) -> None:
        """Create nothing: projections and taps are all parameters."""

    def state_shape(self) -> tuple[int, ...]:
        """Return (0,): generation stores the last tokens before the convolution only."""
        return (0,)

    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return nothing, as there is no state."""
        return ()

    def entering(self, parts: Sequence[Tensor]) -> Tensor:
        """Return B * x, [s, b, g/tp, w]."""
        return parts[0] * parts[2]

    def recur(
        self,
        convolved: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        documents: DocumentRows | None,
        pieces: SequencePieces,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the convolved tokens [s, b, g/tp, w] and the empty state."""
        return convolved[0], state

    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Return C * out, [s, b, h/tp]."""
        return (others[1] * out).flatten(2)
