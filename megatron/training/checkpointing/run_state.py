"""The state dict of a run: weights, optimizer, schedule, random state, counters.

Everything except `args` and `layout` is independent of the layout: weights and optimizer state have
global names, and the other values are equal on all ranks. The keys `model0`, `model1` of pipeline
chunks exist in memory only.
"""

from __future__ import annotations

import dataclasses
import random
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from megatron.core.dist_checkpointing import typed_json
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict
from megatron.core.foundation import device
from megatron.core.foundation.errors import CheckpointError
from megatron.core.optimizer.state_declarations import settings_of_groups
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.resumed_schedule import SCHEDULED_IN_GROUPS
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.low_rank_adapter import is_of_adapter
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.training.run.state import TrainState

CHECKPOINT_VERSION = 4.0
"""Version of this state dict; Megatron-LM's versions end at 3.0."""

_SCHEDULED = {*SCHEDULED_IN_GROUPS, "lr", "weight_decay"}
"""Settings of parameter groups that belong to the schedule."""

_PER_RANK_ARGS = {"rank", "local_rank", "world_size"}


@dataclasses.dataclass
class CheckpointContext:
    """The parts of a run to save; a part that does not exist is None."""

    model: Sequence[nn.Module]
    """This rank's chunks, wrapped or not."""
    optimizer: Any = None
    scheduler: Any = None
    """An `OptimizerParamScheduler`."""
    groups: ProcessGroupCollection = dataclasses.field(
        default_factory=ProcessGroupCollection.current
    )
    weights: str = "all"
    """The weights to save: "all", only the "adapters", or only the "base" without adapters."""
    args: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """All settings by name, for readers, `--use-checkpoint-args` and comparisons."""


def model_key(index: int, num_chunks: int) -> str:
    """Return the key of a chunk in the state dict: model, or model0, model1, ..."""
    return "model" if num_chunks == 1 else f"model{index}"


def declare_run(
    context: CheckpointContext,
    *,
    with_optimizer: bool,
    with_rng: bool,
    is_loading: bool = False,
) -> ShardedStateDict:
    """Declare selected weights, and optionally optimizer state and generator states."""
    state: ShardedStateDict = {}
    for index, chunk in enumerate(context.model):
        declared = sharded_state_dict_of(chunk, pg_collection=context.groups)
        if context.weights != "all":
            wants_adapters = context.weights == "adapters"
            declared = {k: v for k, v in declared.items() if is_of_adapter(k) == wants_adapters}
        state[model_key(index, len(context.model))] = declared
    if with_optimizer and context.optimizer is not None:
        state["optimizer"] = context.optimizer.sharded_state_dict(state, is_loading=is_loading)
    if with_rng:
        state["generators"] = declare_generators(context.groups)
    return state


def plain_run_state(
    context: CheckpointContext, train_state: TrainState, *, with_optimizer: bool, with_rng: bool
) -> dict[str, Any]:
    """Return the plain values to save: counters, schedule, seed, settings."""
    state: dict[str, Any] = {
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": train_state.iteration,
        "num_floating_point_operations_so_far": float(train_state.flops_so_far),
        "consumed_train_samples": train_state.consumed_train_samples,
        "consumed_valid_samples": train_state.consumed_valid_samples,
        "skipped_train_samples": train_state.skipped_train_samples,
        "data_order": train_state.data_order,
        "recent_values": dict(train_state.recent_values),
        "rolled_back": train_state.rolled_back,
        "args": plain_args(context.args),
    }
    if with_optimizer and context.scheduler is not None:
        state["opt_param_scheduler"] = context.scheduler.state_dict()
    if with_rng:
        state["rng_state"] = rng_state().state_dict()
    return state


def plain_args(args: Mapping[str, object]) -> Namespace:
    """Return the settings as a namespace of storable values; other values become text."""
    kept: dict[str, Any] = {}
    for name, value in args.items():
        if name in _PER_RANK_ARGS:
            continue
        try:
            typed_json.encode(value)
            kept[name] = value
        except CheckpointError:
            kept[name] = repr(value)
    return Namespace(**kept)


def train_state_of(state: Mapping[str, Any]) -> TrainState:
    """Return the counters of a loaded state."""
    return TrainState(
        iteration=int(state.get("iteration", 0)),
        consumed_train_samples=int(state.get("consumed_train_samples", 0)),
        consumed_valid_samples=int(state.get("consumed_valid_samples", 0)),
        skipped_train_samples=int(state.get("skipped_train_samples", 0)),
        flops_so_far=float(state.get("num_floating_point_operations_so_far", 0.0)),
        data_order=state.get("data_order"),
        recent_values={
            str(name): tuple(map(float, values))
            for name, values in state.get("recent_values", {}).items()
        },
        rolled_back=tuple((int(first), int(last)) for first, last in state.get("rolled_back", ())),
    )


def apply_model(context: CheckpointContext, state: Mapping[str, Any], *, strict: bool) -> None:
    """Load the weights into the chunks.

    Loading has already filled declared tensors, which are the parameters themselves. Modules that
    store another form receive it in `load_state_dict`.
    """
    for index, chunk in enumerate(context.model):
        loaded = state[model_key(index, len(context.model))]
        chunk.load_state_dict(loaded, strict=strict and context.weights == "all")


def apply_optimizer(
    context: CheckpointContext, state: Mapping[str, object], *, was_loaded: bool
) -> None:
    """Load the state of optimizer and schedule, or initialize main weights from loaded weights."""
    if context.optimizer is None:
        return
    if was_loaded:
        own = settings_of_groups(context.optimizer.param_groups)
        context.optimizer.load_state_dict(state["optimizer"])
        # Constants of the optimizer (betas, eps, momentum) stay this run's.
        for group, settings in zip(context.optimizer.param_groups, own, strict=True):
            group.update({n: v for n, v in settings.items() if n not in _SCHEDULED})
        if context.scheduler is not None and "opt_param_scheduler" in state:
            context.scheduler.load_state_dict(state["opt_param_scheduler"], own)
    elif hasattr(context.optimizer, "reload_model_params"):
        # Main weights are copies of the random initial weights and must follow the loaded ones.
        context.optimizer.reload_model_params()


def apply_rng(state: Mapping[str, Any]) -> None:
    """Restore the seed and, if the layout is unchanged, the generators of this rank."""
    try:
        if "rng_state" in state:
            rng_state().load_state_dict(state["rng_state"])
        if "generators" in state:
            restore_generators(state["generators"])
    except (TypeError, ValueError, KeyError, AttributeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(
            f"the random state of the checkpoint cannot be used: {type(error).__name__}: {error}.",
            rule="it contains the states of a run's generators",
            flags=["--no-load-rng"],
            fix="load another checkpoint, or add --no-load-rng to continue with --seed",
        ) from error


def describe_layout(context: CheckpointContext) -> dict[str, Any]:
    """Return the sizes of all axes, and the vocabulary size without padding."""
    groups = context.groups
    layout = {
        axis: getattr(groups, axis).size() for axis in ("tp", "pp", "cp", "dp", "ep", "expt_tp")
    }
    layout["vp"] = len(context.model)
    vocabulary = context.args.get("unpadded_vocab_size")
    if isinstance(vocabulary, int):
        layout["unpadded_vocab_size"] = vocabulary
    return layout


def show_layout(layout: Mapping[str, object]) -> str:
    """Return a layout as text: tp=2 pp=2 dp=1, and other axes if their size is not 1."""
    always = ("tp", "pp", "dp")
    others = [axis for axis in ("vp", "cp", "ep") if layout.get(axis, 1) != 1]
    return " ".join(f"{axis}={layout.get(axis, 1)}" for axis in (*always, *others))


# Generators of random numbers ---------------------------------------------------------------
#
# Our own random numbers depend on the seed only. A custom module may use the generators of torch,
# numpy, Python or the tensor-parallel tracker. Each rank has its own states, so they are restored
# only if the layout is unchanged.


def declare_generators(groups: ProcessGroupCollection) -> ShardedObject:
    """Declare this rank's generator states in the grid of (pipeline, tensor) ranks.

    Data-parallel replicas are assumed to have equal states, as in Megatron.
    """
    return ShardedObject(
        "generators",
        generator_states(),
        global_shape=(groups.pp.size(), groups.tp.size()),
        global_offset=(groups.pp.rank(), groups.tp.rank()),
        replica_id=groups.dp_cp.rank(),
    )


def generator_states() -> dict[str, Any]:
    """Return the states of all generators of this process."""
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }
    if device.device_type() != "cpu":
        states["device"] = torch.get_device_module(device.device_type()).get_rng_state()
    return states


def restore_generators(states: dict[str, Any]) -> None:
    """Set all generators of this process."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(states["tracker"])
    if "device" in states and device.device_type() != "cpu":
        torch.get_device_module(device.device_type()).set_rng_state(states["device"])
