"""The optimizer of an engine, on shards: named by the file, or the caller's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.foundation.errors import ConfigError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.factory import assemble_optimizer, build_torch_optimizer
from megatron.core.optimizer.muon import is_muon_matrix
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_lattice.deepspeed.components import OPTIMIZERS
from megatron_lattice.deepspeed.settings import EngineSettings, optimizer_config

ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Optimizers of torch that update each element independently, with state in the weights' shape:
they can update pieces of flattened weights."""

ParamGroups = list[dict[str, Any]]
OptimizerSource = torch.optim.Optimizer | Callable[[ParamGroups], torch.optim.Optimizer] | None


def groups_of(model: nn.Module, model_parameters: Iterable[Any] | None) -> ParamGroups:
    """Return groups with lists of trainable parameters, from an argument of `initialize`.

    Args:
        model_parameters: parameters, (name, parameter) pairs, or groups as in torch; None is all.
    """
    given = list(model.parameters() if model_parameters is None else model_parameters)
    if not given or not isinstance(given[0], Mapping):
        given = [{"params": given}]
    groups = []
    for group in given:
        members = group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        plain = [each[1] if isinstance(each, tuple) else each for each in members]
        groups.append({**group, "params": [p for p in plain if p.requires_grad]})
    return groups


def check_client(client: torch.optim.Optimizer, settings: EngineSettings) -> None:
    """Refuse an optimizer of the caller that cannot update shards or offloaded state.

    Raises:
        ConfigError: names the stage and the key.
    """
    kind = type(client)
    is_known = kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim")
    is_known = is_known or isinstance(client, (torch.optim.Adam, torch.optim.AdamW))
    if settings.stage > 0 and not is_known and not settings["zero_allow_untested_optimizer"]:
        raise ConfigError(
            f"the optimizer {kind.__module__}.{kind.__name__} at ZeRO stage {settings.stage}.",
            rule="a rank updates pieces of flattened weights, so the optimizer must update every"
            f" element independently, as these do: {', '.join(ELEMENTWISE)}",
            flags=["zero_optimization.stage", "zero_allow_untested_optimizer"],
            fix="set zero_allow_untested_optimizer if it does, or use stage 0",
        )
    if isinstance(client, torch.optim.LBFGS):
        raise ConfigError(
            "the optimizer LBFGS.",
            rule="a step follows one backward pass; LBFGS needs several",
            flags=["optimizer"],
            fix="use AdamW",
        )
    if optimizer_config(settings).offloads_optimizer and not _is_adam(client):
        raise ConfigError(
            f"the optimizer {kind.__name__} with offloaded state.",
            rule="only optimizers of this library update offloaded state piece by piece, in place",
            flags=["zero_optimization.offload_optimizer.device"],
            fix="use torch.optim.AdamW, or name an optimizer in the configuration",
        )


def _is_adam(client: torch.optim.Optimizer) -> bool:
    if not isinstance(client, (torch.optim.Adam, torch.optim.AdamW)):
        return False
    return not any(group.get("amsgrad") for group in client.param_groups)


def build_optimizer(
    replica: DistributedDataParallel,
    settings: EngineSettings,
    client: torch.optim.Optimizer | None,
    groups: ParamGroups,
    pg_collection: ProcessGroupCollection,
) -> MegatronOptimizer:
    """Build the optimizer over the pieces of parameters that this rank owns.

    Args:
        client: the caller's optimizer; its groups get the pieces in place of the parameters.
        groups: parameters and their own settings, if the file names the optimizer.
    """
    config = optimizer_config(settings)
    if client is not None and config.offloads_optimizer:
        groups = client.param_groups
        first = groups[0]
        config.decoupled_weight_decay = isinstance(client, torch.optim.AdamW) or bool(
            first.get("decoupled_weight_decay")
        )
        (config.adam_beta1, config.adam_beta2), config.adam_eps = first["betas"], first["eps"]
        config.lr, client = first["lr"], None

    def make_torch_optimizer(shards: list[MainParamShard]) -> Any:
        if client is not None:
            return _on_shards(client, shards)
        section = settings.read.sections.get("optimizer")
        if section is not None and section["type"].lower() not in OPTIMIZERS:
            kind = getattr(torch.optim, section["type"])
            made = kind(groups, **section["params"])
            check_client(made, settings)
            return _on_shards(made, shards)
        ours, matrices = _named_groups(config.optimizer, config, settings, groups, replica)
        for group in ours:
            group["params"] = _mains(group["params"], shards)
        return build_torch_optimizer(config, ours, shards, matrices, [replica], pg_collection)

    return assemble_optimizer(config, [replica], pg_collection, make_torch_optimizer)


def _named_groups(
    rule: str,
    config: Any,
    settings: EngineSettings,
    groups: ParamGroups,
    replica: DistributedDataParallel,
) -> tuple[ParamGroups, list[nn.Parameter]]:
    """Apply the file's settings to groups; for Muon, split them into matrices and the rest."""
    ours: ParamGroups = []
    for group in groups:
        group.setdefault("lr", config.lr)
        group.setdefault("weight_decay", config.weight_decay)
        ours.append(group)
    if rule != "muon":
        return ours, []
    tables = {
        id(p)
        for module in replica.module.modules()
        if isinstance(module, nn.Embedding)
        for p in module.parameters()
    }
    params = settings.read.sections["optimizer"]["params"]
    split: ParamGroups = []
    for group in ours:
        hidden = [p for p in group["params"] if is_muon_matrix(p) and id(p) not in tables]
        chosen = {id(p) for p in hidden}
        rest = [p for p in group["params"] if id(p) not in chosen]
        split.append({**group, "params": hidden, "lr": params.get("muon_lr") or group["lr"]})
        split.append(
            {**group, "params": rest, "lr": params.get("adam_lr") or group["lr"],
             "optimizer": "adam"}
        )  # fmt: skip
    return split, [p for group in split[::2] for p in group["params"]]


def _mains(parameters: Sequence[nn.Parameter], shards: Sequence[MainParamShard]) -> list[Tensor]:
    """Return the main tensors of the pieces of some parameters that this rank owns."""
    wanted = {id(p): number for number, p in enumerate(parameters)}
    mine = [item for item in shards if id(item.shard.parameter) in wanted]
    mine.sort(key=lambda item: (wanted[id(item.shard.parameter)], item.shard.begin))
    return [item.main_param for item in mine]


def _on_shards(
    client: torch.optim.Optimizer, shards: Sequence[MainParamShard]
) -> torch.optim.Optimizer:
    """Replace an optimizer's parameters by their pieces, together with any state they have."""
    state: dict[Tensor, Any] = dict(client.state)
    client.state.clear()
    for group in client.param_groups:
        group["params"] = _mains(group["params"], shards)
    for item in shards:
        entry = state.get(item.shard.parameter)
        if entry:
            client.state[item.main_param] = {
                name: _piece(value, item) for name, value in entry.items()
            }
    return client


def _piece(value: Any, item: MainParamShard) -> Any:
    parameter, shard = item.shard.parameter, item.shard
    if isinstance(value, Tensor) and value.numel() == parameter.numel() and value.dim():
        flat = value.detach().reshape(-1)[shard.begin : shard.end]
        return flat.clone().view(item.main_param.shape).to(item.main_param.dtype)
    return value
