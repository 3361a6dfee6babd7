"""`deepspeed.initialize`: check the settings, wrap the module, build its optimizer and schedule."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.communication import broadcast_from_first
from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection, build_process_groups
from megatron.core.topology.rank_grid import plan_layout
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import raise_on_all_ranks
from megatron_lattice.deepspeed import lr_schedules
from megatron_lattice.deepspeed.advice import advises_callers_of_an_engine
from megatron_lattice.deepspeed.comm import get_rank, get_world_size, init_distributed
from megatron_lattice.deepspeed.engine import DeepSpeedEngine, ReplicaLoader
from megatron_lattice.deepspeed.optimizers import (
    OptimizerSource,
    ParamGroups,
    build_optimizer,
    check_client,
    groups_of,
)
from megatron_lattice.deepspeed.reading import ConfigSource
from megatron_lattice.deepspeed.settings import (
    EngineSettings,
    data_parallel_config,
    engine_settings,
)

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
    pg_collection = _process_groups(settings.num_instances)
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


def _process_groups(num_instances: int) -> ProcessGroupCollection:
    """Return the process groups of the replicas."""
    if get_world_size() == 1:
        return ProcessGroupCollection.single()
    layout = plan_layout(get_world_size())
    return build_process_groups(layout, num_distributed_optimizer_instances=num_instances)


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
