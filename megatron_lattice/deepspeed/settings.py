"""Derive settings of data parallelism and of the optimizer from a DeepSpeed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.foundation.errors import (
    ConfigError,
    MegatronError,
    raise_together,
    refuse_given,
)
from megatron.core.optimizer import OptimizerConfig
from megatron_lattice.deepspeed.comm import get_world_size
from megatron_lattice.deepspeed.components import OPTIMIZERS
from megatron_lattice.deepspeed.lr_schedules import BY_NAME, params_of_schedule
from megatron_lattice.deepspeed.reading import (
    ConfigSource,
    ReadSettings,
    collect,
    key_at,
    load_document,
)

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
KEYS = (TRAIN, MICRO, ACCUMULATION)
DEFAULT = "the default"
"""Source of a number that neither a key nor other numbers determine."""
OFFLOAD = "zero_optimization.offload_optimizer"
MICS = "zero_optimization.mics_shard_size"


@dataclass(frozen=True)
class BatchSizes:
    """Samples of a step: train = micro x accumulation x replicas."""

    train: int
    micro: int
    accumulation: int
    replicas: int
    sources: Mapping[str, str]
    """Key -> source of its number."""

    def describe(self) -> str:
        """Return the equation with the source of each number, one line each."""
        numbers = {TRAIN: self.train, MICRO: self.micro, ACCUMULATION: self.accumulation}
        lines = [f"{self.train} = {self.micro} x {self.accumulation} x {self.replicas} replicas"]
        lines += [f"{key} {number}: {self.sources[key]}" for key, number in numbers.items()]
        return "\n".join(lines)


def resolve_batch(
    train: int | None, micro: int | None, accumulation: int | None, *, replicas: int
) -> BatchSizes:
    """Derive the missing numbers.

    Args:
        train: samples of an optimizer step over all ranks.
        micro: samples of a forward pass of one rank.
        accumulation: forward passes of a step.
        replicas: data-parallel ranks.
    Raises:
        ConfigError: the numbers conflict; the message has the equation and numbers that fit.
    """
    given = {TRAIN: train, MICRO: micro, ACCUMULATION: accumulation}
    sources = {key: "given" for key, value in given.items() if value is not None}
    if train is None:
        if micro is None:
            micro, sources[MICRO] = 1, DEFAULT
        if accumulation is None:
            accumulation, sources[ACCUMULATION] = 1, DEFAULT
        train = micro * accumulation * replicas
        sources[TRAIN] = f"{MICRO} x {ACCUMULATION} x {replicas} replicas"
    elif micro is None and accumulation is None:
        accumulation, sources[ACCUMULATION] = 1, DEFAULT
        micro, sources[MICRO] = train // replicas, f"{TRAIN} / {replicas} replicas"
    elif micro is None:
        assert accumulation is not None
        micro = train // (accumulation * replicas)
        sources[MICRO] = f"{TRAIN} / ({ACCUMULATION} x {replicas} replicas)"
    elif accumulation is None:
        accumulation = train // (micro * replicas)
        sources[ACCUMULATION] = f"{TRAIN} / ({MICRO} x {replicas} replicas)"
    if train != micro * accumulation * replicas:
        raise _misfit(train, given, replicas)
    return BatchSizes(train, micro, accumulation, replicas, sources)


def _misfit(train: int, given: Mapping[str, int | None], replicas: int) -> ConfigError:
    factors = {key: value for key, value in given.items() if key != TRAIN and value is not None}
    unit = replicas
    for value in factors.values():
        unit *= value
    said = " x ".join(
        [*(f"{key} {value}" for key, value in factors.items()), f"{replicas} replicas"]
    )
    if len(factors) == 2:
        found = f"{TRAIN} {train} is not {said} = {unit}."
        fix = f"use {TRAIN} {unit}, or drop one of the three keys"
    else:
        found = f"{TRAIN} {train} cannot be divided by {said} = {unit}."
        below, above = train // unit * unit, -(-train // unit) * unit
        fix = f"use {TRAIN} " + (f"{below} or {above}" if below else f"{above}")
    return ConfigError(
        found,
        rule=f"{TRAIN} = {MICRO} x {ACCUMULATION} x data-parallel replicas",
        flags=list(KEYS),
        fix=fix,
    )


@dataclass(frozen=True)
class EngineSettings:
    """A checked configuration for a plain module on a number of replicas."""

    read: ReadSettings
    batch: BatchSizes
    resolved: tuple[str, ...]
    """One line for each "auto", with its value."""

    def __getitem__(self, path: str) -> Any:
        """Return the value of a key."""
        return self.read[path]

    @property
    def stage(self) -> int:
        """ZeRO stage, 0 to 3."""
        return int(self["zero_optimization.stage"])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's weights."""
        if self["fp16.enabled"]:
            return torch.float16
        return torch.bfloat16 if self["bf16.enabled"] else torch.float32

    @property
    def num_instances(self) -> int:
        """Number of copies of the sharded state: replicas / mics_shard_size."""
        size = self[MICS]
        return self.batch.replicas // size if size > 0 else 1

    @property
    def overlaps_reduction(self) -> bool:
        """Whether the last backward pass of a step reduces gradients while it runs."""
        is_on = self["zero_optimization.overlap_comm"] or self.stage == 3
        return bool(is_on and self["managed_gradient_accumulation"])

    def describe(self) -> str:
        """Return the resolved values and the keys without effect, for the log."""
        lines = [f"batch sizes: {line}" for line in self.batch.describe().split("\n")]
        lines += self.resolved
        lines += [f"{path} has no effect here: {why}" for path, why in sorted(
            self.read.without_effect.items()
        )]  # fmt: skip
        return "\n".join(lines)


def engine_settings(
    source: ConfigSource, *, replicas: int, model_dtype: torch.dtype = torch.float32
) -> EngineSettings:
    """Read a configuration for `deepspeed.initialize`.

    Args:
        replicas: data-parallel ranks.
        model_dtype: dtype of the weights; determines "auto" for fp16 and bf16.
    Raises:
        ConfigError: lists all problems.
    """
    read, problems = collect(source)
    hints = {
        "fp16.enabled": (model_dtype == torch.float16, "the dtype of the model"),
        "bf16.enabled": (model_dtype == torch.bfloat16, "the dtype of the model"),
    }
    resolved = resolve_auto(read, hints)
    batch = None
    try:
        batch = resolve_batch(read[TRAIN], read[MICRO], read[ACCUMULATION], replicas=replicas)
    except ConfigError as problem:
        problems.append(problem)
    problems += _plain_module_problems(read, replicas)
    raise_together(problems, summary="the DeepSpeed configuration")
    assert batch is not None
    return EngineSettings(read, batch, tuple(resolved))


def resolve_auto(read: ReadSettings, hints: Mapping[str, tuple[object, str]]) -> list[str]:
    """Replace every "auto" by its value, and return a line about each.

    Args:
        hints: path -> (value, source); every other key gets its default.
    """
    lines = []
    for path in read.auto:
        if path in hints:
            value, why = hints[path]
            read.given[path] = value
        elif path in (TRAIN, MICRO, ACCUMULATION):
            value, why = "derived", "the other batch sizes"
        elif ".params." in path:
            value, why = _default_param(read, path), "the default of its type"
        else:
            value, why = key_at(path).default, "the default"
        lines.append(f'{path}: "auto" -> {value} ({why})')
    return lines


def _default_param(read: ReadSettings, path: str) -> Any:
    """Return the value of an "auto" param: the default of its optimizer or schedule."""
    section, _, name = path.partition(".params.")
    kind = read.sections.get(section, {}).get("type", "")
    if section == "optimizer":
        return getattr(OPTIMIZERS.get(kind.lower(), {}).get(name), "default", None)
    known = {p.name: p.default for p in params_of_schedule(kind)} if kind in BY_NAME else {}
    default = known.get(name)
    return "the optimizer's" if default is None and name.endswith("_lr") else default


def _plain_module_problems(read: ReadSettings, replicas: int) -> list[MegatronError]:
    problems: list[MegatronError] = []
    flags = {
        "tensor_parallel.autotp_size": "--tensor-model-parallel-size",
        "tensor_parallel.tp_size": "--tensor-model-parallel-size",
        "tensor_parallel.tensor_parallel.tp_size": "--tensor-model-parallel-size",
        "sequence_parallel_size": "--context-parallel-size",
    }
    problems += [
        ConfigError(
            f"{path}: {read[path]} for a plain module.",
            rule="a module without declared splits is replicated",
            flags=[path],
            fix=f"use pretrain_gpt.py {flag} {read[path]}, or drop the key",
        )
        for path, flag in flags.items()
        if read[path] > 1
    ]
    size = read[MICS]
    if size > 0 and replicas % size:
        problems.append(
            ConfigError(
                f"{MICS}: {size} on {replicas} replicas.",
                rule="shard groups must have equal sizes",
                flags=[MICS],
                fix=f"use a divisor of {replicas}",
            )
        )
    wanted = read["data_parallel_size"]
    if wanted not in (None, replicas):
        problems.append(
            ConfigError(
                f"data_parallel_size: {wanted} on {replicas} replicas.",
                rule="a plain module has one replica for each process",
                flags=["data_parallel_size"],
                fix="drop the key",
            )
        )
    return problems


def data_parallel_config(settings: EngineSettings) -> DistributedDataParallelConfig:
    """Return how gradients are reduced and parameters are gathered."""
    read = settings.read
    compression = "none"
    if read["zero_optimization.zero_quantized_gradients"]:
        compression = "int8"
    elif read["communication_data_type"] == "bf16" and read["data_types.grad_accum_dtype"] in (
        None,
        "fp32",
    ):
        compression = "bf16"
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=read["data_types.grad_accum_dtype"] in (None, "fp32"),
        data_parallel_sharding_strategy=SHARDING_STRATEGIES[settings.stage],
        num_distributed_optimizer_instances=settings.num_instances,
        overlap_cpu_optimizer_d2h_h2d=bool(offload_settings(read))
        and read[f"{OFFLOAD}.ratio"] == 1.0,
        param_cpu_offload=read["zero_optimization.offload_param.device"] == "cpu",
        param_offload_path=read["zero_optimization.offload_param.nvme_path"]
        if read["zero_optimization.offload_param.device"] == "nvme"
        else None,
        bucket_size=read.given.get("zero_optimization.reduce_bucket_size"),
        grad_compression=compression,
    )


def optimizer_config(settings: EngineSettings) -> OptimizerConfig:
    """Return the optimizer settings of the file, or AdamW if the caller passes an optimizer."""
    read = settings.read
    section = read.sections.get("optimizer", {"type": "AdamW", "params": {}})
    name, given = section["type"].lower(), section["params"]
    schema = OPTIMIZERS.get(name, {})
    params = {
        key: given.get(key) if given.get(key) is not None else getattr(declared, "default", None)
        for key, declared in schema.items()
    }
    is_adam = name in ("adam", "adamw")
    values: dict[str, Any] = {
        "optimizer": "adam" if is_adam or name not in OPTIMIZERS else name,
        "lr": params.get("lr"),
        "weight_decay": params.get("weight_decay", 0.0),
        "clip_grad": read["gradient_clipping"],
        "use_distributed_optimizer": settings.stage > 0,
        "decoupled_weight_decay": name != "adam" or params["adam_w_mode"],
    }
    if is_adam or name == "muon":
        values["adam_eps"] = params["eps"]
        if params["betas"]:
            values |= {"adam_beta1": params["betas"][0], "adam_beta2": params["betas"][1]}
    if name == "lion":
        beta1, beta2 = params["betas"] or (0.9, 0.99)
        values |= {"lion_beta1": beta1, "lion_beta2": beta2}
    if name == "sgd":
        values["sgd_momentum"] = params["momentum"]
    if name == "muon":
        values |= {"muon_momentum": params["momentum"], "muon_num_ns_steps": params["ns_steps"]}
    return OptimizerConfig(**values, **precision_settings(read), **offload_settings(read))


def precision_settings(read: ReadSettings) -> dict[str, Any]:
    """Return the fields of `OptimizerConfig` for precision and loss scale."""
    is_fp16, is_bf16 = bool(read["fp16.enabled"]), bool(read["bf16.enabled"])
    values: dict[str, Any] = {"fp16": is_fp16, "bf16": is_bf16}
    if is_fp16:
        floor = float(read["fp16.min_loss_scale"])
        values |= {
            "loss_scale": read["fp16.loss_scale"] or None,
            "initial_loss_scale": max(2.0 ** read["fp16.initial_scale_power"], floor),
            "loss_scale_window": read["fp16.loss_scale_window"],
            "hysteresis": read["fp16.hysteresis"],
            "min_loss_scale": floor,
            "on_loss_scale_floor": "raise"
            if read["fp16.loss_scale_raise_error_at_min"]
            else "warn",
        }
    if is_bf16:
        values["on_nonfinite_grad"] = "skip" if read["bf16.check_grad_overflow"] else "raise"
        if read["bf16.bf16_optimizer_states"]:
            values |= {
                "use_precision_aware_optimizer": True,
                "exp_avg_dtype": torch.bfloat16,
                "exp_avg_sq_dtype": torch.bfloat16,
            }
    return values


def offload_settings(read: ReadSettings) -> dict[str, Any]:
    """Return the fields of `OptimizerConfig` for offloaded state."""
    device = read[f"{OFFLOAD}.device"]
    if device in (None, "none"):
        return {}
    place: dict[str, Any] = {"optimizer_offload_fraction": read[f"{OFFLOAD}.ratio"]}
    if device == "nvme":
        return place | {"optimizer_offload_path": read[f"{OFFLOAD}.nvme_path"]}
    return place | {"optimizer_cpu_offload": True}


_ATTRIBUTES = {
    "gradient_clipping": "gradient_clipping",
    "steps_per_print": "steps_per_print",
    "zero_optimization_stage": "zero_optimization.stage",
    "fp16_enabled": "fp16.enabled",
    "bfloat16_enabled": "bf16.enabled",
    "wall_clock_breakdown": "wall_clock_breakdown",
    "dump_state": "dump_state",
    "loss_scale": "fp16.loss_scale",
}


class DeepSpeedConfig:
    """`deepspeed.DeepSpeedConfig`: a checked configuration under DeepSpeed's attribute names.

    Args:
        config: file, mapping or base64 text; checked for the number of processes of this run.
        mpu, mesh_device: must be None: every process holds a replica.
    Raises:
        ConfigError: with all problems.
    """

    def __init__(
        self, config: ConfigSource, mpu: object = None, mesh_device: object = None
    ) -> None:
        given = {"mpu": mpu, "mesh_device": mesh_device}
        rule = "every process holds a replica of the module"
        refuse_given("DeepSpeedConfig", given, rule=rule, fix="train the model with pretrain()")
        self._param_dict = load_document(config)
        self.settings = engine_settings(config, replicas=get_world_size())
        batch, sections = self.settings.batch, self.settings.read.sections
        self.train_batch_size = batch.train
        self.train_micro_batch_size_per_gpu = batch.micro
        self.gradient_accumulation_steps = batch.accumulation
        self.zero_enabled = self.settings.stage > 0
        for part in ("optimizer", "scheduler"):
            section = sections.get(part, {"type": None, "params": None})
            setattr(self, f"{part}_name", section["type"])
            setattr(self, f"{part}_params", section["params"])

    def __getattr__(self, name: str) -> Any:
        if name in _ATTRIBUTES:
            return self.settings[_ATTRIBUTES[name]]
        raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
