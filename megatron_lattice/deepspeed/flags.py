"""Flags from a DeepSpeed configuration, for --deepspeed_config.

Each key of the configuration sets the flag of the same meaning. If the command line sets the flag
too, both values must be equal: a conflict is an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.training.config.run import all_flags
from megatron.training.launch import rank_info
from megatron_lattice.deepspeed.monitors import destination_of
from megatron_lattice.deepspeed.reading import ReadSettings, collect
from megatron_lattice.deepspeed.settings import (
    ACCUMULATION,
    DEFAULT,
    MICRO,
    TRAIN,
    BatchSizes,
    EngineSettings,
    data_parallel_config,
    optimizer_config,
    resolve_batch,
)

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_REPLICATION = (
    "num_distributed_optimizer_instances", "param_cpu_offload", "param_offload_path",
    "overlap_cpu_optimizer_d2h_h2d", "grad_compression",
)  # fmt: skip
_PRECISION = (
    "fp16", "bf16", "loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis",
    "min_loss_scale", "on_loss_scale_floor", "use_precision_aware_optimizer",
    "optimizer_cpu_offload", "optimizer_offload_path", "optimizer_offload_fraction",
)  # fmt: skip
_RULE = (
    "optimizer", "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps", "lion_beta1",
    "lion_beta2", "sgd_momentum", "muon_momentum", "muon_num_ns_steps",
)  # fmt: skip
_STYLES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}


def read_deepspeed_config(
    path: str, given: Mapping[str, object]
) -> tuple[dict[str, Any], list[str]]:
    """Translate a configuration into flags. "auto" leaves a setting to the flags.

    Args:
        given: field name -> value of the command line and the YAML file.
    Returns:
        (field name -> value, one line for each key that has no effect).
    Raises:
        ConfigError: lists all problems of the file, and all conflicts with `given`.
    """
    read, problems = collect(path, resolves_auto=True)
    values: dict[str, Any] = {}
    problems += _not_here(read)
    if not problems:
        values = _values(read, given, problems)
    problems += [
        ConfigError(
            f"{all_flags()[name].flag} {given[name]} conflicts with {value} in {path}.",
            rule="a flag and the DeepSpeed configuration must not conflict",
            flags=[all_flags()[name].flag, "--deepspeed_config"],
            fix=f"drop {all_flags()[name].flag}, or change the file",
        )
        for name, value in values.items()
        if name in given and given[name] != value
    ]
    raise_together(problems, summary=path)
    return values, _notes(read)


def _notes(read: ReadSettings) -> list[str]:
    """Return one line for each key that the loop of pretrain_gpt.py ignores."""
    ignored = dict(read.without_effect)
    if read["csv_monitor.enabled"]:
        ignored["csv_monitor.enabled"] = "--metrics-jsonl FILE writes every logged step"
    if read["flops_profiler.enabled"]:
        ignored["flops_profiler.enabled"] = (
            "--log-throughput prints rates, and --dry-run the operations of each part of the model"
        )
    if read["wandb.group"]:
        ignored["wandb.group"] = "--wandb-exp-name names a run"
    if "warmup_type" not in read.sections.get("scheduler", {"params": "warmup_type"})["params"]:
        ignored["scheduler"] = "warm-up is linear; DeepSpeed's default is logarithmic"
    return [f"{key} of the DeepSpeed configuration: {why}." for key, why in ignored.items()]


def _not_here(read: ReadSettings) -> list[MegatronError]:
    problems: list[MegatronError] = []

    def refuse(path: str, found: object, fix: str) -> None:
        problems.append(
            ConfigError(
                f"{path}: {found}.",
                rule="the loop of pretrain_gpt.py supports only one setting",
                flags=[path],
                fix=fix,
            )
        )

    if read["gradient_allreduce_op"] == "sum":
        refuse("gradient_allreduce_op", "sum", "drop it: gradients are means over tokens")
    if not read["managed_gradient_accumulation"]:
        refuse("managed_gradient_accumulation", "false", "drop it: the loop counts micro batches")
    if read["torch_autocast.enabled"]:
        refuse("torch_autocast.enabled", "true", "use bf16")
    optimizer = read.sections.get("optimizer")
    if optimizer is not None:
        name = optimizer["type"]
        if name.lower() not in ("adam", "adamw", "lion", "muon", "sgd"):
            refuse("optimizer.type", name, "use AdamW, Lion, Muon or SGD")
        if name.lower() == "adam" and optimizer["params"].get("adam_w_mode") is False:
            refuse("optimizer.params.adam_w_mode", "false", "drop it: decay is decoupled")
    scheduler = read.sections.get("scheduler")
    if scheduler is not None:
        name, params = scheduler["type"], scheduler["params"]
        if name not in _STYLES:
            refuse("scheduler.type", name, f"use {', '.join(_STYLES)}")
        elif params.get("warmup_type") == "log":
            refuse("scheduler.params.warmup_type", "log", 'write "warmup_type": "linear"')
    return problems


def _values(
    read: ReadSettings, given: Mapping[str, Any], problems: list[MegatronError]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, field in (
        ("tensor_parallel.autotp_size", "tensor_model_parallel_size"),
        ("tensor_parallel.tp_size", "tensor_model_parallel_size"),
        ("tensor_parallel.tensor_parallel.tp_size", "tensor_model_parallel_size"),
        ("sequence_parallel_size", "context_parallel_size"),
        ("steps_per_print", "log_interval"),
        ("seed", "seed"),
    ):
        if read.given.get(key):
            values[field] = read[key]
    if read["tensorboard.enabled"]:
        values["tensorboard_dir"] = os.fspath(destination_of(read, "tensorboard"))
    if read["wandb.enabled"]:
        values["wandb_project"] = read["wandb.project"] or "deepspeed"
        if read["wandb.team"]:
            values["wandb_entity"] = read["wandb.team"]
    if read["wall_clock_breakdown"]:
        values["timing_log_level"] = 2
    batch = _batch(read, {**values, **given}, values, problems)
    if batch is None:
        return values
    settings = EngineSettings(read, batch, ())
    replication = data_parallel_config(settings)
    if settings.stage:
        values["data_parallel_sharding_strategy"] = replication.data_parallel_sharding_strategy
        values["use_distributed_optimizer"] = True
    if settings.overlaps_reduction:
        values["overlap_grad_reduce"] = True
    if replication.bucket_size is not None:
        values["ddp_bucket_size"] = replication.bucket_size
    config = optimizer_config(settings)
    if "gradient_clipping" in read.given:
        values["clip_grad"] = config.clip_grad
    for source, names in ((replication, _REPLICATION), (config, _PRECISION)):
        usual = type(source)()
        found = {name: getattr(source, name) for name in names}
        values |= {n: value for n, value in found.items() if value != getattr(usual, n)}
    for name in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if getattr(config, name) != torch.float32:
            values[name] = _DTYPES[getattr(config, name)]
    if "optimizer" in read.sections:
        params = read.sections["optimizer"]["params"]
        values |= {name: getattr(config, name) for name in _RULE if _decides(name, params, config)}
    return values | _schedule(read, config.lr)


def _decides(name: str, params: Mapping[str, Any], config: Any) -> bool:
    """Return whether the file sets a parameter of the update rule."""
    if name in ("lr", "weight_decay"):
        return params.get(name) is not None
    if name.startswith("adam_beta"):
        return bool(params.get("betas")) and config.optimizer in ("adam", "muon")
    if name.startswith("lion_beta"):
        return config.optimizer == "lion"
    if name == "adam_eps":
        return params.get("eps") is not None
    if name in ("sgd_momentum", "muon_momentum", "muon_num_ns_steps"):
        return name.startswith(config.optimizer)
    return True


def _batch(
    read: ReadSettings,
    known: Mapping[str, Any],
    values: dict[str, Any],
    problems: list[MegatronError],
) -> BatchSizes | None:
    """Set the batch sizes that the file determines; parallel sizes determine the replicas."""
    world = known.get("dry_run_world_size") or rank_info.read_rank_info().world_size
    model = 1
    for name in (
        "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    ):  # fmt: skip
        model *= known.get(name) or 1
    replicas = max(1, world // model)
    try:
        batch = resolve_batch(read[TRAIN], read[MICRO], read[ACCUMULATION], replicas=replicas)
    except ConfigError as problem:
        problems.append(problem)
        return None
    if any(read[key] is not None for key in (TRAIN, MICRO, ACCUMULATION)):
        # The flags decide a size that the file leaves to DeepSpeed's default.
        if batch.sources[MICRO] != DEFAULT:
            values["micro_batch_size"] = batch.micro
        if read[TRAIN] is not None or read[ACCUMULATION] is not None:
            values["global_batch_size"] = batch.train
    return batch


def _schedule(read: ReadSettings, lr: float | None) -> dict[str, Any]:
    section = read.sections.get("scheduler")
    if section is None:
        return {}
    name, params = section["type"], section["params"]
    values: dict[str, Any] = {"lr_decay_style": _STYLES[name]}
    if params.get("warmup_num_steps") is not None:
        values["lr_warmup_iters"] = params["warmup_num_steps"]
    if params.get("total_num_steps") is not None:
        values["lr_decay_iters"] = params["total_num_steps"]
    if params.get("warmup_max_lr") is not None:
        values["lr"] = float(params["warmup_max_lr"])
    if params.get("warmup_min_lr"):
        values["lr_warmup_init"] = float(params["warmup_min_lr"])
        if name == "WarmupDecayLR":
            values["min_lr"] = float(params["warmup_min_lr"])
    if name == "WarmupCosineLR" and lr is not None:
        values["min_lr"] = params.get("cos_min_ratio", 1e-4) * lr
        values["lr_warmup_init"] = params.get("warmup_min_ratio", 0.0) * lr
    return values
