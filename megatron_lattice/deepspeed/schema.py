"""The keys of a DeepSpeed configuration file, with the effect of each key here.

A key has an effect, has no effect here (with the reason), or is refused (with an alternative). The
default value of a refused key is accepted, because it requests nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Union

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting."""

    kind: tuple[type, ...] = (int,)
    """Types of a value; bool does not pass for int, int passes for float."""
    default: Any = None
    """Value that a file without the key has. It is always accepted."""
    choices: tuple[Any, ...] = ()
    """All legal values, if they can be listed."""
    minimum: float | None = None
    """Smallest legal number."""
    length: int | None = None
    """Length of a list of numbers."""
    is_unbounded: bool = False
    """Whether infinity is legal, with the effect of null: Accelerate writes it."""
    no_effect: str = ""
    """Why the key has no effect here; empty if it has an effect."""
    refused: str = ""
    """Alternative to the key; any value but the default is refused."""
    refused_values: Mapping[Any, str] = field(default_factory=dict)
    """Value -> alternative, for single values that are refused."""


Schema = Mapping[str, Union[Key, "Schema"]]

_TUNES = "this library chooses the sizes of its buffers"
_TALK = "it only prints or draws; results are the same"
_DISK = "reads and writes of the state file always overlap"
LOCAL = "there is one implementation"
_STAGE3 = "stage 3 gathers layer by layer, at most two at a time"
REMOVED = "drop it: DeepSpeed has removed it"


def switch(default: bool | None = False, **options: Any) -> Key:
    """Return a key for true or false."""
    return Key(kind=(bool,), default=default, **options)


def count(default: int | None = None, minimum: float = 0, **options: Any) -> Key:
    """Return a key for a whole number of at least `minimum`."""
    return Key(kind=(int,), default=default, minimum=minimum, **options)


def number(default: float | None = None, minimum: float | None = None, **options: Any) -> Key:
    """Return a key for a number of at least `minimum`."""
    return Key(kind=(float,), default=default, minimum=minimum, **options)


def text(default: str | None = None, choices: tuple[str, ...] = (), **options: Any) -> Key:
    """Return a key for a string."""
    return Key(kind=(str,), default=default, choices=choices, **options)


def anything(**options: Any) -> Key:
    """Return a key for any value, which other code checks."""
    return Key(kind=(object,), **options)


def unused(reason: str, *names: str) -> Schema:
    """Return keys of any value that have no effect for one reason."""
    return {name: anything(no_effect=reason) for name in names}


_OFFLOAD_OPTIMIZER: Schema = {
    "device": text("none", ("none", "cpu", "nvme")),
    "nvme_path": text(),
    "ratio": number(1.0, 0.0),
    "pin_memory": switch(True, no_effect="host memory is pinned where copies need it"),
    "super_offload": switch(refused="use offload_optimizer.device cpu"),
    "cpuadam_cores_perc": number(0.8, no_effect="the update uses the threads of torch"),
    **unused(
        _DISK,
        "buffer_count", "buffer_size", "fast_init", "pipeline", "pipeline_read", "pipeline_write",
    ),
}  # fmt: skip

_OFFLOAD_PARAM: Schema = {
    "device": text("none", ("none", "cpu", "nvme")),
    "nvme_path": text(),
    **unused(
        _STAGE3,
        "pin_memory", "buffer_count", "buffer_size", "max_in_cpu",
    ),
}  # fmt: skip

_ZERO: Schema = {
    "stage": Key(kind=(int,), default=0, choices=(0, 1, 2, 3)),
    "overlap_comm": switch(),
    "reduce_bucket_size": count(500_000_000, 1),
    "mics_shard_size": Key(kind=(int,), default=-1, minimum=-1),
    "zero_quantized_gradients": switch(),
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "offload_param": _OFFLOAD_PARAM,
    "allgather_partitions": switch(True, no_effect="parameters are always all-gathered"),
    "parameter_alignment": switch(no_effect="shards begin at multiples of 128 elements"),
    "compute_grad_norm": switch(True, no_effect="the norm of the gradients is always computed"),
    "contiguous_gradients": switch(True, no_effect="gradients always are in flat buffers"),
    "reduce_scatter": switch(True, no_effect="sharded gradients are always reduce-scattered"),
    "round_robin_gradients": switch(no_effect="shards are equal on all ranks"),
    "ignore_unused_parameters": switch(True, no_effect="unused parameters are always allowed"),
    "elastic_checkpoint": switch(no_effect="any number of ranks loads any checkpoint"),
    "load_from_fp32_weights": switch(True, no_effect="main weights are always restored"),
    "legacy_stage1": switch(refused="drop it"),
    "cpu_offload": switch(refused='write "offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_param": switch(refused='write "offload_param": {"device": "cpu"}'),
    "cpu_offload_params": switch(refused='write "offload_param": {"device": "cpu"}'),
    "cpu_offload_use_pin_memory": switch(no_effect="host memory is pinned where copies need it"),
    "pipeline_loading_checkpoint": switch(no_effect=LOCAL),
    "override_module_apply": switch(True, no_effect="build the module before initialize"),
    "save_muon_momentum_buffer_in_memory": switch(no_effect="all optimizer state is kept"),
    "memory_efficient_linear": switch(True, no_effect="saved weights take no memory here"),
    "leaf_module": anything(no_effect="units are whole layers: routing inside a unit is allowed"),
    "zero_hpz_partition_size": count(
        1, refused="use mics_shard_size: state is sharded within a group and replicated across"
    ),
    "zero_quantized_weights": switch(refused="drop it: weights are sent in their own dtype"),
    "zero_quantized_nontrainable_weights": switch(refused="drop it"),
    "mics_hierarchical_params_gather": switch(no_effect="gathers stay within a shard group"),
    "log_trace_cache_warnings": switch(no_effect=_TALK),
    "enable_sanity_checks": switch(no_effect="checks that prevent a hang are always on"),
    "zeropp_loco_param": anything(refused=REMOVED),
    "zenflow": anything(refused="use offload_optimizer.device cpu"),
    **unused(
        _STAGE3,
        "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold", "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
        "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "prefetch_bucket_size", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params",
    ),
    **unused(
        _TUNES,
        "allgather_bucket_size", "allgather_sequential", "stage3_allgather_sequential",
        "use_multi_rank_bucket_allreduce", "sub_group_size",
    ),
    **unused(
        "save_16bit_model gathers the weights by itself",
        "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
    ),
}  # fmt: skip

_FP16: Schema = {
    "enabled": switch(),
    "auto_cast": switch(),
    "loss_scale": number(0.0, 0.0),
    "initial_scale_power": count(16),
    "loss_scale_window": count(1000, 1),
    "hysteresis": count(2, 1),
    "min_loss_scale": number(1.0, 0.0),
    "consecutive_hysteresis": switch(refused="drop it: tolerance is refilled when the scale grows"),
    "fp16_master_weights_and_grads": switch(refused="use bf16 with bf16_optimizer_states"),
    "loss_scale_raise_error_at_min": switch(True),
}

_BF16: Schema = {
    "enabled": switch(),
    "check_grad_overflow": switch(True),
    "bf16_optimizer_states": switch(),
    "bf16_master_weights_and_grads": switch(
        refused="use bf16_optimizer_states: main weights take 2 bytes there and lose nothing"
    ),
    "immediate_grad_update": switch(no_effect="gradients are always added during backward"),
    **{
        name: anything(refused="drop it: bf16 has the range of fp32 and needs no loss scale")
        for name in _FP16
        if "scale" in name or "hysteresis" in name
    },
}

_MONITOR: Schema = {"enabled": switch(), "output_path": text(), "job_name": text()}

_SPLIT = "drop it: the layers of pretrain_gpt.py define how they are split"
_DEEPCOMPILE = (
    "autoep_non_moe", "free_activation", "free_activation_threshold", "offload_activation",
    "offload_activation_pin_memory", "offload_opt_states", "offload_parameters", "double_buffer",
    "symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce",
    "sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors",
    "keep_all_input_tensors",
)  # fmt: skip

SCHEMA: Schema = {
    "train_batch_size": count(None, 1),
    "train_micro_batch_size_per_gpu": count(None, 1),
    "gradient_accumulation_steps": count(None, 1),
    "managed_gradient_accumulation": switch(True),
    "gradient_clipping": number(1.0, 0.0),
    "gradient_allreduce_op": text("mean", ("mean", "sum")),
    "communication_data_type": text(None, ("fp32", "bf16", "fp16")),
    "steps_per_print": count(None, 1, is_unbounded=True),
    "seq_parallel_communication_data_type": text(
        "fp32", ("fp32", "bf16", "fp16"), no_effect="all ranks reduce in communication_data_type"
    ),
    "use_data_before_expert_parallelism": switch(no_effect="a plain module has no experts"),
    "dump_state": switch(),
    "disable_python_gc": switch(no_effect="call gc.disable() in the script"),
    "log_level": text(no_effect=_TALK),
    "vocabulary_size": count(no_effect="the module defines it"),
    "zero_allow_untested_optimizer": switch(),
    "optimizer": {
        "type": text(),
        "params": anything(),
        "legacy_fusion": switch(no_effect=LOCAL),
    },
    "scheduler": {"type": text(), "params": anything()},
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": {
        "enabled": switch(),
        "dtype": text("bfloat16", ("bfloat16", "float16")),
        "lower_precision_safe_modules": anything(no_effect="gradients are sent in their own dtype"),
    },
    "data_types": {
        "grad_accum_dtype": text(None, ("fp32", "bf16", "fp16")),
        "param_dtype": text(refused='write "bf16": {"enabled": true}'),
        "buffer_dtype": text(refused="convert the buffers of the module"),
        "keep_in_fp32_modules": anything(refused="keep them in fp32 inside of their forward()"),
    },
    "zero_optimization": _ZERO,
    "tensor_parallel": {
        "autotp_size": count(0),
        "tp_size": count(0),
        "tensor_parallel": {
            "tp_size": count(1),
            "tp_grain_size": count(1, no_effect=_TUNES),
            "mpu": anything(refused=_SPLIT),
            "tp_group": anything(refused=_SPLIT),
        },
        "dtype": anything(no_effect="bf16.enabled and fp16.enabled determine it"),
        "vocab_parallel_lm_head": switch(None, no_effect=_SPLIT),
        "vocab_parallel_ce_backend": text("torch", ("torch", "liger"), no_effect=LOCAL),
        "injection_policy_tuple": anything(refused=_SPLIT),
        "keep_module_on_host": switch(no_effect="a plain module is replicated"),
        "replace_with_kernel_inject": switch(refused="drop it: this is for training"),
        "preset_model": text(no_effect=_SPLIT),
        "partition_config": anything(refused=_SPLIT),
        "tp_overlap_comm": switch(no_effect=_TUNES),
        "tp_grain_size": count(1, no_effect=_TUNES),
    },
    "sequence_parallel_size": count(1, 1),
    "data_parallel_size": count(None, 1),
    "dataloader_drop_last": switch(),
    "seed": count(None),
    "prescale_gradients": switch(no_effect="sums are computed in fp32: their order is safe"),
    "gradient_predivide_factor": number(1.0, no_effect="sums are computed in fp32"),
    "wall_clock_breakdown": switch(),
    "memory_breakdown": switch(no_effect=_TALK),
    "disable_allgather": switch(no_effect=LOCAL),
    "zero_force_ds_cpu_optimizer": switch(True, no_effect=LOCAL),
    "use_node_local_storage": switch(no_effect="checkpoints are written by all ranks together"),
    "aio": unused(
        _DISK, "block_size", "queue_depth", "thread_count", "intra_op_parallelism",
        "single_submit", "overlap_events", "use_gds",
    ),
    "activation_checkpointing": unused(
        "only deepspeed.checkpointing reads it, and it always recomputes",
        "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
        "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
    ),
    "checkpoint": {
        "tag_validation": text("Warn", no_effect="ranks always agree on the tag"),
        "load_universal": switch(no_effect="every checkpoint is universal"),
        "use_node_local_storage": switch(no_effect="all ranks write one checkpoint"),
        "parallel_write": anything(no_effect="all ranks always write"),
        "writer": anything(no_effect=LOCAL),
        "async_save": anything(no_effect=LOCAL),
    },
    "comms_logger": unused(_TALK, "enabled", "verbose", "prof_all", "prof_ops", "debug"),
    "flops_profiler": {
        "enabled": switch(),
        "profile_step": count(1, 1),
        "module_depth": Key(kind=(int,), default=-1, minimum=-1),
        "top_modules": count(1),
        "detailed": switch(True),
        "output_file": text(),
        "recompute_fwd_factor": number(0.0, no_effect="only operations that run are counted"),
    },
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": {"enabled": switch(), "group": text(), "team": text(), "project": text()},
    "comet": anything(no_effect="write to tensorboard, wandb or csv_monitor instead"),
    "monitor_config": anything(no_effect=_TALK),
    "timers": anything(no_effect=_TALK),
    "compile": {
        "enabled": switch(no_effect="call torch.compile on the model before initialize"),
        "backend": text(no_effect=LOCAL),
        "kwargs": anything(no_effect=LOCAL),
        "deepcompile": switch(refused="drop it"),
        "passes": anything(refused="drop it"),
        **unused("it only tunes deepcompile", *_DEEPCOMPILE),
    },
    "pipeline": anything(
        no_effect="a plain module is one stage; pretrain_gpt.py has pipelines"
        " --pipeline-model-parallel-size"
    ),
    "autotuning": anything(
        refused="plan with tools/memory_report.py, which starts no job"
    ),
    "data_efficiency": anything(refused="order the samples in your dataset"),
    "curriculum_learning": anything(refused=REMOVED),
    "expert_parallel": anything(refused="use pretrain_gpt.py --expert-model-parallel-size"),
    "compression_training": anything(refused=REMOVED),
    "sparse_attention": anything(refused=REMOVED),
    "sparse_gradients": switch(refused=REMOVED),
    "progressive_layer_drop": anything(refused=REMOVED),
    "eigenvalue": anything(refused=REMOVED),
    "quantize_training": anything(refused=REMOVED),
    "amp": anything(refused='use "bf16": {"enabled": true}'),
    "elasticity": anything(refused="drop it: any number of ranks loads any checkpoint"),
    "nebula": anything(refused="drop it: checkpoints are committed by a rename"),
    "weight_quantization": anything(refused="drop it: this is for training"),
    "hybrid_engine": {
        "enabled": switch(refused="drop it: this is for training"),
        **unused(
            "hybrid_engine.enabled is off", "max_out_tokens", "inference_tp_size",
            "release_inference_cache", "pin_parameters", "tp_gather_partition_size",
            "enable_cuda_graph",
        ),
    },
    "graph_harvesting": switch(refused=REMOVED),
}  # fmt: skip
"""Keys of the top level."""

RENAMED = {
    "bfloat16": "bf16",
    "flops_profile": "flops_profiler",
    "tp": "tensor_parallel",
    "kernel_inject": "replace_with_kernel_inject",
}
"""Other spellings of sections."""
