"""Flags of how the model and its replicas are spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.pipeline_parallel.programs import SCHEDULES
from megatron.training.config.flag import flag

_BF16_GRADS = "use --grad-reduce-in-bf16"
TUNES_NETWORK = "tunes the network of NVIDIA clusters and changes no result"


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Tensor, pipeline, sequence, context and expert parallelism, and process groups."""

    tensor_model_parallel_size: int = 1
    """Ranks over which each weight matrix is split (arXiv 1909.08053)."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are split into stages."""
    num_layers_per_virtual_pipeline_stage: int | None = None
    """Interleaved schedule: layers of each model chunk (arXiv 2104.04473, section 2.2)."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Interleaved schedule: model chunks on each rank."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "--microbatch-group-size-per-virtual-pipeline-stage"
    )
    """Micro batches that pass one chunk before the next chunk's turn. Default the pipeline
    size."""
    pipeline_schedule: str = flag("1f1b", choices=SCHEDULES)
    """Order of the pipeline's steps; 1f1b is interleaved when there are virtual stages. The zero
    bubble schedules form weight gradients apart (arXiv 2401.10241)."""
    pipeline_step_durations: list[int] = flag([1, 1, 1], nargs=3)
    """Relative time of a forward, an input gradient and a weight gradient, for zb-v."""
    pipeline_model_parallel_layout: str | None = None
    """Explicit stages, for example "Et*3|(tt|)*14,L": E embedding, t layer, L loss."""
    decoder_first_pipeline_num_layers: int | None = None
    """Layers of the first stage; the others share the rest evenly."""
    decoder_last_pipeline_num_layers: int | None = None
    """Layers of the last stage."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as one layer of the first stage."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as one layer of the last stage."""
    sequence_parallel: bool = False
    """Split norms, dropouts and residuals along the sequence (arXiv 2205.05198)."""
    context_parallel_size: int = 1
    """Ranks over which the sequence is split everywhere, attention included (arXiv 2310.01889)."""
    cp_comm_type: list[str] = flag(["p2p"], nargs="+", part_of="context_parallel_size")
    """How attention sees the keys of other ranks: p2p (ring), all_gather, a2a (Ulysses, arXiv
    2309.14509) or a2a+p2p; one, or one per layer."""
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, nargs="+", part_of="context_parallel_size"
    )
    """Sizes of the two levels of a2a+p2p: near ranks that exchange heads, then the ring."""
    expert_model_parallel_size: int = 1
    """Ranks over which experts are distributed."""
    expert_tensor_parallel_size: int | None = flag(None, part_of="num_experts")
    """Tensor-parallel size inside experts."""
    use_tp_pp_dp_mapping: bool = False
    """Number the ranks tensor, pipeline, data instead of tensor, data, pipeline."""
    distributed_backend: str = flag("nccl", choices=("nccl", "gloo"))
    """Library of collectives; a machine without GPUs uses gloo."""
    distributed_timeout_minutes: int = 10
    """How long a collective may wait for its peers."""
    enable_gloo_process_groups: bool = flag(
        True,
        "--disable-gloo-process-groups",
        note="no separate gloo groups are made in any case",
    )
    """Leave out the CPU process groups beside the NCCL ones."""
    overlap_p2p_comm: bool = flag(True, "--no-overlap-p2p-communication")
    """Finish sends and receives between stages before computing on."""
    overlap_p2p_comm_warmup_flush: bool = flag(
        False,
        "--overlap-p2p-communication-warmup-flush",
        note="receives are posted ahead in all phases of the pipeline",
    )
    """Overlap in the warm-up and drain phases as well."""
    use_ring_exchange_p2p: bool = flag(False, note=TUNES_NETWORK)
    """Send between stages by a custom NCCL operation."""
    scatter_gather_tensors_in_pipeline: bool = flag(
        True,
        "--no-scatter-gather-tensors-in-pipeline",
        note="stages exchange whole activations, or shards under --sequence-parallel",
    )
    """Send whole activations between stages."""
    async_tensor_model_parallel_allreduce: bool = True
    """Compute the weight gradient only after the input gradient was reduced."""
    tp_comm_overlap: bool = flag(False, note="tunes Transformer Engine and changes no result")
    """Overlap tensor-parallel communication inside a matrix product."""
    tp_comm_overlap_cfg: str | None = flag(None, part_of="tp_comm_overlap")
    """Its settings file."""
    use_cpu_initialization: bool = False
    """Create and fill weights in host memory first."""
    init_model_with_meta_device: bool = flag(
        False, note="weights are drawn by name and need no full copy of the model"
    )
    """Create weights without memory first."""
    fake_process_group: bool = flag(False, refuse="use --dry-run to plan a large job")
    """Run one process as if it were one of many."""
    nccl_communicator_config_path: str | None = flag(None, note=TUNES_NETWORK)
    """Settings of NCCL communicators."""
    use_sharp: bool = flag(False, note=TUNES_NETWORK)
    """Reduce inside InfiniBand switches."""
    high_priority_stream_groups: list[str] = flag([], nargs="*", note=TUNES_NETWORK)
    """Groups whose collectives run on a high-priority stream."""
    local_rank: int | None = flag(
        None, "--local-rank", "--local_rank", note="the launcher's LOCAL_RANK decides"
    )
    """Passed by launchers from before torchrun."""


@dataclass(frozen=True, kw_only=True)
class ReplicationConfig:
    """Data parallelism: gradient reduction, and what is sharded over replicas."""

    use_distributed_optimizer: bool = False
    """Shard optimizer state and main weights over the replicas (ZeRO-1, arXiv 1910.02054)."""
    overlap_grad_reduce: bool = False
    """Reduce the gradients of a bucket while others are still computed."""
    overlap_param_gather: bool = False
    """Gather sharded parameters while the forward pass runs."""
    overlap_param_gather_with_optimizer_step: bool = flag(
        False, note="parameters are gathered after the optimizer step"
    )
    """Begin that gather during the optimizer step."""
    ddp_bucket_size: int | None = None
    """Elements of one gradient bucket. Default grows with the number of replicas."""
    ddp_num_buckets: int | None = None
    """Number of gradient buckets, instead of their size."""
    grad_compression: str = flag("none", choices=("none", "bf16", "int8", "powersgd"))
    """Form in which gradients travel between replicas: rounded to bf16, blocks of int8, or matrices
    of low rank; errors are fed back, but not kept in checkpoints."""
    powersgd_rank: int = flag(4, part_of="grad_compression")
    """Rank of those matrices."""
    grad_compression_warmup: int = flag(0, part_of="grad_compression")
    """First reductions that are not compressed."""
    ddp_average_in_collective: bool = False
    """Let the collective average, instead of scaling gradients before it."""
    ddp_pad_buckets_for_high_nccl_busbw: bool = flag(False, note=TUNES_NETWORK)
    """Pad buckets to sizes that NCCL moves fastest."""
    align_grad_reduce: bool = flag(
        True, note="whether ranks of a pipeline reduce at one moment changes no result"
    )
    """Let each stage reduce its gradients at its own pace."""
    num_distributed_optimizer_instances: int = 1
    """Copies of the sharded optimizer state: it is sharded inside and replicated across them."""
    use_megatron_fsdp: bool = False
    """The same as --data-parallel-sharding-strategy optim_grads_params, unless that is given."""
    megatron_fsdp_main_params_dtype: str = flag(
        "fp32",
        choices=("fp32", "bf16", "fp16", "auto"),
        refuse_values={
            "bf16": "use --use-precision-aware-optimizer --main-params-dtype fp16",
            "fp16": "use --use-precision-aware-optimizer --main-params-dtype fp16",
        },
        note="main weights are fp32, or as --main-params-dtype says",
    )
    """Precision of main weights under --use-megatron-fsdp."""
    megatron_fsdp_main_grads_dtype: str = flag(
        "auto",
        choices=("fp32", "bf16", "fp16", "auto"),
        refuse_values={"bf16": _BF16_GRADS, "fp16": _BF16_GRADS},
        note="gradients are summed in fp32, unless --grad-reduce-in-bf16 is given",
    )
    """Precision of main gradients under --use-megatron-fsdp."""
    megatron_fsdp_grad_comm_dtype: str = flag(
        "auto",
        choices=("fp32", "fp16", "bf16", "auto"),
        refuse_values={"bf16": _BF16_GRADS, "fp16": _BF16_GRADS},
        note="gradients are reduced in the precision in which they are summed",
    )
    """Precision in which gradients are reduced under --use-megatron-fsdp."""
    fsdp_manual_registration: bool = flag(False, note=TUNES_NETWORK)
    """Register buffers of --use-megatron-fsdp with NCCL before the first step."""
    data_parallel_sharding_strategy: str | None = flag(
        None,
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
    )
    """What is sharded over replicas: nothing, optimizer state (ZeRO-1), also gradients (ZeRO-2),
    also parameters (ZeRO-3). Default optim_grads_params with --use-megatron-fsdp, optim with
    --use-distributed-optimizer, else no_shard."""
    param_offload_path: str | None = None
    """Directory on a local disk: with optim_grads_params, keep the own shards of parameters in a
    file there, read ahead of use. For CPU ranks."""
    outer_dp_sharding_strategy: str = flag(
        "no_shard",
        choices=("no_shard", "optim"),
        refuse_values={"optim": "use --num-distributed-optimizer-instances: copies are whole"},
    )
    """What the copies of sharded state share among them."""
    use_torch_fsdp2: bool = False
    """Shard parameters, gradients and state with torch's fully_shard, a layer at a time."""
    fsdp_double_buffer: bool = flag(
        False, note="one layer computes and one is gathered in any case, never more"
    )
    """Keep two gathered layers."""
    use_nccl_ub: bool = flag(False, note=TUNES_NETWORK)
    """Register buffers with NCCL."""
    accumulate_allreduce_grads_in_fp32: bool = False
    """Accumulate and reduce gradients in fp32; on by itself with --bf16."""
    grad_reduce_in_bf16: bool = False
    """Reduce gradients in bf16 although weights are bf16."""
