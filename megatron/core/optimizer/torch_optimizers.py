"""Which rule updates which parameters, and several rules as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from megatron.core.optimizer.chunked_state_builder import build_chunked_state_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_rule import ElementwiseOptimizer, ModelParts, UpdateRule
from megatron.core.optimizer.update_rules import UPDATE_RULES


class MultiOptimizer:
    """Several update rules with the interface of one `torch.optim.Optimizer`."""

    def __init__(self, rules: Sequence[Any], param_groups: list[dict[str, Any]]) -> None:
        """
        Args:
            param_groups: the groups of all rules, in the order that all ranks agree on.
        """
        self.rules, self.param_groups = list(rules), param_groups

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        """The state of all tensors."""
        return {tensor: entry for rule in self.rules for tensor, entry in rule.state.items()}

    def step(self) -> None:
        """Update the tensors of all rules."""
        for rule in self.rules:
            rule.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each rule under its number."""
        return {str(number): rule.state_dict() for number, rule in enumerate(self.rules)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from `state_dict()`."""
        for number, rule in enumerate(self.rules):
            rule.load_state_dict(state_dict[str(number)])


def chunks_state(config: OptimizerConfig) -> bool:
    """Return whether state is visited chunk by chunk instead of lying in fp32 on the device."""
    return config.use_precision_aware_optimizer or config.offloads_optimizer


def build_torch_optimizer(
    config: OptimizerConfig, param_groups: list[dict[str, Any]], parts: ModelParts
) -> Any:
    """Return one rule, or `MultiOptimizer` where groups name different ones.

    Args:
        param_groups: a group's "optimizer" is its rule, `config.optimizer` without one. The
            groups of the result are these very dictionaries, in this order.
    Communication: that of `MuonRedistribute` if the rule of any group is Muon.
    """
    names = [group.get("optimizer", config.optimizer) for group in param_groups]
    groups_of: dict[str, list[dict[str, Any]]] = {}
    for name, group in zip(names, param_groups, strict=True):
        groups_of.setdefault(name, []).append(group)
    rules = {
        name: _build(UPDATE_RULES[name], config, groups, parts)
        for name, groups in groups_of.items()
    }
    if len(rules) == 1:
        return rules[names[0]]
    remaining = {name: iter(rule.param_groups) for name, rule in rules.items()}
    return MultiOptimizer(list(rules.values()), [next(remaining[name]) for name in names])


def _build(
    rule: UpdateRule, config: OptimizerConfig, param_groups: list[dict[str, Any]], parts: ModelParts
) -> Any:
    """Return the optimizer of one rule: on chunks of state, its own, or the one of all rules."""
    if chunks_state(config):
        mine = {id(tensor) for group in param_groups for tensor in group["params"]}
        shards = [item for item in parts.shards if id(item.main_param) in mine]
        return build_chunked_state_optimizer(rule.elementwise(config), config, param_groups, shards)
    if rule.build is not None:
        return rule.build(config, param_groups, parts)
    return ElementwiseOptimizer(
        param_groups,
        rule.elementwise(config),
        lr=config.lr or 0.0,
        weight_decay=config.weight_decay,
    )
