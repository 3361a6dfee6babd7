"""Gated DeltaNet: a mixer whose state is one matrix per head, corrected by the delta rule.

S. Yang, J. Kautz, A. Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
arXiv 2412.06464, section 3.3, in the form of Qwen3-Next: queries and keys are shared by several
value heads, a short convolution goes before the rule, a gated norm of each head after it.

Legend: s sequence, b micro batch, h hidden, g key heads, n value heads, r = n/g, d width of a key
head, e of a value head. The projection packs rows by key head: query d, key d, r values and r
output gates of e, r write strengths, r decays; tensor parallelism splits whole key heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import refuse_given
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.kernels.gated_delta_rule import DocumentRows, delta_chunks
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.ssm.sequence_pieces import SequencePieces
from megatron.core.ssm.short_convolution import ShortConvolution
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.norm import RMSNorm
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

LARGEST_DECAY = 16.0
"""exp(A_log) begins between 1 and this."""
_UNIT_EPS = 1e-6


@dataclass
class GatedDeltaNetSubmodules:
    """Parts of a Gated DeltaNet."""

    in_proj: ModuleSpec | type | Any = None
    out_proj: ModuleSpec | type | Any = None


def fill_log_decays(a_log: Tensor) -> None:
    """Fill with the logarithm of U(1, 16)."""
    torch.nn.init.uniform_(a_log, 1.0, LARGEST_DECAY).log_()


class GatedDeltaNet(MegatronModule):
    """Mix a sequence by the gated delta rule; in a layer it takes the place of self-attention.

    Args:
        layer_number: 1-based number of the layer in the whole model.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.pg_collection = resolve_groups(pg_collection)
        tp = self.pg_collection.tp
        g, n = config.linear_num_key_heads, config.linear_num_value_heads
        d, e = config.linear_key_head_dim, config.linear_value_head_dim
        self.key_width, self.value_width = d, e
        self.num_key_heads = divide(g, tp.size())
        self.num_value_heads = divide(n, tp.size())
        r = divide(n, g)
        self.rows_of_key_head = (d, d, r * e, r * e, r, r)
        """Rows of a key head as they lie: query, key, values, gates, write strengths, decays."""
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            g * sum(self.rows_of_key_head),
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=tp,
        )
        weight = self.in_proj.weight
        set_param_meta(
            weight, replace(get_param_meta(weight), fused_row_sizes=self.rows_of_key_head)
        )
        self.conv1d = ShortConvolution(
            g * sum(self.rows_of_key_head[:3]),
            config.linear_conv_kernel_dim,
            config=config,
            tp_group=tp,
        )
        heads = ParallelLayer(config, tp_group=tp)
        self.A_log = heads.new_parameter(
            self.num_value_heads, init_method=fill_log_decays, split_dim=0
        )
        self.dt_bias = heads.new_parameter(
            self.num_value_heads, init_method=torch.nn.init.ones_, split_dim=0
        )
        self.out_norm = RMSNorm(
            e,
            config.layernorm_epsilon,
            dtype=config.params_dtype,
            device=torch.device("cpu") if config.use_cpu_initialization else current_device(),
        )
        # Each tensor-parallel rank norms its own heads, with or without sequence parallelism.
        meta = get_param_meta(self.out_norm.weight)
        set_param_meta(self.out_norm.weight, replace(meta, partial_grad_axes=("tp",)))
        self.out_proj = build_module(
            submodules.out_proj,
            n * e,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp,
        )
        self.recomputes_core = config.recomputes("core_attn")

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_bias: Tensor | None = None,
        inference_context: StaticInferenceContext | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_of_attention: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the sequence: a row sees what is before it in its document.

        Positions and masks, which a layer hands to any mixer, mean nothing here.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        Returns:
            (output of the input's shape, bias that is still to be added, or None).
        """
        refuse_given(
            "GatedDeltaNet.forward",
            {"attention_bias": attention_bias},
            rule="a recurrence has no scores of pairs",
            fix="leave it out",
        )
        packed, _ = self.in_proj(hidden_states)
        if self.recomputes_core and self.training:
            mixed = checkpoint(self._mix, False, packed, packed_seq_params)
        else:
            mixed = self._mix(packed, packed_seq_params, inference_context)
        return self.out_proj(mixed)

    def _mix(
        self,
        packed: Tensor,
        packed_seq_params: PackedSeqParams | None,
        context: StaticInferenceContext | None = None,
    ) -> Tensor:
        """Return what leaves the heads, [s, b, n/tp * e], from rows of the projection."""
        s, b, _ = packed.shape
        d, e, g = self.key_width, self.value_width, self.num_key_heads
        taps = self.config.linear_conv_kernel_dim
        by_head = packed.view(s, b, g, -1)
        entering, gate, strength, decay = by_head.split(
            [sum(self.rows_of_key_head[:3]), *self.rows_of_key_head[3:]], -1
        )
        beta = _wide(strength.reshape(s, b, -1)).sigmoid()
        log_decay = self._log_decay(decay.reshape(s, b, -1))
        pieces = SequencePieces(self.pg_collection.cp)
        rows = pieces.fold(entering.flatten(2))
        state = None
        if context is None:
            before = pieces.rows_before(rows, taps - 1)
        else:
            before, state = self._kept(context, rows)
            beta, log_decay = context.only_real(beta), context.only_real(log_decay)
        # One row before at least, also where the convolution sees none: its state is the first.
        ids = pieces.documents(packed_seq_params, rows, max(1, taps - 1))
        convolved = self.conv1d(
            rows, before, None if ids is None else ids[:, -len(rows) - taps + 1 :]
        )
        query, key, value = convolved.unflatten(2, (g, -1)).split(self.rows_of_key_head[:3], -1)
        chunks = delta_chunks(
            _unit(query) * d**-0.5,
            _unit(key),
            value.reshape(*rows.shape[:2], -1, e),
            pieces.fold(log_decay),
            pieces.fold(beta),
            None if ids is None else DocumentRows(ids[:, -len(rows) :], ids[:, -len(rows) - 1]),
        )
        if pieces.is_split:
            state = pieces.states_before(*chunks.transition())
        out, state = chunks.run(state)
        if context is not None:
            assert before is not None
            context.keep_states(self.layer_number, context.last_rows(before, rows), state)
        out = self.out_norm(pieces.unfold(out).to(packed.dtype))
        out = out * F.silu(_wide(gate.reshape(s, b, -1, e)))
        return out.to(packed.dtype).flatten(2)

    def _kept(self, context: StaticInferenceContext, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows before the new ones [taps - 1, b, c] and the state, from the cache."""
        b = rows.shape[1]
        heads = self.num_key_heads, self.num_value_heads // self.num_key_heads
        dtype = torch.promote_types(rows.dtype, torch.float32)
        before, state = context.states(
            self.layer_number,
            rows.new_zeros((b, self.config.linear_conv_kernel_dim - 1, rows.shape[2])),
            rows.new_zeros((b, *heads, self.key_width, self.value_width), dtype=dtype),
        )
        return before.transpose(0, 1), state

    def _log_decay(self, x: Tensor) -> Tensor:
        """Return the logarithm of the decay, at most 0, of [s, b, n/tp]."""
        return -_wide(self.A_log).exp() * F.softplus(_wide(x) + _wide(self.dt_bias))


def _wide(x: Tensor) -> Tensor:
    """Return x in fp32, or wider as it is: decays multiply over the whole sequence."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor) -> Tensor:
    """Return x [..., d] with length 1."""
    x = _wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)
