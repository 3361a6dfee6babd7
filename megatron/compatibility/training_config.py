"""Megatron's dataclasses of training settings, for libraries that train with a loop of their own.

A field has the meaning and the default of Megatron's flag of the same name. Nothing here reads the
fields: this framework's own settings are `RunConfig`.
"""

from __future__ import annotations

import os
import signal
from dataclasses import field, make_dataclass
from typing import Any


def _config(name: str, doc: str, **defaults: Any) -> type:
    """Return a dataclass whose fields are given by keyword.

    Args:
        defaults: field -> its default. A type is None or a value of this type; `...` is None and
            not an argument; a list or a function makes the default of each object.
    """
    fields: list[tuple[str, Any, Any]] = []
    for key, value in defaults.items():
        if isinstance(value, type):
            fields.append((key, value | None, None))
        elif value is ...:
            fields.append((key, Any, field(init=False, default=None)))
        elif isinstance(value, list) or callable(value):
            made = value.copy if isinstance(value, list) else value
            fields.append((key, Any, field(default_factory=made)))
        else:
            fields.append((key, type(value), value))
    result = make_dataclass(name, fields, namespace={"__doc__": doc}, kw_only=True)
    result.__module__ = __name__
    return result


TrainingConfig = _config(
    "TrainingConfig",
    "Batch size and length of a run, and its ends.",
    micro_batch_size=int, global_batch_size=int, rampup_batch_size=list,
    decrease_batch_size_if_needed=False, empty_unused_memory_level=0,
    check_weight_hash_across_dp_replicas_interval=int, train_sync_interval=int, train_iters=int,
    train_samples=int, exit_interval=int, exit_duration_in_mins=int, exit_signal_handler=False,
    exit_signal=signal.SIGTERM, exit_signal_handler_for_dataloader=False, manual_gc=False,
    manual_gc_interval=0, manual_gc_eval=True, iterations_to_skip=[],
)  # fmt: skip

ValidationConfig = _config(
    "ValidationConfig",
    "Evaluation during and after training.",
    eval_iters=100, eval_interval=int, start_eval_at_iter=int, skip_train=False,
    eval_global_batch_size=int, eval_micro_batch_size=int,
)  # fmt: skip

SchedulerConfig = _config(
    "SchedulerConfig",
    "Schedules of the learning rate and of the weight decay.",
    lr_decay_style="linear", lr_wsd_decay_style="exponential", lr_decay_iters=int,
    lr_decay_samples=int, lr_wsd_decay_iters=int, lr_wsd_decay_samples=int,
    lr_warmup_fraction=float, lr_warmup_iters=0, lr_warmup_samples=0, lr_warmup_init=0.0,
    override_opt_param_scheduler=False, use_checkpoint_opt_param_scheduler=False,
    start_weight_decay=float, end_weight_decay=float, weight_decay_incr_style="constant",
    no_weight_decay_cond_type=str, lr_warmup_steps=..., lr_decay_steps=...,
    wd_incr_steps=..., wsd_decay_steps=...,
)  # fmt: skip

CheckpointConfig = _config(
    "CheckpointConfig",
    "Saving and loading of checkpoints.",
    save=str, save_interval=int, save_retain_interval=int, most_recent_k=-1, save_optim=True,
    save_rng=True, load=str, load_optim=True, load_main_params_from_ckpt=False, load_rng=True,
    non_persistent_save_interval=int, non_persistent_ckpt_type=str,
    non_persistent_global_ckpt_dir=str, non_persistent_local_ckpt_dir=str,
    non_persistent_local_ckpt_algo="fully_parallel", finetune=False, pretrained_checkpoint=str,
    ckpt_step=int, use_checkpoint_args=False, exit_on_missing_checkpoint=False,
    ckpt_format="torch_dist", ckpt_convert_format=str, ckpt_convert_save=str,
    fully_parallel_save=True, fully_parallel_load=False, async_save=False,
    async_ckpt_cpu_priority=10, async_ckpt_io_priority=3, ckpt_assume_constant_structure=False,
    dist_ckpt_strictness="assume_ok_unexpected", dist_ckpt_optim_fully_reshardable=False,
    distrib_optim_fully_reshardable_mem_efficient=False, save_tokenizer_assets=True,
    replication=False, replication_jump=int, replication_factor=2,
)  # fmt: skip

LoggerConfig = _config(
    "LoggerConfig",
    "What is logged, how often, and where.",
    log_interval=100, log_params_norm=False, log_throughput=False,
    log_throughput_to_tensorboard=False, throughput_window_size=100, log_progress=False,
    log_energy=False, timing_log_level=0, timing_log_option="minmax", tensorboard_dir=str,
    tensorboard_log_interval=1, tensorboard_queue_size=1000, log_timers_to_tensorboard=False,
    log_loss_scale_to_tensorboard=True, log_validation_ppl_to_tensorboard=False,
    log_memory_to_tensorboard=False, log_l2_norm_grad_to_tensorboard=False,
    log_runtime_to_tensorboard=False, log_world_size_to_tensorboard=False, memory_keys=dict,
    runtime_time_unit="hours", wandb_project=str, wandb_exp_name=str, wandb_save_dir=str,
    wandb_entity=str, logging_level=int, filter_warnings=True, modules_to_filter=list,
    set_level_for_all_loggers=False, save_config_filepath=str,
)  # fmt: skip

DistributedInitConfig = _config(
    "DistributedInitConfig",
    "How processes are connected.",
    distributed_backend="nccl", distributed_timeout_minutes=10,
    distributed_timeout_seconds_after_init=int, align_grad_reduce=True,
    local_rank=lambda: int(os.getenv("LOCAL_RANK", "0")),
    lazy_mpu_init=False, use_megatron_fsdp=False, use_torch_fsdp2=False,
    nccl_communicator_config_path=str, use_tp_pp_dp_mapping=False, use_gloo_process_groups=True,
    use_sharp=False, sharp_enabled_group=str, high_priority_stream_groups=list,
    disable_jit_fuser=False, flight_recorder_dump_path=str,
    flight_recorder_trace_buffer_size=2000, flight_recorder_dump_on_timeout=True,
    flight_recorder_include_stack_trace=False, flight_recorder_include_only_active=True,
    flight_recorder_extra_dump_on_exec=True,
)  # fmt: skip

RNGConfig = _config(
    "RNGConfig",
    "Random numbers.",
    seed=1234, te_rng_tracker=False, inference_rng_tracker=False,
    data_parallel_random_init=False,
)  # fmt: skip

ProfilingConfig = _config(
    "ProfilingConfig",
    "Profilers, and the steps that they record.",
    use_nsys_profiler=False, profile_step_start=10, profile_step_end=12,
    use_pytorch_profiler=False, profile_ranks=[], record_memory_history=False,
    memory_snapshot_path="snapshot.pickle", record_shapes=False, nvtx_ranges=False,
)  # fmt: skip

RerunStateMachineConfig = _config(
    "RerunStateMachineConfig",
    "Checks of results, and errors that are injected to test the checks.",
    error_injection_rate=0, error_injection_type="transient_error",
    rerun_mode="validate_results", check_for_nan_in_loss=True, check_for_spiky_loss=False,
)  # fmt: skip

StragglerDetectionConfig = _config(
    "StragglerDetectionConfig",
    "Search for slow ranks.",
    log_straggler=False, straggler_ctrlr_port=65535, straggler_minmax_count=1,
    disable_straggler_on_startup=False,
)  # fmt: skip

TokenizerConfig = _config(
    "TokenizerConfig",
    "A tokenizer and its files.",
    tokenizer_type=str, tokenizer_model=object, metadata_path=object, vocab_size=int,
    padded_vocab_size=int, pad_vocab_size=True, make_vocab_size_divisible_by=128,
    vocab_file=str, merge_file=str, vocab_extra_ids=0, special_tokens=list, chat_template=str,
    trust_remote_code=False, tokenizer_hf_no_use_fast=False,
    tokenizer_hf_no_include_special_tokens=False, tokenizer_sentencepiece_legacy=False,
    tiktoken_pattern=str, tiktoken_num_special_tokens=1000, tiktoken_special_tokens=list,
    null_tokenizer_eod_id=int, null_tokenizer_pad_id=int, legacy_tokenizer=False,
)  # fmt: skip
