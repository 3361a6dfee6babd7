"""Groups of parameters that share a learning rate and a weight decay."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import torch.distributed as dist
from torch import nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.muon import is_muon_matrix
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parameters.param_meta import get_param_meta
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transport.object_collectives import all_gather_object


class ParamGroupOverride(TypedDict, total=False):
    """Settings that a rule may change for the parameters that it matches."""

    max_lr: float
    min_lr: float
    lr_mult: float
    start_wd: float
    end_wd: float
    wd_mult: float
    optimizer: str


@dataclass(frozen=True)
class ParamKey:
    """Matches parameters by name, attribute or any test; all given conditions must hold."""

    name: str | tuple[str, ...] = ()
    """Shell patterns on the parameter's name, such as "*.mlp.*.weight"; one must match."""
    attr: str | tuple[str, ...] = ()
    """Attributes of the parameter; one must be true."""
    predicate: Callable[[str, nn.Parameter], bool] | None = None
    """Called with name and parameter."""

    def matches(self, name: str, parameter: nn.Parameter) -> bool:
        """Return whether the rule applies to a parameter."""
        patterns, attributes = _as_tuple(self.name), _as_tuple(self.attr)
        if patterns and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return False
        if attributes and not any(getattr(parameter, a, False) for a in attributes):
            return False
        return self.predicate is None or self.predicate(name, parameter)


def parse_rule(text: str) -> tuple[ParamKey, ParamGroupOverride]:
    """Read PATTERN:NAME=VALUE,NAME=VALUE,...

    Raises:
        ConfigError: the text is not a rule.
    """
    pattern, _, settings = text.rpartition(":")
    known = ParamGroupOverride.__annotations__
    values: dict[str, Any] = {}
    for item in settings.split(","):
        name, _, value = item.partition("=")
        try:
            values[name.strip()] = value if name.strip() == "optimizer" else float(value)
        except ValueError:
            values[name.strip()] = None
    bad = [n for n, v in values.items() if n not in known or v is None]
    bad += [v for n, v in values.items() if n == "optimizer" and v not in OPTIMIZERS]
    if bad or not pattern:
        raise ConfigError(
            f"--param-rules {text!r}: " + (f"{bad[0]!r}" if bad else "no pattern") + ".",
            rule=f"a rule is PATTERN:NAME=VALUE,... with names {', '.join(known)}; optimizers"
            f" are {', '.join(OPTIMIZERS)}",
            flags=["--param-rules"],
            fix='write for example "*.mlp.*.weight:lr_mult=0.5,wd_mult=0"',
        )
    override: Any = values
    return ParamKey(name=pattern), override


Overrides = Mapping[ParamKey, ParamGroupOverride]
GroupKey = tuple[tuple[str, Any], ...]
"""The common settings of the parameters of a group, sorted by name."""


def has_no_weight_decay(name: str, parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    """Return whether decay would be pointless: biases, norm weights and other 1-d parameters."""
    if config.apply_wd_to_qk_layernorm and ("q_layernorm." in name or "k_layernorm." in name):
        return False
    return name.endswith(".bias") or parameter.dim() <= 1


def optimizer_name_of(key: GroupKey, config: OptimizerConfig) -> str:
    """Return the name of the optimizer of a group."""
    return str(dict(key).get("optimizer", config.optimizer))


def group_key(
    name: str,
    parameter: nn.Parameter,
    config: OptimizerConfig,
    overrides: Overrides | None,
    *,
    is_table: bool = False,
    width_multiplier: float | None = None,
) -> GroupKey:
    """Return the settings of one parameter.

    Args:
        width_multiplier: width / base width of the model under muP, whose factor multiplies the
            learning rate of `overrides`; None without muP.
        is_table: the parameter is a lookup table, which Muon does not treat as a matrix.
    """
    meta = get_param_meta(parameter)
    is_decoupled = config.decoupled_lr is not None and meta.is_embedding_or_output
    settings: dict[str, Any] = {
        "wd_mult": 0.0 if has_no_weight_decay(name, parameter, config) else 1.0,
        "lr_mult": 1.0,
        "max_lr": config.decoupled_lr if is_decoupled else config.lr,
        "min_lr": config.min_lr,
        "is_decoupled_lr": is_decoupled,
        "is_expert_parallel": meta.is_expert,
    }
    if is_decoupled and config.decoupled_min_lr is not None:
        settings["min_lr"] = config.decoupled_min_lr
    if config.optimizer == "muon" and (is_table or not is_muon_matrix(parameter)):
        settings["optimizer"] = config.muon_scalar_optimizer
    for key, override in (overrides or {}).items():
        if key.matches(name, parameter):
            settings.update(override)
    optimizer = settings.get("optimizer", config.optimizer)
    _check_optimizer(name, parameter, optimizer)
    if width_multiplier is not None:
        settings["lr_mult"] *= width_learning_rate_factor(
            parameter, optimizer, config, width_multiplier, is_table=is_table
        )
    return tuple(sorted(settings.items()))


def width_learning_rate_factor(
    parameter: nn.Parameter,
    optimizer: str,
    config: OptimizerConfig,
    width_multiplier: float,
    *,
    is_table: bool = False,
) -> float:
    """Return the factor of muP on the learning rate of a parameter.

    G. Yang et al., "Tensor Programs V", table 8, arXiv 2203.03466: rows "SGD LR" and "Adam LR",
    relative to a base width. Lion changes every element by the same amount, like Adam. A Muon
    update of spectral scale has elements of unit size, like Adam's; the other scales already follow
    the shape of a matrix as muP requires (J. Bernstein, "Deriving Muon").

    Args:
        optimizer: name of the optimizer that updates the parameter.
        width_multiplier: width / base width of the model.
        is_table: the parameter is a lookup table.
    """
    # One side of embedding, head, norms and biases grows with the width; both sides of a hidden
    # weight do.
    is_hidden = (
        parameter.dim() >= 2
        and not is_table
        and not get_param_meta(parameter).is_embedding_or_output
    )
    if optimizer == "sgd":
        return 1.0 if is_hidden else width_multiplier
    if optimizer == "muon" and config.muon_scale_mode != "spectral":
        return 1.0
    return 1.0 / width_multiplier if is_hidden else 1.0


def _check_optimizer(name: str, parameter: nn.Parameter, optimizer: str) -> None:
    if optimizer not in OPTIMIZERS:
        found = f"the optimizer {optimizer!r} for parameter {name}"
        fix = f"use one of {', '.join(OPTIMIZERS)}"
    elif optimizer == "muon" and parameter.dim() != 2:
        found = f"Muon for parameter {name} of shape {tuple(parameter.shape)}"
        fix = 'give it {"optimizer": "adam"}'
    else:
        return
    raise ConfigError(
        f"config_overrides set {found}.",
        rule="Muon updates matrices; every other optimizer updates anything",
        flags=["--optimizer"],
        fix=fix,
    )


def build_param_groups(
    members: Sequence[tuple[nn.Parameter, GroupKey]],
    all_keys: Sequence[GroupKey],
    config: OptimizerConfig,
) -> list[dict[str, Any]]:
    """Return torch parameter groups, one for each of `all_keys`, empty ones included.

    Args:
        members: tensors that this rank updates, with the settings of their parameters.
    """
    groups: list[dict[str, Any]] = []
    for key in all_keys:
        settings = dict(key)
        # Settings that are None are left out: the scheduler's own value applies.
        group = {name: value for name, value in settings.items() if value is not None}
        group["params"] = [tensor for tensor, its_key in members if its_key == key]
        group["lr"] = (settings["max_lr"] or 0.0) * settings["lr_mult"]
        group["weight_decay"] = config.weight_decay * settings["wd_mult"]
        groups.append(group)
    return groups


def agree_on_keys(keys: set[GroupKey], groups: ProcessGroupCollection) -> list[GroupKey]:
    """Return the union of the keys of all model-parallel ranks, in one order.

    Every rank then has the same groups, with the same schedule and checkpoint, although some groups
    may have no parameter on a pipeline stage.

    Communication: one all-gather of small Python objects over `mp`.
    """
    union = set(keys)
    if groups.mp.size() > 1 and isinstance(groups.mp, dist.ProcessGroup):
        union = set().union(*all_gather_object(keys, groups.mp))
    return sorted(union, key=repr, reverse=True)


def _as_tuple(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value
