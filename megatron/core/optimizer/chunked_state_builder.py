"""Decide in which bytes and where chunked optimizer state is, and build it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.errors import ConfigError
from megatron.core.offload import FileStateStore, HostStateStore, StateStore, host_memory_problem
from megatron.core.optimizer.chunked_state import MAIN, ChunkedState, StateField
from megatron.core.optimizer.chunked_state_optimizer import ChunkedStateOptimizer
from megatron.core.optimizer.definition import ElementwiseUpdate
from megatron.core.optimizer.main_param_shard import MainParamShard
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.state_codec import BFloat16Codec, codec_of
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import raise_on_all_ranks

CHUNK_BLOCKS = 2048
"""Blocks of a chunk: 262,144 elements, 1 MiB per fp32 column."""


def build_chunked_state_optimizer(
    update: ElementwiseUpdate,
    config: OptimizerConfig,
    param_groups: Sequence[dict[str, object]],
    shards: Sequence[MainParamShard],
) -> ChunkedStateOptimizer:
    """Return the optimizer over `shards`, with state as the config wants it.

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
    """Return the shards whose state goes to host or disk: about the fraction asked for.

    They are spread over the model, so that updates of both kinds alternate.
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
        keeps_main: model weights are not what is updated: they are half precision, or elsewhere.
    """
    fields = []
    for name in update.state_names:
        is_second = name == "exp_avg_sq"
        kind = config.exp_avg_sq_dtype if is_second else config.exp_avg_dtype
        fields.append(StateField(name, codec_of(kind, is_second_moment=is_second)))
    if keeps_main:
        # Precision-aware, and nothing is lost: bf16 weights and their remainders are fp32 weights.
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
    """Raise if the ranks of this machine together want more host memory than there is."""
    if config.optimizer_offload_path is not None or not shards:
        return
    needed = 0
    for item in shards:
        values = item.shard.values
        keeps_main = values.dtype != torch.float32 or not is_host_memory(values.device)
        fields = state_fields(update, config, values.dtype, keeps_main=keeps_main)
        needed += -(-item.main_param.numel() // BLOCK) * sum(f.codec.block_bytes for f in fields)
    # torchrun says how many of its ranks share this machine.
    num_local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    problem = host_memory_problem(needed, "optimizer state", num_local_ranks=num_local_ranks)
    if problem is not None:
        raise problem
