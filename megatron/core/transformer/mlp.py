"""The MLP of a layer: fc2(act(fc1(x))), or gated: fc2(act(gate) * up).

The gated form is N. Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202. In it fc1 gives
[gate; up]; under tensor parallelism every rank holds [gate_shard; up_shard] (stride 2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.errors import refuse_given
from megatron.core.kernels.gated_activation import Gate
from megatron.core.kernels.gated_activation import gated as gated_activation
from megatron.core.offload.saved_activations import offloading
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    resolve_group,
    resolve_groups,
)
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from megatron.core.tensor_parallel.unit_products import copies
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.activation_sparsity import above_quantile
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass
class MLPSubmodules:
    """Parts of an MLP; `activation_func`, if given, is a module built without arguments."""

    linear_fc1: ModuleSpec | type | Any = None
    linear_fc2: ModuleSpec | type | Any = None
    activation_func: ModuleSpec | type | Any = None


class MLP(MegatronModule):
    """Two linear layers around an activation, split over the tensor-parallel ranks.

    Args:
        input_size: width of the input, and of the output of an expert (experts may have a latent
            width); default hidden_size.
        ffn_hidden_size: width between the two layers; default the config's.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        is_expert: bool = False,
        input_size: int | None = None,
        ffn_hidden_size: int | None = None,
        tp_group: Group | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.pg_collection = resolve_groups(pg_collection)
        tp_group = resolve_group(tp_group, "expt_tp" if is_expert else "tp", self.pg_collection)
        self.is_expert = is_expert
        self.recomputes_activation = is_expert and config.recomputes("moe_act")
        self.input_size = input_size or config.hidden_size
        ffn = ffn_hidden_size or config.ffn_hidden_size
        assert ffn
        blocks = 2 if config.gated_linear_unit else 1
        self.linear_fc1 = build_module(
            submodules.linear_fc1,
            self.input_size,
            ffn * blocks,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            # The product adds its bias while it writes the output; a separate pass costs more.
            skip_bias_add=False,
            is_expert=is_expert,
            tp_comm_buffer_name="fc1",
            tp_group=tp_group,
            pg_collection=self.pg_collection,
            stride=blocks,
        )
        self.activation_func: Callable[[Tensor], Tensor] = config.activation_func
        if submodules.activation_func is not None:
            self.activation_func = build_module(submodules.activation_func)
        elif isinstance(config.activation_func, type):
            self.activation_func = config.activation_func(config, tp_group)
        self.linear_fc2 = build_module(
            submodules.linear_fc2,
            ffn,
            self.input_size if is_expert else config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=is_expert,
            tp_comm_buffer_name="fc2",
            tp_group=tp_group,
            pg_collection=self.pg_collection,
        )

    def forward(
        self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: object
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the MLP of [s, b, h] (under sequence parallelism [s/tp, b, h]).

        Args:
            per_token_scale: [s, b], factor on each token's activation (a router's probability).
            kwargs: `padding_mask`, an argument of layers of experts, is ignored.
        Returns:
            (output of the input's shape, bias of fc2 [h] that is still to be added, or None).
        """
        refuse_given(
            "MLP",
            {name: value for name, value in kwargs.items() if name != "padding_mask"},
            rule="a dense layer treats all tokens equally",
            fix="leave it out",
        )
        if self.recomputes_activation and self.training:
            x, bias = self.linear_fc1(hidden_states)
            dropped = CheckpointWithoutOutput()
            intermediate = dropped.checkpoint(self._scaled_activation, x, bias, per_token_scale)
            output, bias = self.linear_fc2(intermediate)
            dropped.discard_output_and_register_recompute(output)
            return output, bias
        intermediate = self.fc1_and_act(hidden_states)
        if per_token_scale is not None:
            tp = self.pg_collection.expt_tp
            intermediate = weighted(intermediate, per_token_scale, self.config, tp)
        return self.linear_fc2(intermediate)

    def _scaled_activation(self, x: Tensor, bias: Tensor | None, scale: Tensor | None) -> Tensor:
        act, config, tp = self.activation_func, self.config, self.pg_collection.expt_tp
        is_expert = self.is_expert
        return gated(x, act, config, bias=bias, weights=scale, is_expert=is_expert, expt_tp=tp)

    def fc1_and_act(self, hidden_states: Tensor) -> Tensor:
        """Compute the input of fc2, [s, b, f/tp]."""
        with offloading(self.is_expert and self.config.offloads("expert_fc1"), self.linear_fc1):
            # A spec's layer may return its bias.
            intermediate, bias = self.linear_fc1(hidden_states)
        with offloading(self.is_expert and self.config.offloads("moe_act")):
            return self.activate(intermediate, bias)

    def activate(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Apply bias, activation and gate: [s, b, f or 2f] -> [s, b, f]. Models may override it.

        Communication: with `activation_sparsity` the sums of `above_quantile`.
        """
        if share := self.config.activation_sparsity:
            x = x if bias is None else x + bias
            first, *others = x.chunk(1 + self.config.gated_linear_unit, -1)
            sparse = above_quantile(first, share, self.pg_collection.tp)
            x, bias = torch.cat((sparse, *others), -1) if others else sparse, None
        return gated(x, self.activation_func, self.config, bias=bias, is_expert=self.is_expert)


def gated(
    x: Tensor,
    activation_func: Callable[[Tensor], Tensor],
    config: TransformerConfig,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    is_expert: bool = False,
    expt_tp: Group = SINGLE_RANK,
) -> Tensor:
    """Apply the activation, with a gate if `config.gated_linear_unit`: [..., f or 2f] -> [..., f].

    Args:
        bias: [f or 2f], added first.
        weights: [...], factor on each vector of the result, which keeps its dtype.
        is_expert: the MLP is a routed expert, which may have a clamp of its own.
        expt_tp: ranks that split the vectors of an expert.
    """
    if weights is not None and (config.layout_invariant_mode or not config.gated_linear_unit):
        out = gated(x, activation_func, config, bias=bias, is_expert=is_expert)
        return weighted(out, weights, config, expt_tp)
    if not config.gated_linear_unit:
        return activation_func(x if bias is None else x + bias)
    first, last = config.mlp_factors or (1.0, 1.0)
    if first != 1.0:
        activation_func = partial(_of_multiple, activation_func, first)
    clamp = config.activation_func_clamp_value
    if is_expert and config.moe_activation_func_clamp_value is not None:
        clamp = config.moe_activation_func_clamp_value
    clamps_after = config.activation_func_clamp_after
    gate = Gate(activation_func, clamp, config.glu_linear_offset, clamps_after)
    fuses = config.bias_activation_fusion
    out = gated_activation(x, gate, bias=bias, weights=weights, fuses=fuses)
    return out if last == 1.0 else out * last


def _of_multiple(function: Callable[[Tensor], Tensor], factor: float, x: Tensor) -> Tensor:
    return function(x * factor)


def weighted(x: Tensor, weights: Tensor, config: TransformerConfig, expt_tp: Group) -> Tensor:
    """Return x [..., f], the vectors times their weights [...], in the dtype of x.

    Communication: in layout-invariant mode a sum over `expt_tp` of the gradients of the weights.
    """
    if not config.layout_invariant_mode:
        return (x * weights.unsqueeze(-1)).to(x.dtype)
    units = config.tensor_units // expt_tp.size()
    of_units = copies(weights, weights.dim(), units, units, expt_tp).unsqueeze(-1)
    return (x.unflatten(-1, (units, -1)) * of_units).flatten(-2).to(x.dtype)
