"""The linear layers of a transformer layer that multiply in low precision.

These are the column-parallel, row-parallel and grouped layers of attention, MLP and experts.
Embedding, output layer, router and replicated down projections keep the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ReduceOp

from megatron.core.foundation.errors import ConfigError
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.products import LinearProducts
from megatron.core.low_precision.recipes import fp4_recipe, fp8_recipe
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import backend

_ONE = (ColumnParallelLinear, RowParallelLinear)
_Linear = GroupedLinear | ColumnParallelLinear | RowParallelLinear
_HISTORY = "amax_history"


def multiplies_in_low_precision(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether layer `layer_number`, from 1, follows the recipe of the config.

    Prediction layers, whose numbers follow the last layer's, are treated as last layers.
    """
    if not config.first_last_layers_bf16:
        return True
    last = config.num_layers - config.num_layers_at_end_in_bf16
    return config.num_layers_at_start_in_bf16 < layer_number <= last


def use_low_precision(layer: nn.Module, layer_number: int, groups: ProcessGroupCollection) -> None:
    """Set the recipe of the config on the linear layers inside a transformer layer.

    Raises:
        ConfigError: it has no linear layer of this package.
    """
    config = getattr(layer, "config", None)
    if not isinstance(config, TransformerConfig) or not (config.fp8 or config.fp4):
        return
    if config.fp8:
        recipe = fp8_recipe(config.fp8_recipe, config.fp8, config.fp8_margin)
    else:
        assert config.fp4
        recipe = fp4_recipe(config.fp4_recipe)
    uses_largest = config.fp8_amax_compute_algo == "max"
    acts = multiplies_in_low_precision(config, layer_number)
    found = [part for part in layer.modules() if isinstance(part, (*_ONE, GroupedLinear))]
    if not found:
        raise ConfigError(
            f"{recipe.name} in a transformer layer of {type(layer).__name__} without linear layers"
            " of this package.",
            rule="only the local linear layers multiply in low precision",
            flags=["--fp8-format", "--fp4-format", "--transformer-impl"],
            fix="use --transformer-impl local",
        )
    for part in found:
        # Layers that do not use a history have one too, because checkpoints stack the layers.
        weights = _weights(part)
        names = [_HISTORY]
        if isinstance(part, GroupedLinear):
            names = [f"{_HISTORY}{index}" for index in range(len(weights))]
        histories = []
        for name in names if recipe.uses_history else []:
            histories.append(
                AmaxHistory(part, name, config.fp8_amax_history_len, uses_largest=uses_largest)
            )
            set_param_meta(part.get_buffer(name), ParamMeta(is_expert=part.is_expert))
        if not acts:
            continue
        products = [
            LinearProducts(
                recipe=recipe,
                tp=part.tp_group,
                # A rank's experts process tokens of all context-parallel ranks.
                cp=SINGLE_RANK if part.is_expert else groups.cp,
                split_dim=get_param_meta(weight).split_dim,
                stride=get_param_meta(weight).stride,
                has_low_precision_wgrad=config.fp8_wgrad,
                history=histories[index] if histories else None,
            )
            for index, weight in enumerate(weights)
        ]
        if isinstance(part, GroupedLinear):
            part.products = products
        else:
            part.spec = replace(part.spec, products=products[0])


def _weights(part: _Linear) -> list[nn.Parameter]:
    if isinstance(part, GroupedLinear):
        return part.weights()
    assert part.weight is not None, part
    return [part.weight]


def _low_precision_layers(
    model: Sequence[nn.Module],
) -> Iterator[tuple[_Linear, Sequence[LinearProducts]]]:
    """Yield the layers that multiply in low precision, with the products of each weight."""
    for chunk in model:
        for part in chunk.modules():
            if isinstance(part, GroupedLinear) and part.products:
                yield part, part.products
            elif isinstance(part, _ONE) and part.spec.products is not None:
                yield part, [part.spec.products]


def weights_of_one_scale(model: nn.Module) -> dict[nn.Parameter, LinearProducts]:
    """Return the weights whose products use one scale for the whole weight, and the products."""
    return {
        weight: products
        for part, owned in _low_precision_layers([model])
        for weight, products in zip(_weights(part), owned, strict=True)
        if products.has_one_weight_scale
    }


def finish_low_precision_step(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Append the amaxes of this step to the histories of all chunks of this rank.

    Communication, for the delayed recipe only: one all-reduce of maxima over tp x cp x dp, the
    ranks of one pipeline stage, and for experts over the ranks that share them.
    """
    found = [
        (part.is_expert, products.history)
        for part, owned in _low_precision_layers(model)
        for products in owned
        if products.history is not None
    ]
    reduced_over = {False: [groups.tp_dp_cp], True: [groups.expt_tp, groups.expt_dp]}
    for is_expert, reducing in reduced_over.items():
        histories = [history for expert, history in found if expert == is_expert]
        if not histories:
            continue
        joined = torch.stack([history.take_step() for history in histories])
        joined = joined.nan_to_num(float("inf"), posinf=float("inf"))
        joined = joined.to(histories[0].device)
        for group in reducing:
            backend.all_reduce(joined, group, ReduceOp.MAX)
        for history, amaxes in zip(histories, joined, strict=True):
            history.move(amaxes)
