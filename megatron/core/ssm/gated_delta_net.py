"""Gated DeltaNet: a mixer whose state is one matrix per head, corrected by the delta rule.

S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
arXiv 2412.06464, section 3.3, in the form of Qwen3-Next: queries and keys are shared by several
value heads, a short convolution goes before the rule, a gated norm of each head after it.

Legend: s sequence, b micro batch, g key heads, n value heads, r = n/g, d width of a key head, e of
a value head. A block is a key head: query d, key d, r values and r output gates of e, r write
strengths, r decays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.device import current_device
from megatron.core.kernels.chunks import CHUNK, DocumentRows
from megatron.core.kernels.delta_rules import DeltaChunks, delta_chunks
from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.recurrent_mixer import (
    RecurrentMixer,
    RecurrentMixerSubmodules,
    fill_log_decays,
    wide,
)
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.transformer.norm import RMSNorm

GatedDeltaNetSubmodules = RecurrentMixerSubmodules
_UNIT_EPS = 1e-6


class GatedDeltaNet(RecurrentMixer):
    """Mix a sequence by the gated delta rule."""

    rule: ClassVar[Callable[..., DeltaChunks]] = staticmethod(delta_chunks)

    @staticmethod
    def sizes_of(config: Any) -> MixerSizes:
        """Return the widths."""
        g, n = config.linear_num_key_heads, config.linear_num_value_heads
        d, e, r = config.linear_key_head_dim, config.linear_value_head_dim, n // g
        # Copies in fp32 of what enters the rule, and in each chunk scores, decays, the solved
        # systems and the state. Within 12 % for widths 16 to 128.
        kept = 12 * g * d + 11 * n * e + 4 * n * d + CHUNK * (4 * n + 3 * g) + 3 * n * d * e / CHUNK
        return MixerSizes(
            num_blocks=g,
            num_heads=n,
            key_width=d,
            value_width=e,
            taps=config.linear_conv_kernel_dim,
            rows_of_block=(d, d, r * e, r * e, r, r),
            convolved=slice(0, 3),
            # Its reading by the key, what is erased, what is written, its reading by the query.
            state_products=4,
            vector_parameters=2 * n + e,
            kept_elements=kept,
        )

    def add_parameters(self, layer: ParallelLayer) -> None:
        """Make decays of heads, and the norm that they share."""
        n = self.num_heads
        self.A_log = layer.new_parameter(n, split_dim=0, init_method=fill_log_decays)
        self.dt_bias = layer.new_parameter(n, split_dim=0, init_method=torch.nn.init.ones_)
        self.add_norm()

    def add_norm(self) -> None:
        """Make the norm of a head, whose scales the heads share."""
        config = self.config
        self.out_norm = RMSNorm(
            self.sizes.value_width,
            config.layernorm_epsilon,
            dtype=config.params_dtype,
            device=torch.device("cpu") if config.use_cpu_initialization else current_device(),
        )
        # Each tensor-parallel rank norms its own heads, with or without sequence parallelism.
        meta = get_param_meta(self.out_norm.weight)
        set_param_meta(self.out_norm.weight, replace(meta, partial_grad_axes=("tp",)))

    def state_shape(self) -> tuple[int, ...]:
        """Return (g/tp, r, d, e)."""
        r = self.num_heads // self.num_blocks
        return self.num_blocks, r, self.sizes.key_width, self.sizes.value_width

    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the logarithms of decays, at most 0, and write strengths: [s, b, n/tp] each."""
        _, strength, decay = (x.flatten(2) for x in others)
        steps = F.softplus(wide(decay) + wide(self.dt_bias))
        return -wide(self.A_log).exp() * steps, wide(strength).sigmoid()

    def recurrence(
        self,
        convolved: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        documents: DocumentRows | None,
    ) -> DeltaChunks:
        """Return the delta rule, with queries and keys [s, b, g, d] of length 1."""
        query, key, value = convolved
        value = value.reshape(*value.shape[:2], self.num_heads, -1)
        query = _unit(query) * self.sizes.key_width**-0.5
        return self.rule(query, _unit(key), value, *coefficients, documents)

    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Norm each head of [s, b, n, e], then gate it; return [s, b, n*e]."""
        gate = others[0]
        out = self.out_norm(out.to(gate.dtype))
        return (out * F.silu(wide(gate.reshape(out.shape)))).flatten(2)


def _unit(x: Tensor) -> Tensor:
    """Return x [..., d] with length 1."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)
