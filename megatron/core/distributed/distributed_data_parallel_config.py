"""Settings of data parallelism: time and precision of gradient reduction, and sharded state."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.foundation.device import current_device, device_type, is_host_memory
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.config_base import check_all, choice_problems, range_problems
from megatron.core.settings.field_types import check_types
from megatron.core.settings.flags import flag, no_flag
from megatron.core.settings.inert_flags import (
    refused_settings,
    warn_of_unused_settings,
    with_inert_fields,
)

COMPRESSIONS = ("none", "bf16", "int8", "powersgd", "topk")
SHARDING_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
"""No sharding, ZeRO-1, ZeRO-2, ZeRO-3."""

TUNES_NETWORK = "tunes the network of NVIDIA clusters and changes no result"
BUCKET_NUMEL_ON_CPU = 4_000_000


@dataclass
class ShardedOptimizerFlags:
    """Flags that the data-parallel wrapper and the optimizer share."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state and main weights over the data-parallel ranks (ZeRO-1, arXiv
    1910.02054): gradients are reduce-scattered, updated parameters gathered."""
    overlap_param_gather: bool = False
    """With sharded state: gather a module's parameters just before its forward pass needs them,
    while earlier modules compute. Needs --use-distributed-optimizer."""
    overlap_param_gather_with_optimizer_step: bool = flag(
        False, note="parameters are gathered after the optimizer step"
    )
    """Begin that gather during the optimizer step."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(False, part_of="optimizer_cpu_offload")
    """Overlap copies between the device and host memory with computation: with sharded gradients,
    copy each reduced bucket to the host during backward; with optim_grads, copy updated weights to
    the device during the update and the next forward pass."""


@dataclass
class DataParallelFlags:
    """Communication of gradients (and sharded parameters) between data-parallel ranks."""

    grad_reduce_in_fp32: bool = no_flag(False, is_arg=True)
    """Keep and reduce gradients in fp32 for every dtype of parameters. bf16 sums lose about 3 bits
    over 64 micro batches."""
    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket while other gradients are computed."""
    data_parallel_sharding_strategy: str = flag(
        "no_shard",
        cli_default=None,
        choices=SHARDING_STRATEGIES,
    )
    """Shard over replicas: nothing, optimizer state (ZeRO-1), also gradients (ZeRO-2), also
    parameters (ZeRO-3). Default optim_grads_params with --use-megatron-fsdp, optim with
    --use-distributed-optimizer, else no_shard."""
    num_distributed_optimizer_instances: int = 1
    """Number of copies of the sharded optimizer state: each copy is sharded over a part of the
    data-parallel ranks."""
    bucket_size: int | None = flag(None, name="ddp_bucket_size")
    """Most elements of a bucket. None chooses: 4 million on CPU, where messages of 16 MB reach full
    speed; max(40 million, 1 million per rank) on accelerators."""
    num_buckets: int | None = flag(None, name="ddp_num_buckets")
    """Cut each buffer into about this many buckets, instead of bucket_size."""
    pad_buckets_for_high_nccl_busbw: bool = flag(
        False, name="ddp_pad_buckets_for_high_nccl_busbw", note=TUNES_NETWORK
    )
    """Pad buckets to sizes that NCCL sends fastest."""
    average_in_collective: bool = flag(False, name="ddp_average_in_collective")
    """Average over the ranks in the collective, instead of scaling gradients by 1/ranks before.
    Pairwise sums on gloo always scale the sum, which is the more accurate order."""
    grad_compression: str = flag("none", choices=COMPRESSIONS)
    """Compression of gradients sent between replicas: "none", "bf16", "int8" (blocks of 128 with a
    scale), "powersgd" (matrices of low rank) or "topk" (indices and values of the largest). Except
    for bf16, errors are added to the next gradient ("error feedback"). Changes the result; a
    checkpoint does not contain the errors."""
    powersgd_rank: int = flag(4, part_of="grad_compression")
    """Rank of the matrices of "powersgd"."""
    topk_fraction: float = flag(0.01, part_of="grad_compression")
    """Share of the gradients of each bucket that "topk" sends, in (0, 1]."""
    grad_compression_warmup: int = flag(0, part_of="grad_compression")
    """Number of first reductions of each bucket that are not compressed."""
    param_cpu_offload: bool = False
    """With optim_grads_params, keep each rank's shards of parameters in host memory, and copy each
    shard to the device for its gather while the previous layer computes."""
    param_offload_path: str | None = None
    """Directory on a local disk: with optim_grads_params, keep each rank's shards of parameters in
    a file there, and read them ahead of use. For CPU ranks."""
    check_for_large_grads: bool = False
    """Before each update, check for a gradient norm far above the recent norms."""
    fp8_param_gather: bool = flag(False, part_of="fp8")
    """Gather weights of FP8 products in FP8, one byte per element. Requires sharded state, bf16,
    and a recipe with one scale per tensor (delayed, tensorwise)."""
    use_megatron_fsdp: bool = False
    """Set data_parallel_sharding_strategy to "optim_grads_params", unless it is given."""


@dataclass
@with_inert_fields("ddp")
class DistributedDataParallelConfig(DataParallelFlags, ShardedOptimizerFlags):
    """All flags of data parallelism, and settings that only callers of the library have."""

    align_param_gather: bool = False
    """Make the schedule start parameter gathers of all pipeline stages at the same time."""
    check_for_nan_in_grad: bool = False
    """Check local gradients for NaN and infinity before they are reduced, so that the error names
    the rank and the parameter. It costs one more read of the gradients."""
    reduce_scatter_with_fp32_accumulation: bool = False
    """Add half-precision gradients in fp32. gloo always does; other backends need
    grad_reduce_in_fp32."""

    def __post_init__(self) -> None:
        """Make the flags that select a ZeRO stage consistent; raise all problems together."""
        check_types(self)
        if self.data_parallel_sharding_strategy == "no_shard":
            if self.use_megatron_fsdp:
                self.data_parallel_sharding_strategy = "optim_grads_params"
            elif self.use_distributed_optimizer:
                self.data_parallel_sharding_strategy = "optim"
        if self.data_parallel_sharding_strategy in SHARDING_STRATEGIES[1:]:
            self.use_distributed_optimizer = True
        check_all(self, [_check_overlap, _check_values, refused_settings])
        warn_of_unused_settings(self)

    @property
    def shards_gradients(self) -> bool:
        """Whether a rank keeps only its shard of the gradients (ZeRO-2 and ZeRO-3)."""
        return self.data_parallel_sharding_strategy in ("optim_grads", "optim_grads_params")

    @property
    def offloads_parameters(self) -> bool:
        """Whether this rank's shards of parameters are outside of the device's memory."""
        return self.param_cpu_offload or self.param_offload_path is not None

    @property
    def gathers_params_in_fp8(self) -> bool:
        """Whether weights that their products round with one scale are gathered in FP8."""
        return (
            self.fp8_param_gather
            and self.use_distributed_optimizer
            and not (self.shards_parameters or self.overlap_cpu_optimizer_d2h_h2d)
        )

    @property
    def shards_parameters(self) -> bool:
        """Whether a rank keeps only its shard of the parameters (ZeRO-3)."""
        return self.data_parallel_sharding_strategy == "optim_grads_params"


def _check_overlap(config: DistributedDataParallelConfig) -> Iterator[MegatronError]:
    if config.overlap_param_gather and not config.use_distributed_optimizer:
        yield ConfigError(
            "overlap_param_gather is on without use_distributed_optimizer.",
            rule="parameters are gathered only if the optimizer state is sharded",
            flags=["--overlap-param-gather", "--use-distributed-optimizer"],
            fix="add --use-distributed-optimizer or drop --overlap-param-gather",
        )
    if config.num_distributed_optimizer_instances > 1 and not config.use_distributed_optimizer:
        yield ConfigError(
            f"{config.num_distributed_optimizer_instances} instances of the distributed"
            " optimizer without use_distributed_optimizer.",
            rule="instances are copies of sharded optimizer state",
            flags=["--num-distributed-optimizer-instances", "--use-distributed-optimizer"],
            fix="add --use-distributed-optimizer",
        )
    if config.param_cpu_offload and (
        not config.shards_parameters or config.param_offload_path is not None
    ):
        where = f" and param_offload_path={config.param_offload_path!r}"
        yield ConfigError(
            f"param_cpu_offload with {config.data_parallel_sharding_strategy}"
            f"{where if config.param_offload_path else ''}.",
            rule="the own shards of parameters are in one place: in host memory or in a file",
            flags=["--param-cpu-offload", "--data-parallel-sharding-strategy"],
            fix="use --data-parallel-sharding-strategy optim_grads_params, and no"
            " --param-offload-path",
        )
    if config.param_offload_path is not None and (
        not config.shards_parameters or not is_host_memory(current_device())
    ):
        yield ConfigError(
            f"param_offload_path={config.param_offload_path!r} with"
            f" {config.data_parallel_sharding_strategy} on {device_type()}.",
            rule="the file holds shards of parameters, which CPU ranks gather from it",
            flags=["--param-offload-path", "--data-parallel-sharding-strategy"],
            fix="use --data-parallel-sharding-strategy optim_grads_params on CPU ranks, or"
            " --optimizer-offload-path, which offloads the larger part of the state",
        )


def _check_values(config: DistributedDataParallelConfig) -> Iterator[MegatronError]:
    limits: list[tuple[str, str, float, float | None]] = [
        ("bucket_size", "--ddp-bucket-size", 1, None),
        ("num_buckets", "--ddp-num-buckets", 1, None),
        ("powersgd_rank", "--powersgd-rank", 1, None),
        ("grad_compression_warmup", "--grad-compression-warmup", 0, None),
    ]
    yield from range_problems(config, limits)
    if not 0.0 < config.topk_fraction <= 1.0:
        yield ConfigError(
            f"topk_fraction={config.topk_fraction}.",
            rule="a share of the gradients is sent: more than 0, at most 1",
            flags=["--topk-fraction"],
            fix="use 0.01",
        )
    if config.bucket_size is not None and config.num_buckets is not None:
        yield ConfigError(
            f"bucket_size={config.bucket_size} and num_buckets={config.num_buckets}.",
            rule="buckets are given by their size or by their number",
            flags=["--ddp-bucket-size", "--ddp-num-buckets"],
            fix="drop one of them",
        )
    choices = [
        ("grad_compression", COMPRESSIONS),
        ("data_parallel_sharding_strategy", SHARDING_STRATEGIES),
    ]
    yield from choice_problems(config, choices)


def bucket_numel(
    config: DistributedDataParallelConfig, numel: int | None, num_ranks: int, device: torch.device
) -> int | None:
    """Return the most elements of a bucket of a buffer of `numel` elements.

    Args:
        numel: None for a weight that several buffers must cut in the same way.
    """
    if config.bucket_size is not None:
        return config.bucket_size
    if config.num_buckets is not None and numel is not None:
        return math.ceil(numel / config.num_buckets)
    if num_ranks == 1:
        return None
    return BUCKET_NUMEL_ON_CPU if device.type == "cpu" else max(40_000_000, 1_000_000 * num_ranks)
