"""Attach low-precision products to the linear layers of a transformer layer.

The column-parallel, row-parallel and grouped layers of attention, MLP and experts multiply in low
precision. Embedding, output layer, router, and projections that tensor parallelism does not split
keep the dtype of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.distributed import ReduceOp

from megatron.core.foundation.errors import ConfigError
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.quantized_linear import QuantizedLinear
from megatron.core.low_precision.recipes import Recipe, fp4_recipe, fp8_recipe
from megatron.core.parameters.param_meta import ParamMeta, get_param_meta, set_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.config.layer_kinds import LINEAR, NOTHING
from megatron.core.transformer.moe.grouped_linear import GroupedLinear
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import torch_collectives

_ONE = (ColumnParallelLinear, RowParallelLinear)
_Linear = GroupedLinear | ColumnParallelLinear | RowParallelLinear
_HISTORY = "amax_history"


def recipe_of(config: TransformerConfig) -> Recipe | None:
    """Return the low-precision recipe of a config, or None."""
    if config.fp8:
        return fp8_recipe(config.fp8_recipe, config.fp8, config.fp8_margin)
    return fp4_recipe(config.fp4_recipe) if config.fp4 else None


def multiplies_in_low_precision(config: TransformerConfig, layer_number: int) -> bool:
    """Return whether layer `layer_number`, counted from 1, follows the recipe of the config.

    Layers of multi-token prediction have numbers above `num_layers` and count as last layers.
    """
    if not config.first_last_layers_bf16:
        return True
    last = config.num_layers - config.num_layers_at_end_in_bf16
    return config.num_layers_at_start_in_bf16 < layer_number <= last


def use_low_precision(layer: nn.Module, layer_number: int, groups: ProcessGroupCollection) -> None:
    """Attach the products of the config's recipe to the linear layers in a transformer layer.

    Raises:
        ConfigError: the layer has no linear layer that supports low precision.
    """
    config = getattr(layer, "config", None)
    if not isinstance(config, TransformerConfig):
        return
    recipe = recipe_of(config)
    if recipe is None:
        return
    uses_largest = config.fp8_amax_compute_algo == "max"
    acts = multiplies_in_low_precision(config, layer_number)
    found = [part for part in layer.modules() if isinstance(part, (*_ONE, GroupedLinear))]
    kind = config.layer_kind(layer_number)
    if not found and not {kind.mixer, kind.mlp} <= {LINEAR, NOTHING}:
        raise ConfigError(
            f"{recipe.name} in a transformer layer of {type(layer).__name__} without linear layers"
            " of this package.",
            rule="only the local linear layers multiply in low precision",
            flags=["--fp8-format", "--fp4-format", "--transformer-impl"],
            fix="use --transformer-impl local",
        )
    for part in found:
        # Layers that keep the dtype of the model have a history too: checkpoints stack all layers.
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
        quantized = [
            QuantizedLinear(
                recipe=recipe,
                tp=part.tp_group,
                # An expert multiplies the tokens that were dispatched to this rank.
                cp=SINGLE_RANK if part.is_expert else groups.cp,
                split_dim=get_param_meta(weight).split_dim,
                stride=get_param_meta(weight).stride,
                has_low_precision_wgrad=config.fp8_wgrad,
                history=histories[index] if histories else None,
            )
            for index, weight in enumerate(weights)
        ]
        if isinstance(part, GroupedLinear):
            part.quantized = quantized
        else:
            part.spec = replace(part.spec, quantized=quantized[0])


def _weights(part: _Linear) -> list[nn.Parameter]:
    if isinstance(part, GroupedLinear):
        return part.weights()
    assert part.weight is not None, part
    return [part.weight]


def _low_precision_layers(
    model: Sequence[nn.Module],
) -> Iterator[tuple[_Linear, Sequence[QuantizedLinear]]]:
    """Yield the layers that multiply in low precision, with the products of each weight."""
    for chunk in model:
        for part in chunk.modules():
            if isinstance(part, GroupedLinear) and part.quantized:
                yield part, part.quantized
            elif isinstance(part, _ONE) and part.spec.quantized is not None:
                yield part, [part.spec.quantized]


def weights_of_one_scale(model: nn.Module) -> dict[nn.Parameter, QuantizedLinear]:
    """Return the weights that all products round with one scale, and their products."""
    return {
        weight: quantized
        for part, owned in _low_precision_layers([model])
        for weight, quantized in zip(_weights(part), owned, strict=True)
        if quantized.has_one_weight_scale
    }


def finish_low_precision_step(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Enter the amaxes of this step into the histories of all model chunks of this rank.

    Communication:
        with delayed scaling only: one all-reduce (maximum) over the ranks of the pipeline stage
        (tp x cp x dp), and for experts over the ranks that share the expert.
    """
    found = [
        (part.is_expert, quantized.history)
        for part, owned in _low_precision_layers(model)
        for quantized in owned
        if quantized.history is not None
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
            torch_collectives.all_reduce(joined, group, ReduceOp.MAX)
        for history, amaxes in zip(histories, joined, strict=True):
            history.move(amaxes)
