"""Flags of how the model and its replicas are spread over ranks."""

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
    """Number the ranks tensor, pipeline, data instead of tensor, data, pipeline."""
    distributed_backend: str = flag("nccl", choices=("nccl", "gloo", "mpi"))
    """Library of collectives; a machine without GPUs uses gloo. MPI needs a torch built with it."""
    distributed_timeout_minutes: int = 10
    """How long a collective may wait for its peers."""
    tp_comm_overlap_cfg: str | None = flag(None, part_of="tp_comm_overlap")
    """Its settings file."""


@dataclass(kw_only=True)
class DataParallelSettings(DataParallelFlags, ShardedOptimizerFlags, SettingsGroup):
    """Data parallelism: gradient reduction, and what is sharded over replicas."""

    align_grad_reduce: bool = flag(
        True, note="whether ranks of a pipeline reduce at one moment changes no result"
    )
    """Let each stage reduce its gradients at its own pace."""
    megatron_fsdp_main_params_dtype: str = flag(
        "fp32",
        choices=("fp32", "bf16", "fp16", "auto"),
        refuse_values={
            "bf16": "use --use-precision-aware-optimizer --main-params-dtype fp16",
            "fp16": "use --use-precision-aware-optimizer --main-params-dtype fp16",
        },
        note_values={"auto": "main weights are fp32, or as --main-params-dtype says"},
    )
    """Precision of main weights under --use-megatron-fsdp."""
    megatron_fsdp_main_grads_dtype: str = flag(
        "auto",
        choices=("fp32", "bf16", "fp16", "auto"),
        refuse_values=_FP16_GRADS,
        note_values={"fp32": "so they are, unless --grad-reduce-in-bf16 is given"},
    )
    """Precision of main gradients under --use-megatron-fsdp; bf16 is --grad-reduce-in-bf16."""
    megatron_fsdp_grad_comm_dtype: str = flag(
        "auto",
        choices=("fp32", "fp16", "bf16", "auto"),
        refuse_values=_FP16_GRADS,
        note_values={"fp32": "so they are, unless --grad-reduce-in-bf16 is given"},
    )
    """Precision in which gradients are reduced under --use-megatron-fsdp; they are summed in it,
    too, and bf16 is --grad-reduce-in-bf16."""
    use_torch_fsdp2: bool = False
    """Shard parameters, gradients and state with torch's fully_shard, a layer at a time."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32; on by itself with --bf16."""
    grad_reduce_in_bf16: bool = False
    """Reduce gradients in bf16 although weights are bf16."""
