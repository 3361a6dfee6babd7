"""Which optimizer updates which parameters, and several optimizers as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.core.optimizer.chunked_state_builder import build_chunked_state_optimizer
from megatron.core.optimizer.definition import (
    ElementwiseOptimizer,
    ModelTensors,
    OptimizerDefinition,
)
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class MultiOptimizer:
    """Several optimizers with the interface of one `torch.optim.Optimizer`."""

    def __init__(self, optimizers: Sequence[Any], param_groups: list[dict[str, Any]]) -> None:
        """
        Args:
            param_groups: the groups of all optimizers, in the order that all ranks agree on.
        """
        self.optimizers, self.param_groups = list(optimizers), param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of all tensors."""
        return {
            tensor: entry
            for optimizer in self.optimizers
            for tensor, entry in optimizer.state.items()
        }

    def step(self) -> None:
        """Update the tensors of all optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer under its number."""
        return {
            str(number): optimizer.state_dict() for number, optimizer in enumerate(self.optimizers)
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for number, optimizer in enumerate(self.optimizers):
            optimizer.load_state_dict(state_dict[str(number)])


def chunks_state(config: OptimizerConfig) -> bool:
    """Return whether state is visited chunk by chunk instead of lying in fp32 on the device."""
    return config.use_precision_aware_optimizer or config.offloads_optimizer


def build_torch_optimizer(
    config: OptimizerConfig, param_groups: list[dict[str, Any]], parts: ModelTensors
) -> Any:
    """Return one optimizer, or `MultiOptimizer` where groups name different ones.

    Args:
        param_groups: a group's "optimizer" names its optimizer, `config.optimizer` without one. The
            groups of the result are these very dictionaries, in this order.
    Communication: that of `MuonRedistribute` if any group is of Muon.
    """
    names = [group.get("optimizer", config.optimizer) for group in param_groups]
    groups_of: dict[str, list[dict[str, Any]]] = {}
    for name, group in zip(names, param_groups, strict=True):
        groups_of.setdefault(name, []).append(group)
    optimizers = {
        name: _build(OPTIMIZERS[name], config, groups, parts) for name, groups in groups_of.items()
    }
    if len(optimizers) == 1:
        return optimizers[names[0]]
    remaining = {name: iter(optimizer.param_groups) for name, optimizer in optimizers.items()}
    return MultiOptimizer(list(optimizers.values()), [next(remaining[name]) for name in names])


def _build(
    optimizer: OptimizerDefinition,
    config: OptimizerConfig,
    param_groups: list[dict[str, Any]],
    parts: ModelTensors,
) -> Any:
    """Build one optimizer: on chunks of state, its own class, or `ElementwiseOptimizer`."""
    if chunks_state(config):
        mine = {id(tensor) for group in param_groups for tensor in group["params"]}
        shards = [item for item in parts.shards if id(item.main_param) in mine]
        return build_chunked_state_optimizer(
            optimizer.elementwise(config), config, param_groups, shards
        )
    if optimizer.build is not None:
        return optimizer.build(config, param_groups, parts)
    return ElementwiseOptimizer(
        param_groups,
        optimizer.elementwise(config),
        lr=config.lr or 0.0,
        weight_decay=config.weight_decay,
    )
