"""Flags of parallelism: how the model and its replicas are distributed over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.distributed.distributed_data_parallel_config import (
    DataParallelFlags,
    ShardedOptimizerFlags,
)
from megatron.core.model_parallel_config import ParallelFlags
from megatron.core.pipeline_parallel.schedule_definitions import SCHEDULES
from megatron.core.settings.flags import SettingsGroup, flag
from megatron.core.transformer.config.stages import StageConfig

_FP16_GRADS: dict[object, str] = {"fp16": "use bf16, or fp32 with --fp16"}


@dataclass(kw_only=True)
class ParallelismSettings(
    ParallelFlags, StageConfig, SettingsGroup, choices={"pipeline_schedule": SCHEDULES}
):
    """Tensor, pipeline, sequence, context and expert parallelism, and process groups."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleaved schedule: layers of each model chunk (arXiv 2104.04473, section 2.2)."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Interleaved schedule: model chunks on each rank."""
    use_tp_pp_dp_mapping: bool = False
    """Order the axes of ranks as tensor, pipeline, data instead of tensor, data, pipeline."""
    distributed_backend: str = flag("nccl", choices=("nccl", "gloo", "mpi"))
    """Library of collectives. Machines without GPUs use gloo; mpi needs a torch built with MPI."""
    distributed_timeout_minutes: int = 10
    """Timeout of collectives in minutes."""
    tp_comm_overlap_cfg: str | None = flag(None, part_of="tp_comm_overlap")
    """Settings file of --tp-comm-overlap."""


@dataclass(kw_only=True)
class DataParallelSettings(DataParallelFlags, ShardedOptimizerFlags, SettingsGroup):
    """Data parallelism: gradient reduction and sharding over replicas."""

    align_grad_reduce: bool = flag(
        True, note="whether all pipeline stages reduce gradients at the same time changes no result"
    )
    """Do not make all pipeline stages reduce their gradients at the same time."""
    megatron_fsdp_main_params_dtype: str = flag(
        "fp32",
        choices=("fp32", "bf16", "fp16", "auto"),
        refuse_values={
            "bf16": "use --use-precision-aware-optimizer --main-params-dtype fp16",
            "fp16": "use --use-precision-aware-optimizer --main-params-dtype fp16",
        },
        note_values={"auto": "--main-params-dtype sets the precision, fp32 by default"},
    )
    """Precision of main weights with --use-megatron-fsdp."""
    megatron_fsdp_main_grads_dtype: str = flag(
        "auto",
        choices=("fp32", "bf16", "fp16", "auto"),
        refuse_values=_FP16_GRADS,
        note_values={"fp32": "so they are, unless --grad-reduce-in-bf16 is given"},
    )
    """Precision of main gradients with --use-megatron-fsdp; bf16 sets --grad-reduce-in-bf16."""
    megatron_fsdp_grad_comm_dtype: str = flag(
        "auto",
        choices=("fp32", "fp16", "bf16", "auto"),
        refuse_values=_FP16_GRADS,
        note_values={"fp32": "so they are, unless --grad-reduce-in-bf16 is given"},
    )
    """Precision for communicating and summing gradients with --use-megatron-fsdp; bf16 sets
    --grad-reduce-in-bf16."""
    use_torch_fsdp2: bool = False
    """Shard parameters, gradients and optimizer state layer by layer, with torch's fully_shard."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32. --bf16 sets it."""
    grad_reduce_in_bf16: bool = False
    """With --bf16, accumulate and reduce gradients in bf16 instead of fp32."""
