"""Base of mixers that remember a sequence in a state of fixed size.

A subclass defines its sizes, its parameters and three functions: the coefficients of the state
update, the recurrence over tokens, and the output of the heads. This module has everything else:
projections, the short causal convolution, the cache of generation, documents, recomputation, and
the exchange between context- and tensor-parallel ranks.

A context-parallel rank holds two pieces of the sequence (see `context_parallel.partition`). They
are stacked in the batch dimension, so that both are computed at once. A piece needs the state
before it and, for the convolution, a few tokens before it. The effect of a piece on the state is a
linear map: ranks gather the maps of all pieces, whose size does not depend on the length of the
sequence, and compose them.

Legend: s tokens of this rank, b micro batch, h hidden, g blocks, n heads, e width of a value head,
c channels and k taps of the convolution, p pieces of this rank (2, or 1 without context
parallelism), which are first in the batch: [p*b]. The projection packs its output features block by
block; tensor parallelism splits whole blocks.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.foundation.errors import refuse_given
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.kernels.chunks import Chunks, DocumentRows
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.param_meta import get_param_meta, in_rows, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.ssm.mixer_sizes import MixerSizes
from megatron.core.ssm.sequence_pieces import SequencePieces
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.tensor_parallel.random import checkpoint
from megatron.core.topology.group import Group
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

_Module = TypeVar("_Module", bound=nn.Module)
LARGEST_DECAY = 16.0
"""The initial exp(A_log) is between 1 and this."""
_LEAST_STEP, _LARGEST_STEP = 1e-3, 1e-1
"""Initial step sizes are between these, log-uniformly."""
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
    """Fill [n] with the inverse softplus of the initial step sizes."""
    logs = nn.init.uniform_(dt_bias, math.log(_LEAST_STEP), math.log(_LARGEST_STEP))
    steps = logs.exp().clamp(min=_SMALLEST_STEP)
    with torch.no_grad():
        dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))


class RecurrentMixer(MegatronModule):
    """Mix a sequence by a recurrence, in place of self-attention.

    Args:
        layer_number: 1-based number of the layer in the whole model.
    """

    pg_collection: ProcessGroupCollection
    has_convolution_bias = False
    has_activation = True
    """SiLU follows the convolution."""

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
            has_activation=self.has_activation,
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
        """Return the sizes of the mixer for a config, or for settings with the same fields."""

    @abstractmethod
    def add_parameters(self, layer: ParallelLayer) -> None:
        """Create the parameters other than the projections and the convolution.

        Args:
            layer: creates parameters that are split over the tensor-parallel ranks.
        """

    @abstractmethod
    def state_shape(self) -> tuple[int, ...]:
        """Return the shape of one sequence's state on this rank."""

    @abstractmethod
    def coefficients(self, others: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the coefficients of the state update; zeros leave the state unchanged.

        Args:
            others: [s, b, g/tp, width], the parts of the projection without convolution.
        Returns:
            [s, b, n/tp, ...] each, fp32 or wider.
        """

    def recurrence(
        self,
        convolved: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        documents: DocumentRows | None,
    ) -> Chunks:
        """Return the recurrence over tokens, in chunks; only `recur` calls it.

        Args:
            convolved: [s, b, g/tp, width], the parts of the projection after the convolution.
            coefficients: of the same tokens.
        """
        raise NotImplementedError

    def entering(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the input of the convolution, [s, b, g/tp, width].

        Args:
            parts: [s, b, g/tp, width], all parts of the projection.
        """
        return torch.cat(tuple(parts[self.sizes.convolved]), -1)

    def recur(
        self,
        convolved: Sequence[Tensor],
        coefficients: Sequence[Tensor],
        documents: DocumentRows | None,
        pieces: SequencePieces,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the recurrence; see `recurrence` for the first arguments.

        Args:
            state: [b, ...] before the first token; None is zero.
        Returns:
            the outputs [s, b, n/tp, e] and the state after the last token.
        Communication:
            with a split sequence see `SequencePieces.states_before`.
        """
        chunks = self.recurrence(convolved, coefficients, documents)
        return chunks.run(pieces.states_before(chunks) if pieces.is_split else state)

    @abstractmethod
    def leave(self, out: Tensor, convolved: Sequence[Tensor], others: Sequence[Tensor]) -> Tensor:
        """Return the input of the output projection, [s, b, n/tp * e].

        Args:
            out: [s, b, n/tp, e], output of the recurrence, fp32 or wider.
            convolved, others: see `recurrence` and `coefficients`.
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
        """Mix the sequence: a token depends on the earlier tokens of its document.

        Positions and masks, which a layer passes to any mixer, are ignored.

        Args:
            hidden_states: [s, b, h] ([s/tp, b, h] under sequence parallelism).
        Returns:
            (output with the shape of the input, bias for the caller to add or None).
        """
        refuse_given(
            f"{type(self).__name__}.forward",
            {"attention_bias": attention_bias},
            rule="a recurrence has no scores of pairs",
            fix="leave it out",
        )
        packed, _ = self.in_proj(hidden_states)
        if self.recomputes_core and self.training:
            mixed = checkpoint(self.mix_in_units, False, packed, packed_seq_params)
        elif inference_context is None:
            mixed = self.mix_in_units(packed, packed_seq_params)
        else:
            mixed = self._mix(packed, packed_seq_params, inference_context)
        return self.out_proj(mixed)

    def mix_in_units(self, packed: Tensor, packed_seq_params: PackedSeqParams | None) -> Tensor:
        """Mix as `_mix` does, with the blocks of one unit at a time: kernels choose their code by
        the number of heads, which depends on the layout. Without units all blocks are one.

        Args:
            packed: [s, b, features], the output of the projection.
        Returns:
            [s, b, n/tp * e].
        """
        if not self.config.layout_invariant_mode:
            return self._mix(packed, packed_seq_params)
        units = math.gcd(self.sizes.num_blocks, self.config.tensor_units)
        count = max(units // self.pg_collection.tp.size(), 1)
        outputs = [
            self._unit(number, count)._mix(part.contiguous(), packed_seq_params)
            for number, part in enumerate(packed.chunk(count, -1))
        ]
        return torch.cat(outputs, -1)

    def _unit(self, number: int, count: int) -> RecurrentMixer:
        """Return a mixer of some of the blocks; its parameters are views of this mixer's ones."""
        unit = _part_of(self, number, count)
        unit.num_blocks, unit.num_heads = self.num_blocks // count, self.num_heads // count
        convolution = _part_of(self.conv1d, number, count)
        unit._modules = {**self._modules, "conv1d": convolution}
        return unit

    def _mix(
        self,
        packed: Tensor,
        packed_seq_params: PackedSeqParams | None,
        context: StaticInferenceContext | None = None,
    ) -> Tensor:
        """Return the output of the heads, [s, b, n/tp * e], from the output of the projection."""
        s, b, _ = packed.shape
        rows_of_block, which, taps = self.sizes.rows_of_block, self.sizes.convolved, self.sizes.taps
        widths = rows_of_block[which]
        parts = packed.view(s, b, self.num_blocks, -1).split(rows_of_block, -1)
        others = (*parts[: which.start], *parts[which.stop :])
        coefficients = self.coefficients(others)
        pieces = SequencePieces(self.pg_collection.microbatch_cp)
        rows = pieces.fold(self.entering(parts).flatten(2))
        state = None
        if context is None:
            before = pieces.rows_before(rows, taps - 1)
        else:
            before, state = self._kept(context, rows)
            coefficients = tuple(context.only_real(x) for x in coefficients)
        # At least one token before, also without convolution: the state before the first token
        # belongs to its document.
        ids = pieces.documents(packed_seq_params, rows, max(1, taps - 1))
        convolved = self.conv1d(
            rows, before, None if ids is None else ids[:, -len(rows) - taps + 1 :]
        )
        out, state = self.recur(
            convolved.unflatten(2, (self.num_blocks, -1)).split(widths, -1),
            [pieces.fold(x) for x in coefficients],
            None if ids is None else DocumentRows(ids[:, -len(rows) :], ids[:, -len(rows) - 1]),
            pieces,
            state,
        )
        if context is not None:
            assert before is not None and state is not None
            context.keep_states(self.layer_number, context.last_rows(before, rows), state)
        convolved = pieces.unfold(convolved).unflatten(2, (self.num_blocks, -1))
        out = self.leave(pieces.unfold(out), convolved.split(widths, -1), others)
        return out.to(packed.dtype)

    def _kept(self, context: StaticInferenceContext, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens before the new ones [taps - 1, b, c] and the state, from the cache."""
        b, dtype = rows.shape[1], torch.promote_types(rows.dtype, torch.float32)
        before, state = context.states(
            self.layer_number,
            rows.new_zeros((b, self.sizes.taps - 1, rows.shape[2])),
            rows.new_zeros((b, *self.state_shape()), dtype=dtype),
        )
        return before.transpose(0, 1), state


def _part_of(module: _Module, number: int, count: int) -> _Module:
    """Return a copy of a module with one of `count` parts of each parameter [n, ...]."""
    part = copy.copy(module)
    own = module._parameters.items()
    parts = {n: None if p is None else in_rows(p, p.shape).chunk(count)[number] for n, p in own}
    part.__dict__["_parameters"] = parts
    return part


def wide(x: Tensor) -> Tensor:
    """Return x [...] in fp32 or wider: decays multiply over the whole sequence."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def causal_convolution(
    x: Tensor, weight: Tensor, before: Tensor | None = None, ids: Tensor | None = None
) -> Tensor:
    """Return y_t = sum_j weight[c, j] x_{t - (k - 1) + j}, in fp32 or wider.

    Args:
        x: [s, b, c].
        weight: [c, k].
        before: [k - 1, b, c], the tokens before `x`; default zeros.
        ids: [b, k - 1 + s], documents of `before` and `x`; tokens of other documents count as
            zeros. Default one document.
    Returns:
        [s, b, c].
    """
    s, last = x.shape[0], weight.shape[1] - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(dtype)
    rows = F.pad(x, (0, 0, 0, 0, last, 0)) if before is None else torch.cat((before, x))
    out = x.to(dtype) * weight[:, last]
    for tap in range(last):
        taken = rows[tap : tap + s].to(dtype) * weight[:, tap]
        if ids is not None:
            taken = taken * (ids[:, tap : tap + s] == ids[:, last:]).t().unsqueeze(-1)
        out = out + taken
    return out


def fill_taps(weight: Tensor) -> None:
    """Fill [c, 1, k] with U(-1/sqrt(k), 1/sqrt(k)), the initial values of torch's convolutions."""
    bound = weight.shape[-1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)


class ShortConvolution(ParallelLayer):
    """Causal depthwise convolution, then an activation; tensor-parallel ranks split the channels.

    Args:
        channels: c, of all ranks together.
        taps: k; a token depends on itself and the k - 1 tokens before it.
        has_bias: add a bias per channel.
        has_activation: SiLU follows.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        config: TransformerConfig,
        tp_group: Group,
        has_bias: bool = False,
        has_activation: bool = True,
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        self.has_activation = has_activation
        width = divide(channels, tp_group.size())
        self.weight = self.new_parameter(width, 1, taps, init_method=fill_taps, split_dim=0)
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = self.new_parameter(width, init_method=nn.init.zeros_, split_dim=0)

    def forward(self, x: Tensor, before: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Convolve [s, b, c/tp]; see `causal_convolution` for the arguments.

        Returns:
            [s, b, c/tp] in the dtype of x.
        """
        out = causal_convolution(x, self.weight.squeeze(1), before, ids)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return (F.silu(out) if self.has_activation else out).to(x.dtype)
