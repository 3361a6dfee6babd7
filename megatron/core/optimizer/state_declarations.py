"""Optimizer state in checkpoints: by parameter, in the parameter's own sharding.

A moment has the shape of its parameter, so its declaration is the parameter's declaration with
another key. A rank that owns only a range of a parameter (ZeRO) declares that range;
`dist_checkpointing` computes the boxes of the full tensor that the range covers. Nothing is
gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.parameter_shards import make_sharded_optimizer_tensor
from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.foundation.errors import CheckpointError
from megatron.core.optimizer.chunked_state_optimizer import ChunkedStateOptimizer, streamed_params

Declaration = ShardedTensor | ShardedTensorFactory

NOT_STORED_IN_GROUPS = ("params", "foreach", "fused", "capturable", "differentiable", "maximize")
"""Settings of a group that choose kernels, not results."""


def declare_state(
    optimizer: Any,
    shards: Sequence[MainParamShard],
    model_sharded_state_dict: Mapping[str, object],
    *,
    num_updates: int,
) -> dict[str, Any]:
    """Return {number of the shard: {name of the state: declaration}} and the step count.

    Args:
        num_updates: the step count. Rank 0 stores it, even if it owns no shard.
    """
    initialize_state(optimizer)
    state_of = optimizer.state
    of_parameter = {id(d.data): d for d in _declarations(model_sharded_state_dict)}
    by_address = {d.data.data_ptr(): d for d in of_parameter.values() if d.data is not None}
    declared: dict[str, Any] = {"step": num_updates}
    for number, item in enumerate(shards):
        parameter = item.shard.parameter
        # If parameters are sharded, the model declares the shards.
        declaration = of_parameter.get(id(parameter)) or by_address.get(
            item.shard.values.data_ptr()
        )
        declaration = declaration or by_address.get(parameter.data_ptr())
        if declaration is None:
            raise CheckpointError(
                f"no declaration of parameter {item.shard.name} in the model's sharded state.",
                rule="optimizer state is stored under the key of its parameter",
                fix="let sharded_state_dict() of its module declare it, with the parameter as data",
            )
        tensors = _tensors(state_of, item)
        declared[str(number)] = {
            name: _declare(declaration, item, tensor, name) for name, tensor in tensors.items()
        }
    return declared


def load_declared_state(
    optimizer: Any, shards: Sequence[MainParamShard], state_dict: Mapping[str, Any]
) -> None:
    """Copy a loaded state (plain tensors in the place of declarations) into the optimizer."""
    initialize_state(optimizer)
    state = state_dict["state"]
    state_of = optimizer.state
    streamed = streamed_params(getattr(optimizer, "optimizers", [optimizer]))
    for number, item in enumerate(shards):
        loaded = state.get(str(number), {})
        tensors = _tensors(state_of, item)
        if id(item.main_param) in streamed:
            found = {n: t for n, t in loaded.items() if n in tensors and isinstance(t, Tensor)}
            streamed[id(item.main_param)].set_state(item, found)
            continue
        for name, tensor in tensors.items():
            stored = loaded.get(name)
            if isinstance(stored, Tensor) and stored.data_ptr() != tensor.data_ptr():
                tensor.copy_(stored.view_as(tensor))
        if item.is_copy:
            item.shard.values.detach().copy_(item.main_param.detach())
    step = state["step"]
    for each in streamed.values():
        each.num_steps = int(step)
    for entry in state_of.values():
        if "step" in entry:
            entry["step"] = torch.full_like(torch.as_tensor(entry["step"]), float(step))
    here, there = len(optimizer.param_groups), len(state_dict["param_groups"])
    if here != there:
        raise CheckpointError(
            f"the checkpoint has {there} parameter groups, this run has {here}.",
            rule="a resumed run has the parameter groups of the run that saved the checkpoint",
            flags=["--decoupled-lr", "--decoupled-min-lr", "--no-load-optim"],
            fix="use the flags of the run that saved it, or --no-load-optim to begin with fresh"
            " optimizer state",
        )
    for group, stored in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        group.update({name: value for name, value in stored.items() if name in group})


def settings_of_groups(param_groups: Sequence[Mapping[str, object]]) -> list[dict[str, Any]]:
    """Return the settings of parameter groups, without tensors."""
    return [
        {name: value for name, value in group.items() if name not in NOT_STORED_IN_GROUPS}
        for group in param_groups
    ]


def step_count(optimizer: object) -> int:
    """Return the number of updates of the state so far."""
    counts = [0]
    for each in getattr(optimizer, "optimizers", [optimizer]):
        if isinstance(each, ChunkedStateOptimizer):
            counts.append(each.num_steps)
        else:
            counts += [int(entry["step"]) for entry in each.state.values() if "step" in entry]
    return max(counts)


def initialize_state(optimizer: object) -> None:
    """Allocate the state that the first update would allocate."""
    for each in getattr(optimizer, "optimizers", [optimizer]):
        if hasattr(each, "initialize_state"):
            each.initialize_state()
        elif not isinstance(each, ChunkedStateOptimizer):
            _initialize_torch_optimizer(each)


def _initialize_torch_optimizer(optimizer: torch.optim.Optimizer) -> None:
    if not isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)):
        _take_empty_step(optimizer)
        return
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if optimizer.state[tensor]:
                continue
            if isinstance(optimizer, torch.optim.SGD):
                if group["momentum"]:
                    optimizer.state[tensor]["momentum_buffer"] = torch.zeros_like(tensor)
            else:
                # The step count of the fused kernel is on the device, of other kernels on the host.
                device = tensor.device if group.get("fused") else torch.device("cpu")
                optimizer.state[tensor] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(tensor),
                    "exp_avg_sq": torch.zeros_like(tensor),
                }


@torch.no_grad()
def _take_empty_step(optimizer: torch.optim.Optimizer) -> None:
    """Take a step with zero gradients, so that an unknown optimizer allocates its state."""
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if not tensors or any(optimizer.state.get(tensor) for tensor in tensors):
        return
    values, gradients = [t.detach().clone() for t in tensors], [t.grad for t in tensors]
    for tensor in tensors:
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
    for tensor, value, gradient in zip(tensors, values, gradients, strict=True):
        tensor.copy_(value)
        tensor.grad = gradient
        if "step" in optimizer.state[tensor]:
            optimizer.state[tensor]["step"] = torch.zeros_like(
                torch.as_tensor(optimizer.state[tensor]["step"])
            )


def _tensors(
    state_of: Mapping[Tensor, Mapping[str, Any]], item: MainParamShard
) -> dict[str, Tensor]:
    """Return the state tensors of one shard by name, the main weight among them."""
    entry = state_of.get(item.main_param, {})
    found = {
        name: value
        for name, value in entry.items()
        if isinstance(value, Tensor) and value.shape == item.main_param.shape and name != "step"
    }
    if item.is_copy:
        found["fp32_param"] = item.main_param.detach()
    return found


def _declare(
    declaration: Declaration, item: MainParamShard, tensor: Tensor, name: str
) -> Declaration:
    shard = item.shard
    # Ranks that own different ranges are not copies of each other: the last index of a replica id,
    # over data-parallel ranks, counts the copies of the range.
    whole, copy = declaration.replica_id, shard.mesh.replicate.rank()
    replica_id: ReplicaId = (*whole[:-1], copy) if isinstance(whole, tuple) else copy
    is_range = not shard.is_full
    return make_sharded_optimizer_tensor(
        declaration,
        tensor.detach() if is_range else tensor.detach().view(shard.parameter.shape),
        prefix=f"optimizer.state.{name}",
        flattened_range=slice(shard.begin, shard.end) if is_range else None,
        replica_id=replica_id if shard.mesh.shard_size > 1 else None,
    )


def _declarations(tree: Any) -> Iterator[Declaration]:
    if isinstance(tree, (ShardedTensor, ShardedTensorFactory)):
        if isinstance(tree.data, (Tensor, nn.Parameter)):
            yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _declarations(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _declarations(value)
