"""An optimizer that updates its state chunk by chunk: in low precision, host memory or files.

Optimizer states in host memory: J. Ren et al., "ZeRO-Offload: Democratizing Billion-Scale Model
Training", section 4, arXiv 2101.06840. The update is computed where the state is stored: the
gradient is copied there and the new weight is copied back. If that device is the host, nothing is
copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.parameter_shard import MainParamShard
from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.errors import ConfigError
from megatron.core.offload.state_stores import (
    FileStateStore,
    HostStateStore,
    StateStore,
    host_memory_problem,
)
from megatron.core.optimizer.chunked_state import MAIN, ChunkedState, ChunkUpdate, StateField
from megatron.core.optimizer.definition import ElementwiseUpdate
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.state_codec import BFloat16Codec, codec_of
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import raise_on_all_ranks

CHUNK_BLOCKS = 2048
"""Blocks of a chunk: 262,144 elements, 1 MiB per fp32 column."""


class ChunkedStateOptimizer:
    """The interface of a `torch.optim.Optimizer`, as far as `MegatronOptimizer` uses it.

    Gradients are passed to `set_gradient`, because their dtype may differ from the dtype of the
    model weights that they belong to.
    """

    def __init__(
        self,
        update: ElementwiseUpdate,
        param_groups: Sequence[dict[str, Any]],
        parts: Sequence[ChunkedState],
    ) -> None:
        """
        Args:
            param_groups: "params" are the `main` tensors of the parts' shards. The constructor adds
                the optimizer's constants, as torch's optimizers do: a schedule may change them.
        """
        for group in param_groups:
            for name, value in update.constants.items():
                group.setdefault(name, value)
        self.update, self.param_groups, self.parts = update, list(param_groups), list(parts)
        self.num_steps = 0
        """Updates so far."""
        self._gradients: dict[int, Tensor] = {}
        self._part_of = {id(item.main_param): part for part in parts for item in part.shards}

    @property
    def main_params(self) -> set[int]:
        """Ids of the tensors that this optimizer updates."""
        return set(self._part_of)

    def set_gradient(self, main: Tensor, gradient: Tensor) -> None:
        """Keep a gradient for the next update."""
        self._gradients[id(main)] = gradient

    @torch.no_grad()
    def step(self, factor: float = 1.0) -> None:
        """Update with `factor` times the gradients, and drop the gradients."""
        settings_of = {id(main): group for group in self.param_groups for main in group["params"]}
        asked = ChunkUpdate(self.update, self._gradients, settings_of, self.num_steps, factor)
        for part in self.parts:
            part.update(asked)
        self._gradients.clear()
        self.num_steps += 1

    @property
    def state(self) -> Mapping[Tensor, dict[str, Any]]:
        """Decoded state tensors of each shard by its `main`; copies unless stored in fp32."""
        states = (pair for part in self.parts for pair in part.states())
        return {item.main_param: values for item, values in states}

    def set_state(self, item: MainParamShard, values: Mapping[str, Tensor]) -> None:
        """Store state tensors of one shard."""
        self._part_of[id(item.main_param)].set_state(item, values)

    def scale_main(self, item: MainParamShard, factors: Tensor) -> None:
        """Multiply the main weight of a shard by factors of its shape."""
        part = self._part_of[id(item.main_param)]
        if part.has_main:
            main = part.state_of(item, MAIN)
            part.set_state(item, {MAIN: main * factors.to(main.device)})
        else:
            item.main_param.mul_(factors)

    def reload_main(self) -> None:
        """Take the main weights from the model."""
        for part in self.parts:
            if part.has_main:
                part.reload_main()

    def state_dict(self) -> dict[str, Any]:
        """Return the columns of all parts, and the number of updates."""
        columns = [
            [part.store.column(i).clone() for i, _ in enumerate(part.fields)] for part in self.parts
        ]
        return {"columns": columns, "num_steps": self.num_steps}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`, of the same settings; the model is loaded already."""
        self.num_steps = int(state_dict["num_steps"])
        for part, columns in zip(self.parts, state_dict["columns"], strict=True):
            for number, column in enumerate(columns):
                part.store.column(number).copy_(column)
            if part.has_main:
                for item, values in part.states():
                    part.set_state(item, {MAIN: values[MAIN]})


def streamed_params(optimizers: Iterable[object]) -> dict[int, ChunkedStateOptimizer]:
    """Return id of a main tensor -> its optimizer, if that one updates chunks of state."""
    return {
        main: optimizer
        for optimizer in optimizers
        if isinstance(optimizer, ChunkedStateOptimizer)
        for main in optimizer.main_params
    }


def build_chunked_state_optimizer(
    update: ElementwiseUpdate,
    config: OptimizerConfig,
    param_groups: Sequence[dict[str, object]],
    shards: Sequence[MainParamShard],
) -> ChunkedStateOptimizer:
    """Return the optimizer over `shards`, with the state dtypes and places of the config.

    Raises:
        ConfigError: on all ranks, if host memory or disk space does not suffice on any.
    Communication: one agreement over all processes if anything is offloaded.
    """
    problem: ConfigError | None = None
    offloaded = choose_offloaded(shards, config)
    try:
        _check_memory(offloaded, update, config)
        parts = [
            *_parts(update, config, offloaded, is_offloaded=True),
            *_parts(update, config, [s for s in shards if s not in offloaded], is_offloaded=False),
        ]
    except ConfigError as error:
        problem = error
    if config.offloads_optimizer:
        raise_on_all_ranks(problem, torch_collectives.world())
    elif problem is not None:
        raise problem
    return ChunkedStateOptimizer(update, param_groups, parts)


def choose_offloaded(
    shards: Sequence[MainParamShard], config: OptimizerConfig
) -> list[MainParamShard]:
    """Return the shards whose state is stored on host or disk: about the configured fraction.

    These shards are spread over the model, so that updates of both kinds alternate.
    """
    if not config.offloads_optimizer:
        return []
    chosen, chosen_numel, total = [], 0, 0
    for item in shards:
        total += item.main_param.numel()
        if chosen_numel + item.main_param.numel() / 2 <= config.optimizer_offload_fraction * total:
            chosen.append(item)
            chosen_numel += item.main_param.numel()
    return chosen


def state_fields(
    update: ElementwiseUpdate, config: OptimizerConfig, dtype: torch.dtype, *, keeps_main: bool
) -> list[StateField]:
    """Return the columns of shards whose model weights have `dtype`.

    Args:
        keeps_main: the state includes main weights, because the model weights are in half
            precision or on another device.
    """
    fields = []
    for name in update.state_names:
        is_second = name == "exp_avg_sq"
        kind = config.exp_avg_sq_dtype if is_second else config.exp_avg_dtype
        fields.append(StateField(name, codec_of(kind, is_second_moment=is_second)))
    if keeps_main:
        # bf16 weights and their remainders together are exact fp32 weights.
        if (
            config.use_precision_aware_optimizer
            and dtype == torch.bfloat16
            and config.main_params_dtype == torch.float32
        ):
            fields.append(StateField(MAIN, BFloat16Codec(), is_remainder=True))
        else:
            fields.append(StateField(MAIN, codec_of(config.main_params_dtype)))
    return fields


def _parts(
    update: ElementwiseUpdate,
    config: OptimizerConfig,
    shards: Sequence[MainParamShard],
    *,
    is_offloaded: bool,
) -> list[ChunkedState]:
    """Return one part per dtype of model weights."""
    by_dtype: dict[torch.dtype, list[MainParamShard]] = {}
    for item in shards:
        if item.main_param.numel():
            by_dtype.setdefault(item.shard.values.dtype, []).append(item)
    parts = []
    for dtype, members in by_dtype.items():
        # Buffers begin with the last layers; the first ones are needed first.
        members.reverse()
        device = members[0].shard.values.device
        on_accelerator = not is_host_memory(device)

        def make_store(
            block_bytes: list[int], num_blocks: int, device: torch.device = device
        ) -> StateStore:
            is_pinned = not is_host_memory(device)
            if not is_offloaded:
                return HostStateStore(
                    block_bytes, num_blocks, chunk_blocks=CHUNK_BLOCKS, device=device
                )
            if config.optimizer_offload_path is not None:
                return FileStateStore(
                    config.optimizer_offload_path, block_bytes, num_blocks,
                    chunk_blocks=CHUNK_BLOCKS, is_pinned=is_pinned,
                )  # fmt: skip
            return HostStateStore(
                block_bytes, num_blocks, chunk_blocks=CHUNK_BLOCKS,
                device=torch.device("cpu"), is_pinned=is_pinned,
            )  # fmt: skip

        keeps_main = dtype != torch.float32 or (is_offloaded and on_accelerator)
        fields = state_fields(update, config, dtype, keeps_main=keeps_main)
        parts.append(ChunkedState(members, fields, make_store))
    return parts


def _check_memory(
    shards: Sequence[MainParamShard], update: ElementwiseUpdate, config: OptimizerConfig
) -> None:
    """Raise if the ranks of this machine together need more host memory than there is."""
    if config.optimizer_offload_path is not None or not shards:
        return
    needed = 0
    for item in shards:
        values = item.shard.values
        keeps_main = values.dtype != torch.float32 or not is_host_memory(values.device)
        fields = state_fields(update, config, values.dtype, keeps_main=keeps_main)
        needed += -(-item.main_param.numel() // BLOCK) * sum(f.codec.block_bytes for f in fields)
    # torchrun sets the number of its ranks on this machine.
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    problem = host_memory_problem(needed, "optimizer state", num_local_ranks=num_local_ranks)
    if problem is not None:
        raise problem
