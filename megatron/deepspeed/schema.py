"""The keys of a DeepSpeed configuration file, and what becomes of each of them here.

A key acts, or has no effect here (and says why), or is refused with what to use instead. A value
that a refused key has by default is accepted: it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Union

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Key:
    """One setting."""

    kind: tuple[type, ...] = (int,)
    """Types of a value; bool does not pass for int, int passes for float."""
    default: Any = None
    """What a file without the key means. Always accepted."""
    choices: tuple[Any, ...] = ()
    """All legal values, where they can be listed."""
    least: float | None = None
    """Smallest legal number."""
    no_effect: str = ""
    """Why nothing follows from it here; empty: it acts."""
    refused: str = ""
    """What to use instead; any value but the default is refused."""


Schema = Mapping[str, Union[Key, "Schema"]]

_TUNES = "the buffers of this library are sized by themselves"
_TALK = "it prints or draws only; results are the same"
_DISK = "reads and writes of the state file overlap by themselves"
_LOCAL = "there is one implementation"
_STAGE3 = "stage 3 gathers layer by layer, at most two at a time"
_REMOVED = "drop it: DeepSpeed itself has removed it"


def _switch(default: bool = False, **facts: Any) -> Key:
    return Key(kind=(bool,), default=default, **facts)


def _count(default: int | None = None, least: float = 0, **facts: Any) -> Key:
    return Key(kind=(int,), default=default, least=least, **facts)


def _number(default: float | None = None, least: float | None = None, **facts: Any) -> Key:
    return Key(kind=(float,), default=default, least=least, **facts)


def _text(default: str | None = None, choices: tuple[str, ...] = (), **facts: Any) -> Key:
    return Key(kind=(str,), default=default, choices=choices, **facts)


def _anything(**facts: Any) -> Key:
    return Key(kind=(object,), **facts)


_OFFLOAD_OPTIMIZER: Schema = {
    "device": _text("none", ("none", "cpu", "nvme")),
    "nvme_path": _text(),
    "ratio": _number(1.0, 0.0),
    "pin_memory": _switch(True, no_effect="host memory is pinned where copies need it"),
    "buffer_count": _count(4, no_effect=_DISK),
    "buffer_size": _count(100_000_000, no_effect=_DISK),
    "fast_init": _switch(no_effect=_DISK),
    "pipeline": _switch(no_effect=_DISK),
    "pipeline_read": _switch(no_effect=_DISK),
    "pipeline_write": _switch(no_effect=_DISK),
    "super_offload": _switch(refused="use offload_optimizer.device cpu"),
    "cpuadam_cores_perc": _number(0.8, no_effect="the update uses the threads of torch"),
}

_OFFLOAD_PARAM: Schema = {
    "device": _text(
        "none",
        ("none", "cpu", "nvme"),
        refused="drop offload_param: stage 3 keeps 1/N of the parameters on each rank, and"
        " offload_optimizer takes the larger part of the state away",
    ),
    "nvme_path": _text(no_effect=_STAGE3),
    "pin_memory": _switch(True, no_effect=_STAGE3),
    "buffer_count": _count(5, no_effect=_STAGE3),
    "buffer_size": _count(100_000_000, no_effect=_STAGE3),
    "max_in_cpu": _count(1_000_000_000, no_effect=_STAGE3),
}

_ZERO: Schema = {
    "stage": Key(kind=(int,), default=0, choices=(0, 1, 2, 3)),
    "overlap_comm": _switch(),
    "reduce_bucket_size": _count(500_000_000, 1),
    "mics_shard_size": Key(kind=(int,), default=-1, least=-1),
    "zero_quantized_gradients": _switch(),
    "offload_optimizer": _OFFLOAD_OPTIMIZER,
    "offload_param": _OFFLOAD_PARAM,
    "allgather_bucket_size": _count(500_000_000, 1, no_effect=_TUNES),
    "allgather_partitions": _switch(True, no_effect="parameters are always all-gathered"),
    "allgather_sequential": _switch(no_effect=_TUNES),
    "contiguous_gradients": _switch(True, no_effect="gradients always lie in flat buffers"),
    "reduce_scatter": _switch(True, no_effect="sharded gradients are always reduce-scattered"),
    "use_multi_rank_bucket_allreduce": _switch(True, no_effect=_TUNES),
    "round_robin_gradients": _switch(no_effect="shards are equal on all ranks"),
    "ignore_unused_parameters": _switch(True, no_effect="unused parameters are always allowed"),
    "elastic_checkpoint": _switch(no_effect="any number of ranks loads any checkpoint"),
    "load_from_fp32_weights": _switch(True, no_effect="main weights are always restored"),
    "legacy_stage1": _switch(refused="drop it"),
    "cpu_offload": _switch(refused='write "offload_optimizer": {"device": "cpu"}'),
    "cpu_offload_params": _switch(refused="drop it: parameters are sharded instead (stage 3)"),
    "cpu_offload_use_pin_memory": _switch(no_effect="host memory is pinned where copies need it"),
    "sub_group_size": _count(1_000_000_000, 1, no_effect=_TUNES),
    "stage3_max_live_parameters": _count(1_000_000_000, no_effect=_STAGE3),
    "stage3_max_reuse_distance": _count(1_000_000_000, no_effect=_STAGE3),
    "stage3_prefetch_bucket_size": _count(50_000_000, no_effect=_STAGE3),
    "stage3_param_persistence_threshold": _count(100_000, no_effect=_STAGE3),
    "stage3_model_persistence_threshold": _count(no_effect=_STAGE3),
    "stage3_module_granularity_threshold": _count(0, no_effect=_STAGE3),
    "stage3_use_all_reduce_for_fetch_params": _switch(no_effect=_STAGE3),
    "stage3_gather_16bit_weights_on_model_save": _switch(
        no_effect="save_16bit_model gathers what it needs"
    ),
    "stage3_gather_fp16_weights_on_model_save": _switch(
        no_effect="save_16bit_model gathers what it needs"
    ),
    "memory_efficient_linear": _switch(True, no_effect="saved weights take no memory here"),
    "leaf_module": _anything(no_effect="units are whole layers: routing inside is free"),
    "zero_hpz_partition_size": _count(
        1, 1, refused="use mics_shard_size: state is sharded inside of it and copied across"
    ),
    "zero_quantized_weights": _switch(refused="drop it: weights travel in their own dtype"),
    "zero_quantized_nontrainable_weights": _switch(refused="drop it"),
    "mics_hierarchical_params_gather": _switch(no_effect="gathers stay inside of a shard group"),
    "log_trace_cache_warnings": _switch(no_effect=_TALK),
    "enable_sanity_checks": _switch(no_effect="checks that prevent a hang are always on"),
    "param_persistence_threshold": _count(no_effect=_STAGE3),
    "model_persistence_threshold": _count(no_effect=_STAGE3),
    "max_live_parameters": _count(no_effect=_STAGE3),
    "max_reuse_distance": _count(no_effect=_STAGE3),
    "prefetch_bucket_size": _count(no_effect=_STAGE3),
    "gather_16bit_weights_on_model_save": _switch(no_effect="it gathers what it needs"),
    "zeropp_loco_param": _anything(refused=_REMOVED),
    "zenflow": _anything(refused="use offload_optimizer.device cpu"),
}

_FP16: Schema = {
    "enabled": _switch(),
    "auto_cast": _switch(),
    "loss_scale": _number(0.0, 0.0),
    "initial_scale_power": _count(16),
    "loss_scale_window": _count(1000, 1),
    "hysteresis": _count(2, 1),
    "min_loss_scale": _number(1.0, 0.0),
    "consecutive_hysteresis": _switch(
        refused="drop it: tolerance is refilled when the scale grows"
    ),
    "fp16_master_weights_and_grads": _switch(refused="use bf16 with bf16_optimizer_states"),
    "loss_scale_raise_error_at_min": _switch(True),
}

_BF16: Schema = {
    "enabled": _switch(),
    "check_grad_overflow": _switch(True),
    "bf16_optimizer_states": _switch(),
    "bf16_master_weights_and_grads": _switch(
        refused="use bf16_optimizer_states: main weights cost 2 bytes there and lose nothing"
    ),
    "immediate_grad_update": _switch(no_effect="gradients are always added during backward"),
}

_MONITOR: Schema = {
    "enabled": _switch(no_effect="the engine writes no files: read its get_lr() and so on"),
    "output_path": _text(no_effect=_TALK),
    "job_name": _text(no_effect=_TALK),
    "group": _text(no_effect=_TALK),
    "team": _text(no_effect=_TALK),
    "project": _text(no_effect=_TALK),
}

SCHEMA: Schema = {
    "train_batch_size": _count(None, 1),
    "train_micro_batch_size_per_gpu": _count(None, 1),
    "gradient_accumulation_steps": _count(None, 1),
    "managed_gradient_accumulation": _switch(True),
    "gradient_clipping": _number(1.0, 0.0),
    "gradient_allreduce_op": _text("mean", ("mean", "sum")),
    "communication_data_type": _text(None, ("fp32", "bf16", "fp16")),
    "steps_per_print": _count(None, 1),
    "dump_state": _switch(),
    "zero_allow_untested_optimizer": _switch(),
    "optimizer": {
        "type": _text(),
        "params": _anything(),
        "legacy_fusion": _switch(no_effect=_LOCAL),
    },
    "scheduler": {"type": _text(), "params": _anything()},
    "fp16": _FP16,
    "bf16": _BF16,
    "torch_autocast": {
        "enabled": _switch(),
        "dtype": _text("bfloat16", ("bfloat16", "float16")),
        "lower_precision_safe_modules": _anything(no_effect="gradients travel in their own dtype"),
    },
    "data_types": {
        "grad_accum_dtype": _text(None, ("fp32", "bf16", "fp16")),
        "keep_in_fp32_modules": _anything(refused="keep them in fp32 inside of their forward()"),
    },
    "zero_optimization": _ZERO,
    "tensor_parallel": {
        "autotp_size": _count(0),
        "tp_size": _count(0),
        "preset_model": _text(no_effect="layers know how they are split"),
        "partition_config": _anything(refused="layers know how they are split: drop it"),
        "tp_overlap_comm": _switch(no_effect=_TUNES),
        "tp_grain_size": _count(1, no_effect=_TUNES),
    },
    "sequence_parallel_size": _count(1, 1),
    "data_parallel_size": _count(None, 1),
    "dataloader_drop_last": _switch(),
    "seed": _count(None),
    "prescale_gradients": _switch(no_effect="sums are formed in fp32: their order is safe"),
    "gradient_predivide_factor": _number(1.0, no_effect="sums are formed in fp32"),
    "wall_clock_breakdown": _switch(no_effect=_TALK),
    "memory_breakdown": _switch(no_effect=_TALK),
    "disable_allgather": _switch(no_effect=_LOCAL),
    "zero_force_ds_cpu_optimizer": _switch(True, no_effect=_LOCAL),
    "use_node_local_storage": _switch(no_effect="checkpoints are written by all ranks together"),
    "aio": {
        name: _anything(no_effect=_DISK)
        for name in (
            "block_size", "queue_depth", "thread_count", "intra_op_parallelism", "single_submit",
            "overlap_events", "use_gds",
        )
    },
    "activation_checkpointing": {
        name: _anything(no_effect="it is read by deepspeed.checkpointing alone, which recomputes")
        for name in (
            "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization",
            "number_checkpoints", "synchronize_checkpoint_boundary", "profile",
        )
    },
    "checkpoint": {
        "tag_validation": _text("Warn", no_effect="ranks always agree on the tag"),
        "load_universal": _switch(no_effect="every checkpoint is universal"),
        "use_node_local_storage": _switch(no_effect="all ranks write one checkpoint"),
        "parallel_write": _anything(no_effect="all ranks always write"),
        "writer": _anything(no_effect=_LOCAL),
        "async_save": _anything(no_effect=_LOCAL),
    },
    "comms_logger": {
        name: _anything(no_effect=_TALK)
        for name in ("enabled", "verbose", "prof_all", "prof_ops", "debug")
    },
    "flops_profiler": {
        name: _anything(no_effect=_TALK)
        for name in (
            "enabled", "profile_step", "module_depth", "top_modules", "detailed", "output_file",
            "recompute_fwd_factor",
        )
    },
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "wandb": _MONITOR,
    "comet": _anything(no_effect=_TALK),
    "monitor_config": _anything(no_effect=_TALK),
    "timers": _anything(no_effect=_TALK),
    "compile": {
        "enabled": _switch(no_effect="call torch.compile on the model before initialize"),
        "backend": _text(no_effect=_LOCAL),
        "kwargs": _anything(no_effect=_LOCAL),
        "deepcompile": _switch(refused="drop it"),
        "passes": _anything(refused="drop it"),
    },
    "pipeline": _anything(
        no_effect="a plain module is one stage; pretrain_gpt.py has"
        " --pipeline-model-parallel-size"
    ),
    "autotuning": _anything(
        refused="plan with tools/memory_report.py, which starts no job"
    ),
    "data_efficiency": _anything(refused="order the samples in your dataset"),
    "curriculum_learning": _anything(refused=_REMOVED),
    "expert_parallel": _anything(refused="use pretrain_gpt.py --expert-model-parallel-size"),
    "compression_training": _anything(refused=_REMOVED),
    "sparse_attention": _anything(refused=_REMOVED),
    "sparse_gradients": _switch(refused=_REMOVED),
    "progressive_layer_drop": _anything(refused=_REMOVED),
    "eigenvalue": _anything(refused=_REMOVED),
    "quantize_training": _anything(refused=_REMOVED),
    "amp": _anything(refused='use "bf16": {"enabled": true}'),
    "elasticity": _anything(refused="drop it: any number of ranks loads any checkpoint"),
    "nebula": _anything(refused="drop it: checkpoints are committed by a rename"),
    "hybrid_engine": _anything(refused="drop it: this is for training"),
    "graph_harvesting": _switch(refused=_REMOVED),
}  # fmt: skip
"""The top level."""

RENAMED = {"bfloat16": "bf16", "flops_profile": "flops_profiler"}
"""Other spellings of sections."""

_BETAS = Key(kind=(list,), default=None)
_DECAY = _number(0.0, 0.0)
_ADAM: Schema = {
    "lr": _number(1e-3, 0.0),
    "betas": _BETAS,
    "eps": _number(1e-8, 0.0),
    "weight_decay": _DECAY,
    "bias_correction": _switch(True, refused="drop it: moments are always corrected"),
    "amsgrad": _switch(refused="pass a torch.optim.AdamW of your own"),
    "adam_w_mode": _switch(True),
    "torch_adam": _switch(no_effect=_LOCAL),
    "fused": _switch(no_effect="the fused kernel is always used"),
    "freeze_step": _count(refused=_REMOVED),
}

OPTIMIZERS: Mapping[str, Schema] = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "lion": {"lr": _number(1e-4, 0.0), "betas": _BETAS, "weight_decay": _DECAY},
    "muon": {
        "lr": _number(1e-3, 0.0),
        "momentum": _number(0.95, 0.0),
        "weight_decay": _DECAY,
        "ns_steps": _count(5, 1),
        "muon_lr": _number(None, 0.0),
        "adam_lr": _number(None, 0.0),
        "betas": _BETAS,
        "eps": _number(1e-8, 0.0),
    },
    "sgd": {
        "lr": _number(1e-3, 0.0),
        "momentum": _number(0.0, 0.0),
        "weight_decay": _DECAY,
        "dampening": _number(0.0, refused="pass a torch.optim.SGD of your own"),
        "nesterov": _switch(refused="pass a torch.optim.SGD of your own"),
    },
}
"""optimizer.type in small letters -> its params. Any other name of torch.optim takes what its
class takes."""

REFUSED_OPTIMIZERS = {
    "lamb": "its step looks at whole tensors of weights; use AdamW",
    "fusedlamb": "its step looks at whole tensors of weights; use AdamW",
    "onebitadam": 'use AdamW with "zero_quantized_gradients": true (int8, errors fed back)',
    "onebitlamb": 'use AdamW with "zero_quantized_gradients": true (int8, errors fed back)',
    "zerooneadam": 'use AdamW with "zero_quantized_gradients": true (int8, errors fed back)',
    "muadam": "use AdamW with groups of parameters of their own lr",
    "muadamw": "use AdamW with groups of parameters of their own lr",
    "musgd": "use SGD with groups of parameters of their own lr",
}

_WARMUP_TYPE = _text("log", ("log", "linear"))
SCHEDULERS: Mapping[str, Schema] = {
    "WarmupLR": {
        "warmup_min_lr": _anything(),
        "warmup_max_lr": _anything(),
        "warmup_num_steps": _count(1000),
        "warmup_type": _WARMUP_TYPE,
        "last_batch_iteration": Key(kind=(int,), default=-1),
    },
    "WarmupDecayLR": {
        "total_num_steps": _count(None, 1),
        "warmup_min_lr": _anything(),
        "warmup_max_lr": _anything(),
        "warmup_num_steps": _count(1000),
        "warmup_type": _WARMUP_TYPE,
        "last_batch_iteration": Key(kind=(int,), default=-1),
    },
    "WarmupCosineLR": {
        "total_num_steps": _count(None, 1),
        "warmup_min_ratio": _number(0.0, 0.0),
        "warmup_num_steps": _count(1000),
        "cos_min_ratio": _number(1e-4, 0.0),
        "warmup_type": _WARMUP_TYPE,
        "last_batch_iteration": Key(kind=(int,), default=-1),
    },
    "OneCycle": {
        "cycle_min_lr": _number(None, 0.0),
        "cycle_max_lr": _number(None, 0.0),
        "decay_lr_rate": _number(0.0, 0.0),
        "cycle_first_step_size": _count(2000, 1),
        "cycle_second_step_size": _count(None, 1),
        "cycle_first_stair_count": _count(0),
        "cycle_second_stair_count": _count(None),
        "decay_step_size": _count(0),
        "cycle_momentum": _switch(True),
        "cycle_min_mom": _number(0.8, 0.0),
        "cycle_max_mom": _number(0.9, 0.0),
        "decay_mom_rate": _number(0.0, 0.0),
        "last_batch_iteration": Key(kind=(int,), default=-1),
    },
    "LRRangeTest": {
        "lr_range_test_min_lr": _anything(),
        "lr_range_test_step_size": _count(2000, 1),
        "lr_range_test_step_rate": _number(1.0, 0.0),
        "lr_range_test_staircase": _switch(),
        "last_batch_iteration": Key(kind=(int,), default=-1),
    },
}
"""scheduler.type -> its params."""

REQUIRED = {
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
}
"""Params without which a schedule is not defined."""
