"""A mixer whose memory of a sequence is a state of fixed size: what all of them have in common.

A new one states its sizes, its parameters, and three functions: what decides how a row changes the
state, the recurrence over rows, and what is made of its output. Projections, the convolution, the
cache of generation, documents, recomputation, and the exchange between context- and tensor-parallel
ranks are here.

Legend: s sequence, b micro batch, h hidden, g blocks, n heads, e width of a value head. The
projection packs rows block by block; tensor parallelism splits whole blocks.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import refuse_given
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.kernels.chunks import Chunks, DocumentRows
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.param_meta import get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.sequence_pieces import SequencePieces
from megatron.core.ssm.short_convolution import ShortConvolution
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

LARGEST_DECAY = 16.0
"""exp(A_log) begins between 1 and this."""
_LEAST_STEP, _LARGEST_STEP = 1e-3, 1e-1
"""Step sizes begin between these, evenly in their logarithm."""
_SMALLEST_STEP = 1e-4


@dataclass
class RecurrentMixerSubmodules:
    """Parts of a recurrent mixer."""

    in_proj: ModuleSpec | type | Any = None
    out_proj: ModuleSpec | type | Any = None


def fill_log_decays(a_log: Tensor) -> None:
    """Fill [n] with the logarithm of U(1, 16)."""
    nn.init.uniform_(a_log, 1.0, LARGEST_DECAY).log_()


def fill_step_biases(dt_bias: Tensor) -> None:
    """Fill [n] with what softplus makes a step size of."""
    logs = nn.init.uniform_(dt_bias, math.log(_LEAST_STEP), math.log(_LARGEST_STEP))
    steps = logs.exp().clamp(min=_SMALLEST_STEP)
    with torch.no_grad():
        dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))


class RecurrentMixer(MegatronModule):
    """Mix a sequence by a recurrence; in a layer it takes the place of self-attention.

    Args:
        layer_number: 1-based number of the layer in the whole model.
    """

    pg_collection: ProcessGroupCollection
    has_convolution_bias = False

    def __init__(
        self,
        config: TransformerConfig,
        submodules: RecurrentMixerSubmodules,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.layer_number = layer_number
        self.pg_collection = resolve_groups(pg_collection)
        tp = self.pg_collection.tp
        sizes = self.sizes = self.sizes_of(config)
        self.num_blocks = divide(sizes.num_blocks, tp.size())
        self.num_heads = divide(sizes.num_heads, tp.size())
        self.in_proj = build_module(
            submodules.in_proj,
            config.hidden_size,
            sizes.projected,
            config=config,
            init_method=config.init_method,
            bias=False,
            gather_output=False,
            skip_bias_add=False,
            tp_group=tp,
        )
        weight = self.in_proj.weight
        set_param_meta(weight, replace(get_param_meta(weight), fused_row_sizes=sizes.rows_of_block))
        self.conv1d = ShortConvolution(
            sizes.channels,
            sizes.taps,
            config=config,
            tp_group=tp,
            has_bias=self.has_convolution_bias,
        )
        self.add_parameters(ParallelLayer(config, tp_group=tp))
        self.out_proj = build_module(
            submodules.out_proj,
            sizes.values,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=tp,
        )
        self.recomputes_core = config.recomputes("core_attn")

    @staticmethod
    @abstractmethod
    def sizes_of(config: Any) -> MixerSizes:
        """Return the widths that a config (or settings with its fields) gives the mixer."""

    @abstractmethod
    def add_parameters(self, layer: ParallelLayer) -> None:
        """Make the parameters beside the projections and the convolution.

        Args:
            layer: makes parameters that are split over the tensor-parallel ranks.
        """

    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of one sequence's state on this rank."""

    @abstractmethod
    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what decides how a row changes the state; with zeros it does not.

        Args:
            others: [s, b, g/tp, rows], the parts of the projection that pass no convolution.
        Returns:
            [s, b, n/tp, ...] each, fp32 or wider.
        """

    @abstractmethod
    def recurrence(
        self,
        convolved: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        documents: DocumentRows | None,
    ) -> Chunks:
        """Return the recurrence over rows, in chunks.

        Args:
            convolved: [s, b, g/tp, rows], the parts that passed the convolution.
            coefficients: of the same rows.
        """

    @abstractmethod
    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Return what enters the last projection, [s, b, n/tp * e].

        Args:
            out: [s, b, n/tp, e] of the recurrence, fp32 or wider.
            convolved, others: the parts as above.
        """

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
            f"{type(self).__name__}.forward",
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
        rows_of_block, which, taps = self.sizes.rows_of_block, self.sizes.convolved, self.sizes.taps
        widths = rows_of_block[which]
        parts = packed.view(s, b, self.num_blocks, -1).split(rows_of_block, -1)
        others = (*parts[: which.start], *parts[which.stop :])
        coefficients = self.coefficients(others)
        pieces = SequencePieces(self.pg_collection.microbatch_cp)
        rows = pieces.fold(torch.cat(parts[which], -1).flatten(2))
        state = None
        if context is None:
            before = pieces.rows_before(rows, taps - 1)
        else:
            before, state = self._kept(context, rows)
            coefficients = tuple(context.only_real(x) for x in coefficients)
        # One row before at least, also where the convolution sees none: its state is the first.
        ids = pieces.documents(packed_seq_params, rows, max(1, taps - 1))
        convolved = self.conv1d(
            rows, before, None if ids is None else ids[:, -len(rows) - taps + 1 :]
        )
        chunks = self.recurrence(
            convolved.unflatten(2, (self.num_blocks, -1)).split(widths, -1),
            [pieces.fold(x) for x in coefficients],
            None if ids is None else DocumentRows(ids[:, -len(rows) :], ids[:, -len(rows) - 1]),
        )
        if pieces.is_split:
            state = pieces.states_before(chunks)
        out, state = chunks.run(state)
        if context is not None:
            assert before is not None
            context.keep_states(self.layer_number, context.last_rows(before, rows), state)
        convolved = pieces.unfold(convolved).unflatten(2, (self.num_blocks, -1))
        out = self.leave(pieces.unfold(out), convolved.split(widths, -1), others)
        return out.to(packed.dtype)

    def _kept(self, context: StaticInferenceContext, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows before the new ones [taps - 1, b, c] and the state, from the cache."""
        b, dtype = rows.shape[1], torch.promote_types(rows.dtype, torch.float32)
        before, state = context.states(
            self.layer_number,
            rows.new_zeros((b, self.sizes.taps - 1, rows.shape[2])),
            rows.new_zeros((b, *self.state_shape()), dtype=dtype),
        )
        return before.transpose(0, 1), state


def wide(x: Tensor) -> Tensor:
    """Return x [...] in fp32, or wider as it is: decays multiply over the whole sequence."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
