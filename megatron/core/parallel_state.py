"""Megatron's function names over the current `ProcessGroupCollection`.

For code that uses `megatron.core.parallel_state` (also imported as `mpu`). `megatron.core` itself
does not call it: its functions receive their groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from megatron.core.foundation.errors import TopologyError, refuse_given
from megatron.core.process_groups_config import (
    GroupFactory,
    ProcessGroupCollection,
    build_process_groups,
    default_embedding_ranks,
    default_position_embedding_ranks,
    resolve_group,
)
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.topology.rank_grid import DEFAULT_ORDER, plan_layout


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: int = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    get_position_embedding_ranks: Callable[[list[int]], list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: list[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> ProcessGroupCollection:
    """Arrange all processes and create the groups of this rank; they become the current ones.

    Sizes and order as in `rank_grid.plan_layout`. May be called again after
    `destroy_model_parallel`, with any other layout. Streams and NCCL are not tuned.

    Communication:
        collective on the world. With `local_world_size` the ranks outside call it as well, with
        their own `rank_offset` and sizes.
    Raises:
        TopologyError: the sizes do not fit the world size, or groups exist already.
        ConfigError: a size is given for an axis that does not exist here (`gtp_remat_size`), or a
            separate backend for pipelines.
    """
    if not dist.is_initialized():
        raise TopologyError(
            "torch.distributed is not initialised.",
            rule="process groups need a process group backend",
            fix="launch with torchrun and call torch.distributed.init_process_group first",
        )
    if model_parallel_is_initialized():
        raise TopologyError(
            "model parallel groups exist already.",
            rule="they are created once",
            fix="call destroy_model_parallel() first",
        )
    has_own_backend = pipeline_model_parallel_comm_backend not in (None, dist.get_backend())
    shards_weights = (gtp_remat_size, expert_gtp_remat_size) != (1, 1)
    refuse_given(
        "initialize_model_parallel",
        {
            "gtp_remat_size": shards_weights,
            "pipeline_model_parallel_comm_backend": has_own_backend,
        },
        rule="weights are sharded over tensor parallel or by ZeRO, and all groups have one backend",
        fix="use tensor_model_parallel_size or a ZeRO stage, and leave these out",
    )
    if use_sharp or sharp_enabled_group or nccl_communicator_config_path:
        warnings.warn("SHARP and options of NCCL's communicators are not set up", stacklevel=2)
    layout = plan_layout(
        local_world_size or dist.get_world_size(),
        tp=tensor_model_parallel_size,
        pp=pipeline_model_parallel_size,
        cp=context_parallel_size,
        ep=expert_model_parallel_size,
        expert_tp=expert_tensor_parallel_size,
        order=order,
        rank_offset=rank_offset,
    )
    groups = build_process_groups(
        layout,
        factory=GroupFactory(timeout=timedelta(minutes=distributed_timeout_minutes)),
        embedding_ranks=get_embedding_ranks or default_embedding_ranks,
        position_embedding_ranks=get_position_embedding_ranks or default_position_embedding_ranks,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        hybrid_context_parallel=hybrid_context_parallel,
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
        virtual_pipeline_size=virtual_pipeline_model_parallel_size,
    )
    ProcessGroupCollection.set_current(groups)
    return groups


def model_parallel_is_initialized() -> bool:
    """Return whether groups were created."""
    return ProcessGroupCollection.current().factory is not None


is_initialized = model_parallel_is_initialized
is_unitialized = lambda: not model_parallel_is_initialized()  # noqa: E731  Megatron's spelling


def destroy_model_parallel() -> None:
    """Destroy the groups of `initialize_model_parallel` and the current collection."""
    factory = ProcessGroupCollection.current().factory
    if factory is not None and dist.is_initialized():
        factory.destroy()
    ProcessGroupCollection.set_current(None)


def _group(name: str, check_initialized: bool = True) -> Any:
    if check_initialized and not model_parallel_is_initialized():
        raise TopologyError(
            f"the process group {name!r} does not exist yet.",
            rule="groups exist after initialize_model_parallel",
            fix="call megatron.core.parallel_state.initialize_model_parallel(...) first",
        )
    group = getattr(ProcessGroupCollection.current(), name)
    return None if group is SINGLE_RANK else group


def _size(name: str) -> int:
    return resolve_group(None, name).size()


def _rank(name: str) -> int:
    return resolve_group(None, name).rank()


def _ranks(name: str) -> list[int]:
    return ProcessGroupCollection.current().ranks.get(name, [0])


def _global_rank(name: str, position: int) -> int:
    ranks = _ranks(name)
    return ranks[position % len(ranks)]


# Megatron's names, one line each ---------------------------------------------------------------
#
# `..._group(check_initialized=True)` returns a group of this rank, `..._world_size()` its size, and
# `..._rank()` this rank's position in it.

get_tensor_model_parallel_group = partial(_group, "tp")
get_tensor_model_parallel_world_size = partial(_size, "tp")
get_tensor_model_parallel_rank = partial(_rank, "tp")
get_context_parallel_group = partial(_group, "cp")
get_context_parallel_world_size = partial(_size, "cp")
get_context_parallel_rank = partial(_rank, "cp")
get_tensor_and_context_parallel_group = partial(_group, "tp_cp")
get_tensor_and_context_parallel_world_size = partial(_size, "tp_cp")
get_tensor_and_context_parallel_rank = partial(_rank, "tp_cp")
get_expert_model_parallel_group = partial(_group, "ep")
get_expert_model_parallel_world_size = partial(_size, "ep")
get_expert_model_parallel_rank = partial(_rank, "ep")
get_expert_tensor_parallel_group = partial(_group, "expt_tp")
get_expert_tensor_parallel_world_size = partial(_size, "expt_tp")
get_expert_tensor_parallel_rank = partial(_rank, "expt_tp")
get_expert_tensor_and_model_parallel_group = partial(_group, "tp_ep")
get_expert_tensor_and_model_parallel_world_size = partial(_size, "tp_ep")
get_expert_tensor_and_model_parallel_rank = partial(_rank, "tp_ep")
get_expert_tensor_model_pipeline_parallel_group = partial(_group, "tp_ep_pp")
get_inter_distributed_optimizer_instance_group = partial(_group, "inter_dist_opt")
get_model_parallel_group = partial(_group, "mp")
get_pipeline_model_parallel_group = partial(_group, "pp")
get_pipeline_model_parallel_world_size = partial(_size, "pp")
get_pipeline_model_parallel_rank = partial(_rank, "pp")
get_embedding_group = partial(_group, "embd")
get_position_embedding_group = partial(_group, "pos_embd")

# Global ranks: of the first member of a group (`..._src_rank`), and of other pipeline stages.
get_tensor_model_parallel_src_rank = partial(_global_rank, "tp", 0)
get_model_parallel_src_rank = partial(_global_rank, "mp", 0)
get_pipeline_model_parallel_first_rank = partial(_global_rank, "pp", 0)
get_pipeline_model_parallel_last_rank = partial(_global_rank, "pp", -1)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the global ranks of this context-parallel group."""
    _group("cp", check_initialized)
    return _ranks("cp")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Any]:
    """Return the nested groups of hierarchical context parallelism, innermost first."""
    return list(_group("hcp", check_initialized))


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Any:
    """Return the group of tp x dp (x cp): used for FP8 amax reduction."""
    return _group("tp_dp_cp" if with_context_parallel else "tp_dp", check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> Any:
    """Return the ranks that hold the same expert weights."""
    return _group("intra_expt_dp" if partial_expert_data_parallel else "expt_dp", check_initialized)


def get_expert_data_parallel_world_size(partial_expert_data_parallel: bool = False) -> int:
    """Return the number of replicas of expert weights."""
    return _size("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def get_expert_data_parallel_rank(partial_expert_data_parallel: bool = False) -> int:
    """Return this rank's position among the replicas of its expert weights."""
    return _rank("intra_expt_dp" if partial_expert_data_parallel else "expt_dp")


def _data_parallel_name(with_context_parallel: bool, partial_data_parallel: bool) -> str:
    if partial_data_parallel:
        return "intra_dp_cp"
    return "dp_cp" if with_context_parallel else "dp"


def get_data_parallel_group(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> Any:
    """Return the data-parallel group, `with_context_parallel` joined with context parallel."""
    return _group(_data_parallel_name(with_context_parallel, partial_data_parallel))


get_data_parallel_group_gloo = get_data_parallel_group


def get_data_parallel_world_size(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return the data-parallel size."""
    return _size(_data_parallel_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_rank(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> int:
    """Return this rank's position in its data-parallel group."""
    return _rank(_data_parallel_name(with_context_parallel, partial_data_parallel))


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the global rank that is first in this data-parallel group."""
    return _global_rank(_data_parallel_name(with_context_parallel, False), 0)


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the global rank of the following stage (the last is followed by the first)."""
    return _global_rank("pp", _rank("pp") + 1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the global rank of the preceding stage (the first is preceded by the last)."""
    return _global_rank("pp", _rank("pp") - 1)


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the virtual stage that the caller has declared, or None without VPP."""
    return ProcessGroupCollection.current().virtual_pipeline_rank


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Declare the virtual stage for code that reads global state instead of `vp_stage`."""
    groups = ProcessGroupCollection.current().with_groups(virtual_pipeline_rank=rank)
    ProcessGroupCollection.set_current(groups)


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages per rank, or None without VPP."""
    return ProcessGroupCollection.current().virtual_pipeline_size


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Set the number of virtual stages per rank."""
    groups = ProcessGroupCollection.current().with_groups(virtual_pipeline_size=size)
    ProcessGroupCollection.set_current(groups)


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and virtual stage, unless ignored) reads the tokens."""
    stage, _ = ProcessGroupCollection.current().virtual_stage(vp_stage)
    return _rank("pp") == 0 and (ignore_virtual or stage == 0)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank (and virtual stage, unless ignored) computes the loss."""
    stage, size = ProcessGroupCollection.current().virtual_stage(vp_stage)
    return _rank("pp") == _size("pp") - 1 and (ignore_virtual or stage == size - 1)


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this rank holds a copy of the tied word embedding."""
    if "embd" not in ProcessGroupCollection.current().ranks:
        return False
    if ignore_virtual or get_virtual_pipeline_model_parallel_world_size() is None:
        return True
    return is_pipeline_first_stage(False, vp_stage) or is_pipeline_last_stage(False, vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Return whether this rank holds position embeddings."""
    return "pos_embd" in ProcessGroupCollection.current().ranks
