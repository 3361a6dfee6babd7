"""Initialize a process: device, process group, the grid of parallel groups, seeds."""

from __future__ import annotations

import logging
import random
from datetime import timedelta
from typing import Any

import numpy
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.foundation import device
from megatron.core.foundation.errors import TopologyError
from megatron.core.foundation.mpi import MPI, init_mpi_process_group
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import explicit_layout
from megatron.core.process_groups_config import (
    GroupFactory,
    ProcessGroupCollection,
    RunProcessGroups,
    StageRanks,
    build_process_groups,
    default_embedding_ranks,
    default_position_embedding_ranks,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.resilience.failure import is_lost_peer
from megatron.training.config.parallelism import ParallelismSettings
from megatron.training.config.resolved import ResolvedRun
from megatron.training.launch.rank_info import RankInfo
from megatron.training.setup.stages import planned_layout


def start_processes(run: ResolvedRun, info: RankInfo, store: Any) -> None:
    """Bind the device and create the world process group unless it exists."""
    device.set_local_device(info.local_rank, backend=run.parallelism.distributed_backend)
    if not dist.is_initialized():
        try:
            _connect(run.parallelism, info, store)
        except RuntimeError as error:
            if is_lost_peer(error):
                raise
            raise TopologyError(
                f"rank {info.rank} of {info.world_size} cannot connect to the others: "
                f"{str(error).splitlines()[0]}",
                rule="every rank is reachable at the address that it announces",
                flags=["--distributed-backend"],
                fix="check GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME with NCCL, and firewalls",
            ) from error


def _connect(settings: ParallelismSettings, info: RankInfo, store: Any) -> None:
    """Create the world process group."""
    backend, timeout = settings.distributed_backend, settings.distributed_timeout_minutes
    if backend == MPI:
        ranks = info.rank, info.world_size
        init_mpi_process_group("--distributed-backend", timedelta(minutes=timeout), ranks)
        return
    dist.init_process_group(
        backend=backend,
        store=dist.PrefixStore("world", store),  # type: ignore[attr-defined]
        rank=info.rank,
        world_size=info.world_size,
        timeout=timedelta(minutes=timeout),
    )


def create_groups(
    run: ResolvedRun,
    *,
    get_embedding_ranks: StageRanks | None = None,
    get_position_embedding_ranks: StageRanks | None = None,
) -> RunProcessGroups:
    """Create the parallel groups of this rank and set them as the current groups.

    Communication:
        collective on the world, see `build_process_groups`.
    """
    current = ProcessGroupCollection.current()
    if current.factory is not None:
        return current
    parallel = run.parallelism
    timeout = timedelta(minutes=parallel.distributed_timeout_minutes)
    groups = build_process_groups(
        planned_layout(run),
        factory=GroupFactory(timeout=timeout),
        embedding_ranks=get_embedding_ranks or _embedding_ranks(run),
        position_embedding_ranks=get_position_embedding_ranks or default_position_embedding_ranks,
        hierarchical_context_parallel_sizes=parallel.hierarchical_context_parallel_sizes,
        hybrid_context_parallel=parallel.hybrid_context_parallel,
        num_distributed_optimizer_instances=run.ddp.num_distributed_optimizer_instances,
        virtual_pipeline_size=parallel.virtual_pipeline_model_parallel_size,
    )
    ProcessGroupCollection.set_current(groups)  # `megatron.core.parallel_state` reads it
    return groups


def _embedding_ranks(run: ResolvedRun) -> StageRanks:
    """Return a function: ranks of a pipeline -> ranks with a copy of the embedding."""
    layout = explicit_layout(run.transformer_config)
    if layout is None or not layout.mtp_on_earlier_stage:
        return default_embedding_ranks
    is_tied = not run.model.untie_embeddings_and_output_weights
    holders = sorted(set(layout.embedding_holders(is_tied=is_tied)))
    if len(holders) == 1:  # gradients of copies on one rank are added without communication
        return default_embedding_ranks
    return lambda stages: [stages[holder] for holder in holders]


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch with the same seed on all ranks.

    The keys of random numbers for weights, dropout and the order of samples are this seed, names,
    samples and layers, but not ranks, so every layout has the same random numbers.
    """
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    rng_state().set_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def set_numerics(run: ResolvedRun) -> None:
    """Set the process-wide options of torch and logging from the settings."""
    if run.parallelism.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    if run.precision.disable_bf16_reduced_precision_matmul:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if run.logging.logging_level is not None:
        logging.basicConfig(level=run.logging.logging_level)
        logging.getLogger().setLevel(run.logging.logging_level)


def shut_down() -> None:
    """Destroy the parallel groups and the world process group, if they exist."""
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
