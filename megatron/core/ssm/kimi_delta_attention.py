"""Kimi Delta Attention: Gated DeltaNet with a decay for each channel of a key.

Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", section 3, arXiv
2510.26692. Decays and output gates come from latents of a token, as wide as a value head, that all
heads share; the gate is a sigmoid.

Legend: as in `gated_delta_net`, w width of a latent. A block is a key head: query d, key d, r
values of e, r write strengths, and its share of the w rows of the latent of decays, and of gates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.chunks import CHUNK
from megatron.core.kernels.delta_rules import kimi_delta_chunks
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.recurrent_mixer import fill_log_decays, fill_step_biases, wide
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer


class KimiDeltaAttention(GatedDeltaNet):
    """Mix a sequence by the delta rule with a decay for each channel."""

    rule = staticmethod(kimi_delta_chunks)

    @staticmethod
    def sizes_of(config: Any) -> MixerSizes:
        """Return the widths; a latent is widened to a whole number of rows for each key head."""
        sizes = GatedDeltaNet.sizes_of(config)
        g, n, d, e = sizes.num_blocks, sizes.num_heads, sizes.key_width, sizes.value_width
        r, share = n // g, -(-e // g)
        # As of Gated DeltaNet, and the decays of channels at each doubling of a block. Within 2 %.
        kept = (
            11.2 * n * e + 26 * n * d + 12 * g * d + CHUNK * (2.9 * n + g) + 1.2 * n * d * e / CHUNK
        )
        return replace(
            sizes,
            rows_of_block=(d, d, r * e, r, share, share),
            vector_parameters=n + n * d + e,
            inner_matrices=share * g * n * (d + e),
            kept_elements=kept,
        )

    def add_parameters(self, layer: ParallelLayer) -> None:
        """Make decays of heads, biases of channels, what latents are projected by, and the norm."""
        n, config = self.num_heads, self.config
        d, e, latent = self.sizes.key_width, self.sizes.value_width, self.latent_width
        self.A_log = layer.new_parameter(n, split_dim=0, init_method=fill_log_decays)
        self.dt_bias = layer.new_parameter(n * d, split_dim=0, init_method=fill_step_biases)
        self.decay_up_weight, self.gate_up_weight = (
            layer.new_parameter(rows, latent, split_dim=0, init_method=config.init_method)
            for rows in (n * d, n * e)
        )
        self.add_norm()

    @property
    def latent_width(self) -> int:
        """Width of a latent."""
        return self.sizes.num_blocks * self.sizes.rows_of_block[-1]

    def from_latent(self, share: Tensor, weight: Tensor) -> Tensor:
        """Return latents times a matrix, fp32 or wider.

        Args:
            share: [s, b, g/tp, w/g], this rank's rows of the latent.
            weight: [m/tp, w].
        Returns:
            [s, b, m/tp].
        Communication:
            forward all-gather of the latent, backward reduce-scatter, on `tp`.
        """
        latent = all_gather_last_dim_from_tensor_parallel_region(
            share.flatten(2).contiguous(), group=self.pg_collection.tp
        )
        return wide(F.linear(latent, weight.to(latent.dtype)))

    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return log decays [s, b, n/tp, d], at most 0, and write strengths [s, b, n/tp]."""
        strength, of_decay, _ = others
        steps = F.softplus(self.from_latent(of_decay, self.decay_up_weight) + wide(self.dt_bias))
        steps = steps.unflatten(2, (self.num_heads, -1))
        rate = wide(self.A_log).exp().unsqueeze(-1)
        return -rate * steps, wide(strength.flatten(2)).sigmoid()

    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Norm each head of [s, b, n, e], then gate it; return [s, b, n*e]."""
        gate = self.from_latent(others[2], self.gate_up_weight).sigmoid()
        return self.out_norm(out.to(others[2].dtype)).flatten(2) * gate
