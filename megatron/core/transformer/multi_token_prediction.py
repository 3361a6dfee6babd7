"""Multi-token prediction: further layers that predict the tokens after the next one.

DeepSeek-AI, "DeepSeek-V3 Technical Report", section 2.2, arXiv 2412.19437. Depth k joins the
hidden state of depth k-1 at a position with the embedding of the token k positions later, passes
them through a transformer layer, or through several (as Nemotron 3 does), and predicts the token
after that one, with the model's own embedding and head. Each depth has its own layers, or all
depths share them (`mtp_use_repeated_layer`).

The losses of the depths are added in backward only. The loss function gives every target token a
weight (its mask and its normalisation), which is the gradient of the token's loss; each depth
applies this weight to its loss of the token. Labels and weights are shifted together, so no depth
trains on a masked token, in every layout. Reports show the losses as `mtp_1 loss` and so on: means
over the tokens that the loss function counts.

Legend: s sequence, b micro batch, h hidden, D number of depths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import sequence_shard_of_rank, shift_left
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.step_context.context import current_step
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.low_precision_layers import use_low_precision
from megatron.core.transformer.module import MegatronModule, in_compute_dtype
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.residual_streams import stream_contraction, stream_expansion
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MultiTokenPredictionBlockSubmodules:
    """Parts of a depth: a transformer layer, or for each depth the list of its layers; and the
    class of the norms."""

    transformer_layer: ModuleSpec | type | Any = None
    norm: ModuleSpec | type | Any = None


class LayersOfDepth(MegatronModule):
    """The layers of a depth that has several, called one after the other."""

    def __init__(self, config: TransformerConfig, layers: Iterable[nn.Module]) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_states: Tensor, **attention: object) -> tuple[Tensor, None]:
        """Pass hidden states [s/cp, b, h] through all layers."""
        for layer in self.layers:
            hidden_states, _ = layer(hidden_states, **attention)
        return hidden_states, None


class MultiTokenPredictionLayer(MegatronModule):
    """One depth.

    Args:
        specs: specs of its layers.
        first: number of the first of these layers in the whole model.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MultiTokenPredictionBlockSubmodules,
        specs: Sequence[ModuleSpec | type],
        first: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)

        def norm() -> nn.Module:
            return build_module(
                submodules.norm,
                config=config,
                hidden_size=config.hidden_size,
                eps=config.layernorm_epsilon,
            )

        self.enorm, self.hnorm = norm(), norm()
        self.eh_proj = ReplicatedLinear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            tp_group=pg_collection.tp,
        )
        layers = []
        for number, spec in enumerate(specs, first):
            layer = build_module(
                spec,
                config=config,
                layer_number=number,
                pg_collection=pg_collection,
                vp_stage=vp_stage,
                is_mtp_layer=True,
                add_layer_offset=False,
            )
            use_low_precision(layer, number, pg_collection)
            layers.append(layer)
        self.transformer_layer = layers[0] if len(layers) == 1 else LayersOfDepth(config, layers)
        self.expansion = stream_expansion(config, pg_collection.tp)
        self.contraction = stream_contraction(config, pg_collection.tp)
        self.final_layernorm = norm()

    def forward(self, hidden_states: Tensor, embedded: Tensor, **attention: object) -> Tensor:
        """Join hidden states and embedded tokens [s/cp, b, h] and run the layer."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden_states)), -1)
        projected, _ = self.eh_proj(in_compute_dtype(joined, self.config))
        output, _ = self.transformer_layer(self.expansion(projected), **attention)
        if self.contraction is not None:
            output = self.contraction(output)
        return in_compute_dtype(self.final_layernorm(output), self.config)


class MultiTokenPredictionBlock(MegatronModule):
    """The layers of all depths, on one stage: the stage of the head, or an earlier one.

    Args:
        spec: the submodules, or a spec with them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        spec: ModuleSpec | MultiTokenPredictionBlockSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        groups = resolve_groups(pg_collection)
        self.groups = groups
        parts: Any = spec.submodules if isinstance(spec, ModuleSpec) else spec
        specs, depths = parts.transformer_layer, config.num_built_prediction_layers
        of_depths = specs if isinstance(specs, list) else [[specs]] * depths
        first = accumulate(map(len, of_depths), initial=config.num_layers + 1)
        self.layers = nn.ModuleList(
            MultiTokenPredictionLayer(config, parts, own, number, groups, vp_stage)
            for own, number in zip(of_depths, first, strict=False)
        )

    def forward(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        *,
        embed: Callable[[Tensor], Tensor],
        **attention: object,
    ) -> list[Tensor]:
        """Return the hidden states of each depth, [s, b, h] each; see `predictions`."""
        return list(self.predictions(hidden_states, labels, embed=embed, **attention))

    def predictions(
        self,
        hidden_states: Tensor,
        labels: Tensor,
        *,
        embed: Callable[[Tensor], Tensor],
        **attention: object,
    ) -> Iterator[Tensor]:
        """Yield the hidden states of one depth after the other.

        Args:
            hidden_states: output of the model's last layer after the final norm, [s/cp, b, h]
                ([s/cp/tp, b, h] under sequence parallelism).
            labels: [b, s/cp], the next tokens: the input of depth 1.
            embed: maps tokens [b, s/cp] to embeddings shaped like the hidden states.
        Communication:
            per depth an all-gather of b * s token ids on `cp`, and the communication of the layer.
        """
        num_depths = self.config.mtp_num_layers or 0
        for depth in range(1, num_depths + 1):
            cp = self.groups.microbatch_cp
            tokens = shift_left(labels, depth - 1, cp) if depth > 1 else labels
            repeats = len(self.layers) < num_depths
            with rng_state().in_pass(depth if repeats else 0):
                hidden_states = self.layers[0 if repeats else depth - 1](
                    hidden_states, embed(tokens), **attention
                )
            yield hidden_states


def with_prediction_losses(
    loss: Tensor,
    predictions: Iterable[Tensor],
    labels: Tensor,
    *,
    loss_of: Callable[[Tensor, Tensor], Tensor],
    weight: float,
    cp: Group,
    packed_seq_params: PackedSeqParams | None = None,
) -> Tensor:
    """Add the losses of the predictions to the backward pass of the loss.

    Args:
        loss: [b, s/cp], the loss of every token.
        predictions: hidden states [s/cp, b, h] of each depth ([s/cp/tp, b, h] under sequence
            parallelism).
        labels: [b, s/cp], the next tokens.
        loss_of: maps (hidden states, labels) to a loss [b, s/cp].
        weight: factor on the losses of the depths.
    Returns:
        `loss`, whose backward pass also reaches the predictions and reports their losses
        (`StepContext.mtp_losses`).
    Communication:
        per depth an all-gather of b * s token ids on `cp`; in backward one of b * s gradients.
    """
    shard = sequence_shard_of_rank(labels.shape[1], cp=cp, sp=SINGLE_RANK)
    positions = shard.positions(labels.device)
    documents = None if packed_seq_params is None else packed_seq_params.seq_idx
    is_inside = None
    reported = current_step().mtp_losses
    for depth, hidden_states in enumerate(predictions, 1):
        if documents is not None:
            later = (positions + depth).clamp(max=shard.total - 1)
            is_inside = documents[:, later] == documents[:, positions]
        other = loss_of(hidden_states, shift_left(labels, depth, cp))
        figures = loss.new_zeros(2)
        if reported is not None:
            reported[f"mtp_{depth} loss"] = figures
        loss = _WithGradientFor.apply(loss, other, is_inside, depth, weight, figures, cp)
    return loss


class _WithGradientFor(torch.autograd.Function):
    """Return a loss whose gradient also flows into the loss of the tokens `depth` positions later.

    The gradient of a token's loss is the token's weight in the loss function: its mask and its
    normalisation. A depth uses the weight of its target token, so the gradient is shifted like the
    labels. A target after the end of the sequence, or in another document than the position
    (`is_inside` False), has weight 0. Backward adds the (sum, count) of the losses with nonzero
    weight to `figures`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        other: Tensor,
        is_inside: Tensor | None,
        depth: int,
        weight: float,
        figures: Tensor,
        cp: Group,
    ) -> Tensor:
        ctx.save_for_backward(other, is_inside)
        ctx.depth, ctx.weight, ctx.figures, ctx.cp = depth, weight, figures, cp
        return loss.clone()  # no view: see `LanguageModule`

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None, None, None]:
        other, is_inside = ctx.saved_tensors
        grad_of_other = shift_left(grad, ctx.depth, ctx.cp)
        if is_inside is not None:
            grad_of_other = grad_of_other * is_inside
        learned = grad_of_other != 0
        ctx.figures += torch.stack((torch.where(learned, other, 0).sum(), learned.sum()))
        return grad, grad_of_other * ctx.weight, None, None, None, None, None
