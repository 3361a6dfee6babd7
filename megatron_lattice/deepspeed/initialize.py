"""`deepspeed.initialize`: check the settings, wrap the module, build its optimizer and schedule."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.communication import broadcast_from_first
from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.factory import assemble_optimizer, build_torch_optimizer
from megatron.core.optimizer.muon import is_muon_matrix
from megatron.core.process_groups_config import ProcessGroupCollection, build_process_groups
from megatron.core.topology.rank_grid import plan_layout
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import raise_on_all_ranks
from megatron_lattice.deepspeed import lr_schedules
from megatron_lattice.deepspeed.advice import advises_callers_of_an_engine
from megatron_lattice.deepspeed.comm import get_rank, get_world_size, init_distributed
from megatron_lattice.deepspeed.components import OPTIMIZERS
from megatron_lattice.deepspeed.engine import DeepSpeedEngine, ReplicaLoader
from megatron_lattice.deepspeed.reading import ConfigSource
from megatron_lattice.deepspeed.settings import (
    EngineSettings,
    data_parallel_config,
    engine_settings,
    optimizer_config,
)

ELEMENTWISE = (
    "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "RAdam", "RMSprop", "Rprop", "SGD",
)  # fmt: skip
"""Optimizers of torch that update each element independently, with state in the weights' shape:
they can update pieces of flattened weights."""

ParamGroups = list[dict[str, Any]]
OptimizerSource = torch.optim.Optimizer | Callable[[ParamGroups], torch.optim.Optimizer] | None
EngineParts = tuple[DeepSpeedEngine, MegatronOptimizer | None, "ReplicaLoader | None", "Any | None"]


@advises_callers_of_an_engine
def initialize(
    args: object = None,
    model: nn.Module | None = None,
    optimizer: OptimizerSource = None,
    model_parameters: Iterable[object] | None = None,
    training_data: Dataset[object] | None = None,
    lr_scheduler: object = None,
    distributed_port: int = 29500,
    mpu: object = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., object] | None = None,
    config: ConfigSource | None = None,
    mesh_param: object = None,
    config_params: ConfigSource | None = None,
) -> EngineParts:
    """Return (engine, optimizer, dataloader, scheduler); a part that was not requested is None.

    The module is moved to the device and cast to the dtype of the configuration. The first
    process's weights are broadcast to all ranks. At stage 3, outside forward and backward,
    parameters keep their shapes but contain NaN: see `deepspeed.zero.GatheredParameters`.

    Args:
        args: a namespace; its `deepspeed_config` names the configuration, unless `config` does.
        model: any module. At stage 3, the children of its `nn.ModuleList`s and `nn.Sequential`s are
            the units that are gathered.
        optimizer: an optimizer of torch, or a function from parameter groups to one; it overrides
            the file. Its group dictionaries are kept, so that a schedule on them still works.
        model_parameters: parameters to train; others are frozen. None trains all parameters.
        lr_scheduler: an object, or a function from an optimizer to one; it overrides the file.
        mpu, mesh_param: refused; `megatron.core.models` has modules that are split.
    Raises:
        ConfigError: on all ranks, with all problems of the configuration.
    """
    if model is None:
        raise ConfigError("initialize() without a model.", rule="an engine runs a module")
    if mpu is not None or mesh_param is not None:
        raise ConfigError(
            "initialize(mpu=...) or initialize(mesh_param=...).",
            rule="every process holds a replica of a plain module",
            fix="use pretrain_gpt.py --deepspeed for tensor, pipeline and context parallelism",
        )
    source = _source(args, config if config is not None else config_params)
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    settings, client, groups = _checked(source, model, optimizer, model_parameters)
    if get_rank() == 0:
        print(settings.describe(), flush=True)
    pg_collection = ProcessGroupCollection.single()
    if get_world_size() > 1:
        pg_collection = build_process_groups(
            plan_layout(get_world_size()),
            num_distributed_optimizer_instances=settings.num_instances,
        )
    _prepare_module(model, settings, groups, client, pg_collection)
    replica = DistributedDataParallel(
        None if settings["gradient_allreduce_op"] == "mean" else _SumOverReplicas,
        data_parallel_config(settings),
        model,
        pg_collection=pg_collection,
    )
    engine = DeepSpeedEngine(model, replica, settings, pg_collection)
    for destination in engine.monitor.destinations:
        print(f"scalars are written to {destination}", flush=True)
    if client is not None or settings.read.sections.get("optimizer"):
        engine.optimizer = build_optimizer(replica, settings, client, groups, pg_collection)
    engine.lr_scheduler = _schedule(engine, settings, lr_scheduler)
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


class _SumOverReplicas:
    """Model config that `DistributedDataParallel` reads: gradients are not averaged."""

    calculate_per_token_loss = True


def _source(args: Any, config: ConfigSource | None) -> ConfigSource:
    named = getattr(args, "deepspeed_config", None)
    if config is not None and named is not None:
        raise ConfigError(
            f"initialize(config=...) and --deepspeed_config {named}.",
            rule="an engine has one configuration",
            flags=["--deepspeed_config"],
            fix="drop one of the two",
        )
    if config is None and named is None:
        raise ConfigError(
            "initialize() without a configuration.",
            rule="the configuration sets batch sizes, precision and stage",
            flags=["--deepspeed_config"],
            fix='pass config={"train_micro_batch_size_per_gpu": 1, ...}',
        )
    return config if config is not None else named  # type: ignore[return-value]


def _checked(
    source: ConfigSource,
    model: nn.Module,
    optimizer: OptimizerSource,
    model_parameters: Iterable[Any] | None,
) -> tuple[EngineSettings, torch.optim.Optimizer | None, ParamGroups]:
    """Read and check all inputs, and raise problems on all ranks."""
    problem: MegatronError | None = None
    found = None
    try:
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        model_dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        settings = engine_settings(source, replicas=get_world_size(), model_dtype=model_dtype)
        client = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        groups = groups_of(model, model_parameters if client is None else client.param_groups)
        if optimizer is not None and client is None:
            client = optimizer(groups)  # type: ignore[operator]
        if client is not None:
            check_client(client, settings)
        found = settings, client, groups
    except MegatronError as error:
        problem = error
    if dist.is_initialized():
        raise_on_all_ranks(problem, torch_collectives.world())
    elif problem is not None:
        raise problem
    assert found is not None
    return found


def _prepare_module(
    model: nn.Module,
    settings: EngineSettings,
    groups: ParamGroups,
    client: torch.optim.Optimizer | None,
    pg_collection: ProcessGroupCollection,
) -> None:
    """Move and cast the module, freeze untrained parameters, broadcast from the first process."""
    model.to(device.current_device())
    if settings.dtype != torch.float32:
        model.to(settings.dtype)
    trained = {id(p) for group in groups for p in group["params"]}
    if client is not None or settings.read.sections.get("optimizer"):
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and id(parameter) not in trained:
                warnings.warn(f"{name} is in no group of the optimizer: it is frozen", stacklevel=3)
                parameter.requires_grad_(False)
    state: dict[str, Any] = model.state_dict(keep_vars=True)
    values = {id(v): v.detach() for v in state.values() if isinstance(v, Tensor)}
    broadcast_from_first([(value, pg_collection.dp_cp) for value in values.values()])


def _schedule(engine: DeepSpeedEngine, settings: EngineSettings, given: Any) -> Any:
    section = settings.read.sections.get("scheduler")
    optimizer = engine.optimizer
    if given is not None and not callable(given):
        return given
    if optimizer is None:
        return None
    if given is not None:
        # torch's schedules require an optimizer of torch.
        rule = optimizer.optimizer
        return given(rule if isinstance(rule, torch.optim.Optimizer) else optimizer)
    if section is None:
        return None
    return lr_schedules.BY_NAME[section["type"]](optimizer, **section["params"])


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add --deepspeed and --deepspeed_config, and return the parser."""
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="train with an engine")
    group.add_argument("--deepspeed_config", type=str, default=None, help="JSON file of settings")
    return parser


# The optimizer, on shards: named by the file, or the caller's own ---------------------------------


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
    is_adam = isinstance(client, (torch.optim.Adam, torch.optim.AdamW))
    is_known = kind.__name__ in ELEMENTWISE and kind.__module__.startswith("torch.optim")
    is_known = is_known or is_adam
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
    is_plain = is_adam and not any(group.get("amsgrad") for group in client.param_groups)
    if optimizer_config(settings).offloads_optimizer and not is_plain:
        raise ConfigError(
            f"the optimizer {kind.__name__} with offloaded state.",
            rule="only optimizers of this library update offloaded state piece by piece, in place",
            flags=["zero_optimization.offload_optimizer.device"],
            fix="use torch.optim.AdamW, or name an optimizer in the configuration",
        )


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
