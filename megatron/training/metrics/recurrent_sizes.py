"""What layers with a recurrence in the place of attention hold and compute.

Legend: h hidden, g key heads, n value heads, d width of a key head, e of a value head, l rows of a
chunk; see `megatron.core.ssm.gated_delta_net`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.kernels.gated_delta_rule import CHUNK

if TYPE_CHECKING:
    from megatron.training.config.resolved import ResolvedRun

_STATE_PRODUCTS = 4
"""Products of a state with a vector for each token and value head: its reading by the key, what is
erased, what is written, and its reading by the query."""


@dataclass(frozen=True, kw_only=True)
class RecurrentSizes:
    """Widths of Gated DeltaNet, and which layers have it."""

    num_key_heads: int
    num_value_heads: int
    key_width: int
    value_width: int
    taps: int
    pattern: tuple[bool, ...]
    """For each layer of the model, whether it is a recurrence."""

    @staticmethod
    def of(run: ResolvedRun) -> RecurrentSizes | None:
        """Read the sizes from resolved settings; None where every layer attends."""
        model = run.model
        pattern = model.linear_attention_layers(model.num_layers)
        if not any(pattern):
            return None
        return RecurrentSizes(
            num_key_heads=model.linear_num_key_heads,
            num_value_heads=model.linear_num_value_heads,
            key_width=model.linear_key_head_dim,
            value_width=model.linear_value_head_dim,
            taps=model.linear_conv_kernel_dim,
            pattern=tuple(pattern),
        )

    @property
    def values(self) -> int:
        """Width of all value heads, n e."""
        return self.num_value_heads * self.value_width

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_width + self.values

    @property
    def projected(self) -> int:
        """Width of what a token projects to: the channels, gates, write strengths and decays."""
        return self.channels + self.values + 2 * self.num_value_heads

    def matrices(self, hidden: int) -> int:
        """Elements of the matrices that a token is multiplied with."""
        return hidden * (self.projected + self.values)

    def parameters(self, hidden: int) -> int:
        """All parameters of the mixer: matrices, taps, decays, and the norm of heads."""
        others = self.channels * self.taps + 2 * self.num_value_heads + self.value_width
        return self.matrices(hidden) + others

    @property
    def token_products(self) -> int:
        """Multiplications of a token with states and taps, which do not grow with the sequence."""
        state = self.num_value_heads * self.key_width * self.value_width
        return _STATE_PRODUCTS * state + self.channels * self.taps

    def activation_bytes(self, item: int, *, recomputes_core: bool) -> float:
        """Return what the backward of one token needs between the two projections.

        Args:
            item: bytes of an activation.
            recomputes_core: the rule is computed again in backward.
        """
        if recomputes_core:
            return float(item * (self.projected + self.values))
        n, d, e = self.num_value_heads, self.key_width, self.value_width
        keys, states = self.num_key_heads * d, n * d * e / CHUNK
        # Counted on the plain implementation: copies in fp32 of what enters the rule, and in each
        # chunk scores, decays, the solved systems and the state. Within 7 % for widths 16 to 128.
        of_chunk = CHUNK * (4 * n + 3 * self.num_key_heads)
        return 4 * (12 * keys + 11 * n * e + 4 * n * d + of_chunk + 3 * states)
