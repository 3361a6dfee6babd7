"""`deepspeed.zero`: contexts for sharded parameters, and access to unsharded values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from megatron.core.distributed.communication import broadcast_from_first
from megatron.core.distributed.parameter_shard import ParameterShard
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.optimizer.state_declarations import initialize_state
from megatron.core.parameters.initialization import has_memory
from megatron.core.transport import torch_collectives

if TYPE_CHECKING:
    from megatron_lattice.deepspeed.engine import DeepSpeedEngine


@contextmanager
def Init(*unused: object, **settings: object) -> Iterator[None]:
    """Build a model inside the block, in the memory of this process, as without the context.

    `initialize` shards the model layer by layer and frees the rest. Models of this library can be
    built without memory: `megatron.core.parameters.initialization.parameters_without_memory`.
    """
    rule = "parameters are built in the dtype of the model"
    refuse_given("zero.Init", {"dtype": settings.get("dtype")}, rule=rule, fix="model.to(dtype)")
    yield


@contextmanager
def GatheredParameters(
    params: Tensor | Iterable[Tensor],
    modifier_rank: int | None = None,
    fwd_module: object = None,
    enabled: bool = True,
) -> Iterator[None]:
    """Gather the parameters on every rank inside the block: collective.

    Args:
        params: parameters of one engine, or of no engine yet.
        modifier_rank: at the end, this rank's values are copied to all ranks, shards and main
            weights. None: changes to sharded parameters are discarded.
    """
    members = [params] if isinstance(params, Tensor) else list(params)
    engine = engine_of(members[0]) if members and enabled else None
    if engine is None:
        yield
        return
    with engine.replica.summon_full_params():
        yield
        if modifier_rank is None:
            return
        written = {}
        for parameter in members:
            value = parameter.detach().clone()
            written[parameter] = torch_collectives.broadcast(
                value, torch_collectives.world(), modifier_rank
            )
    for parameter, value in written.items():
        _put(engine, parameter, value)


def engine_of(parameter: object) -> DeepSpeedEngine | None:
    """Return the engine that trains a parameter, or None."""
    reference = getattr(parameter, "deepspeed_engine", None)
    return None if reference is None else reference()


@torch.no_grad()
def _put(engine: DeepSpeedEngine, parameter: Tensor, value: Tensor) -> None:
    """Set a parameter's values in its shards and in the main weights."""
    pieces = engine.replica.shards_of(parameter)
    if has_memory(parameter):
        parameter.copy_(value)
    for piece in pieces:
        piece.values.copy_(_piece(value, piece))
    for piece, main in _mains(engine, parameter):
        main.copy_(_piece(value, piece))


def _piece(value: Tensor, piece: ParameterShard) -> Tensor:
    return value.reshape(-1)[piece.begin : piece.end].view(piece.values.shape)


def _mains(engine: DeepSpeedEngine, parameter: Tensor) -> list[tuple[ParameterShard, Tensor]]:
    optimizer = engine.optimizer
    items = optimizer.shards if optimizer is not None else []
    return [
        (item.shard, item.main_param.detach())
        for item in items
        if item.shard.parameter is parameter
    ]


# Whole values ---------------------------------------------------------------------------------


def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return the unsharded main weight in fp32: collective."""
    engine = engine_of(param)
    if engine is None:
        return None
    return _whole(engine, param, [(s, main.float()) for s, main in _mains(engine, param)])


def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the unsharded reduced gradient, between `backward` and `step`: collective."""
    engine = engine_of(param)
    if engine is None:
        return None
    engine.replica.finish_grad_sync()
    found = [(s, s.reduced_gradient()) for s in engine.replica.shards_of(param)]
    return _whole(engine, param, [(s, g.float()) for s, g in found if g is not None])


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return an unsharded moment, such as "exp_avg": collective."""
    engine = engine_of(param)
    if engine is None or engine.optimizer is None:
        return None
    initialize_state(engine.optimizer.optimizer)
    state = engine.optimizer.state
    pieces = [
        (item.shard, state[item.main_param][optim_state_key].float())
        for item in engine.optimizer.shards
        if item.shard.parameter is param
    ]
    return _whole(engine, param, pieces)


def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Set a weight in the model and in the main weights; `value` must be equal on all ranks."""
    engine = engine_of(param)
    if engine is None:
        raise ConfigError(
            "safe_set_full_fp32_param of a parameter without an engine.",
            rule="deepspeed.initialize creates the engine of a parameter",
            fix="copy into the parameter",
        )
    _put(engine, param, value)


def _whole(
    engine: DeepSpeedEngine, parameter: Tensor, pieces: list[tuple[ParameterShard, Tensor]]
) -> Tensor:
    """Join the pieces of all ranks."""
    mesh = engine.replica.mesh()
    full = torch.zeros(parameter.numel(), device=parameter.device)
    for piece, value in pieces:
        full[piece.begin : piece.end] = value.reshape(-1)
    torch_collectives.all_reduce(full, mesh.shard)
    broadcast_from_first([(full, mesh.replicate)])
    return full.view(parameter.shape)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: object) -> list[nn.Module]:
    """Do nothing: whole layers are gathered, with any routing inside."""
    return []
