"""Megatron's dataclasses of training settings, for libraries that train with a loop of their own.

A field has the meaning and the default of Megatron's flag of the same name. Nothing here reads the
fields: this framework's own settings are `RunConfig`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(kw_only=True)
class TrainingConfig:
    """Batch size and length of a run, and its ends."""

    micro_batch_size: int | None = None
    global_batch_size: int | None = None
    rampup_batch_size: list[int] | None = None
    decrease_batch_size_if_needed: bool = False
    empty_unused_memory_level: Literal[0, 1, 2] = 0
    check_weight_hash_across_dp_replicas_interval: int | None = None
    train_sync_interval: int | None = None
    train_iters: int | None = None
    train_samples: int | None = None
    exit_interval: int | None = None
    exit_duration_in_mins: int | None = None
    exit_signal_handler: bool = False
    exit_signal: int = signal.SIGTERM
    exit_signal_handler_for_dataloader: bool = False
    manual_gc: bool = False
    manual_gc_interval: int = 0
    manual_gc_eval: bool = True
    iterations_to_skip: list[int] = field(default_factory=list)


@dataclass(kw_only=True)
class ValidationConfig:
    """Evaluation during and after training."""

    eval_iters: int | None = 100
    eval_interval: int | None = None
    start_eval_at_iter: int | None = None
    skip_train: bool = False
    eval_global_batch_size: int | None = None
    eval_micro_batch_size: int | None = None


@dataclass(kw_only=True)
class SchedulerConfig:
    """Schedules of the learning rate and of the weight decay."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_wsd_decay_iters: int | None = None
    lr_wsd_decay_samples: int | None = None
    lr_warmup_fraction: float | None = None
    lr_warmup_iters: int = 0
    lr_warmup_samples: int = 0
    lr_warmup_init: float = 0.0
    override_opt_param_scheduler: bool = False
    use_checkpoint_opt_param_scheduler: bool = False
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    no_weight_decay_cond_type: Literal["qwen3_next"] | None = None
    lr_warmup_steps: int | None = field(init=False, default=None)
    lr_decay_steps: int | None = field(init=False, default=None)
    wd_incr_steps: int | None = field(init=False, default=None)
    wsd_decay_steps: int | None = field(init=False, default=None)


@dataclass(kw_only=True)
class CheckpointConfig:
    """Saving and loading of checkpoints."""

    save: str | None = None
    save_interval: int | None = None
    save_retain_interval: int | None = None
    most_recent_k: int | None = -1
    save_optim: bool = True
    save_rng: bool = True
    load: str | None = None
    load_optim: bool = True
    load_main_params_from_ckpt: bool = False
    load_rng: bool = True
    non_persistent_save_interval: int | None = None
    non_persistent_ckpt_type: Literal["global", "local", "in_memory"] | None = None
    non_persistent_global_ckpt_dir: str | None = None
    non_persistent_local_ckpt_dir: str | None = None
    non_persistent_local_ckpt_algo: Literal["fully_parallel", "atomic"] = "fully_parallel"
    finetune: bool = False
    pretrained_checkpoint: str | None = None
    ckpt_step: int | None = None
    use_checkpoint_args: bool = False
    exit_on_missing_checkpoint: bool = False
    ckpt_format: Literal["torch", "torch_dist", "torch_dcp", "fsdp_dtensor"] = "torch_dist"
    ckpt_convert_format: Literal["torch", "torch_dist"] | None = None
    ckpt_convert_save: str | None = None
    fully_parallel_save: bool = True
    fully_parallel_load: bool = False
    async_save: bool = False
    async_ckpt_cpu_priority: int = 10
    async_ckpt_io_priority: int = 3
    ckpt_assume_constant_structure: bool = False
    dist_ckpt_strictness: str = "assume_ok_unexpected"
    dist_ckpt_optim_fully_reshardable: bool = False
    distrib_optim_fully_reshardable_mem_efficient: bool = False
    save_tokenizer_assets: bool = True
    replication: bool = False
    replication_jump: int | None = None
    replication_factor: int = 2


@dataclass(kw_only=True)
class LoggerConfig:
    """What is logged, how often, and where."""

    log_interval: int = 100
    log_params_norm: bool = False
    log_throughput: bool = False
    log_throughput_to_tensorboard: bool = False
    throughput_window_size: int = 100
    log_progress: bool = False
    log_energy: bool = False
    timing_log_level: Literal[-1, 0, 1, 2] = 0
    timing_log_option: Literal["max", "minmax", "all"] = "minmax"
    tensorboard_dir: str | None = None
    tensorboard_log_interval: int = 1
    tensorboard_queue_size: int = 1000
    log_timers_to_tensorboard: bool = False
    log_loss_scale_to_tensorboard: bool = True
    log_validation_ppl_to_tensorboard: bool = False
    log_memory_to_tensorboard: bool = False
    log_l2_norm_grad_to_tensorboard: bool = False
    log_runtime_to_tensorboard: bool = False
    log_world_size_to_tensorboard: bool = False
    memory_keys: dict[str, str] | None = None
    runtime_time_unit: str = "hours"
    wandb_project: str | None = None
    wandb_exp_name: str | None = None
    wandb_save_dir: str | None = None
    wandb_entity: str | None = None
    logging_level: int | None = None
    filter_warnings: bool = True
    modules_to_filter: list[str] | None = None
    set_level_for_all_loggers: bool = False
    save_config_filepath: str | None = None


@dataclass(kw_only=True)
class DistributedInitConfig:
    """How processes are connected."""

    distributed_backend: Literal["nccl", "gloo"] = "nccl"
    distributed_timeout_minutes: int = 10
    distributed_timeout_seconds_after_init: int | None = None
    align_grad_reduce: bool = True
    local_rank: int = field(default_factory=lambda: int(os.getenv("LOCAL_RANK", "0")))
    lazy_mpu_init: bool = False
    use_megatron_fsdp: bool = False
    use_torch_fsdp2: bool = False
    nccl_communicator_config_path: str | None = None
    use_tp_pp_dp_mapping: bool = False
    use_gloo_process_groups: bool = True
    use_sharp: bool = False
    sharp_enabled_group: Literal["dp", "dp_replica"] | None = None
    high_priority_stream_groups: list[str] | None = None
    disable_jit_fuser: bool = False
    flight_recorder_dump_path: str | None = None
    flight_recorder_trace_buffer_size: int = 2000
    flight_recorder_dump_on_timeout: bool = True
    flight_recorder_include_stack_trace: bool = False
    flight_recorder_include_only_active: bool = True
    flight_recorder_extra_dump_on_exec: bool = True


@dataclass(kw_only=True)
class RNGConfig:
    """Random numbers."""

    seed: int = 1234
    te_rng_tracker: bool = False
    inference_rng_tracker: bool = False
    data_parallel_random_init: bool = False


@dataclass(kw_only=True)
class ProfilingConfig:
    """Profilers, and the steps that they record."""

    use_nsys_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    use_pytorch_profiler: bool = False
    profile_ranks: list[int] = field(default_factory=list)
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"
    record_shapes: bool = False
    nvtx_ranges: bool = False


@dataclass(kw_only=True)
class RerunStateMachineConfig:
    """Checks of results, and errors that are injected to test the checks."""

    error_injection_rate: int = 0
    error_injection_type: Literal["correct_result", "transient_error", "persistent_error"] = (
        "transient_error"
    )
    rerun_mode: Literal["disabled", "validate_results", "report_determinism_stats"] = (
        "validate_results"
    )
    check_for_nan_in_loss: bool = True
    check_for_spiky_loss: bool = False


@dataclass(kw_only=True)
class StragglerDetectionConfig:
    """Search for slow ranks."""

    log_straggler: bool = False
    straggler_ctrlr_port: int = 65535
    straggler_minmax_count: int = 1
    disable_straggler_on_startup: bool = False


@dataclass(kw_only=True)
class TokenizerConfig:
    """A tokenizer and its files."""

    tokenizer_type: str | None = None
    tokenizer_model: str | Path | None = None
    metadata_path: str | dict[str, Any] | None = None
    vocab_size: int | None = None
    padded_vocab_size: int | None = None
    pad_vocab_size: bool = True
    make_vocab_size_divisible_by: int = 128
    vocab_file: str | None = None
    merge_file: str | None = None
    vocab_extra_ids: int = 0
    special_tokens: list[str] | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    tokenizer_hf_no_use_fast: bool = False
    tokenizer_hf_no_include_special_tokens: bool = False
    tokenizer_sentencepiece_legacy: bool = False
    tiktoken_pattern: str | None = None
    tiktoken_num_special_tokens: int = 1000
    tiktoken_special_tokens: list[str] | None = None
    null_tokenizer_eod_id: int | None = None
    null_tokenizer_pad_id: int | None = None
    legacy_tokenizer: bool = False
