"""Settings of the optimizer. Names and defaults are Megatron's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.distributed.distributed_data_parallel_config import ShardedOptimizerFlags
from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.optimizer.definition import (
    SCALE_MODES,
    TP_MODES,
    UpdateFlags,
    UpdateSettings,
)
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.settings.config_base import check_all, choice_problems, range_problems
from megatron.core.settings.field_types import check_types
from megatron.core.settings.flags import flag
from megatron.core.settings.inert_flags import (
    refused_settings,
    warn_of_unused_settings,
    with_inert_fields,
)

STATE_DTYPES = {
    "main_params_dtype": (torch.float32, torch.float16),
    "exp_avg_dtype": (torch.float32, torch.bfloat16, torch.float16, torch.uint8),
    "exp_avg_sq_dtype": (torch.float32, torch.bfloat16, torch.float16, torch.uint8),
}
"""uint8 means fp8, as in Megatron."""
NONFINITE_POLICIES = ("raise", "skip")
FLOOR_POLICIES = ("raise", "skip", "warn")
DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}
"""Names of the dtypes of optimizer state in flags."""
_MEGATRON_OPTIMIZERS = ("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon")
_NO_OPTIMIZER = "use --optimizer muon"
_ELEMENTWISE_OPTIMIZERS = tuple(sorted(name for name, each in OPTIMIZERS.items() if each.update))


@dataclass
class OptimizerFlags(UpdateFlags):
    """Optimizer, learning rate, clipping, loss scale, and storage of state."""

    optimizer: str = flag(
        "adam",
        choices=tuple(dict.fromkeys((*_MEGATRON_OPTIMIZERS, *OPTIMIZERS))),
        refuse_values={
            "soap": _NO_OPTIMIZER,
            "adaptive_muon": _NO_OPTIMIZER,
        },
    )
    """"adam" (with decoupled weight decay: AdamW, arXiv 1711.05101), "sgd", "lion" (arXiv
    2302.06675) or "muon" (matrices; the rest by `muon_scalar_optimizer`). On the command line
    "dist_muon" is muon with a sharded state."""
    min_lr: float | None = flag(None, cli_default=0.0)
    """Lowest learning rate of the schedule."""
    decoupled_lr: float | None = None
    """Separate learning rate of the input embedding and the output head."""
    decoupled_min_lr: float | None = None
    """Lowest value of the separate learning rate."""
    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of the query and key norms as well."""

    use_precision_aware_optimizer: bool = False
    """Store moments and main weights in the dtypes below. With fp32 main weights, a bf16 model
    stores only their difference from its own weights, which takes two bytes and is exact."""
    main_grads_dtype: torch.dtype = flag(
        torch.float32,
        values={"fp32": DTYPES["fp32"], "bf16": DTYPES["bf16"]},
        part_of="use_precision_aware_optimizer",
    )
    """Dtype of main gradients, which the data-parallel wrapper sets (grad_reduce_in_fp32)."""
    main_params_dtype: torch.dtype = flag(
        torch.float32,
        values={"fp32": DTYPES["fp32"], "fp16": DTYPES["fp16"]},
        part_of="use_precision_aware_optimizer",
    )
    """Dtype of main weights: float32, or float16 with a scale per block."""
    exp_avg_dtype: torch.dtype = flag(
        torch.float32,
        values=DTYPES,
        part_of="use_precision_aware_optimizer",
    )
    """Dtype of the first moment: float32, bfloat16, float16 or uint8 (which means fp8)."""
    exp_avg_sq_dtype: torch.dtype = flag(
        torch.float32,
        values=DTYPES,
        part_of="use_precision_aware_optimizer",
    )
    """Dtype of the second moment, with the same choices as the first."""

    loss_scale: float | None = None
    """Constant loss scale; None scales dynamically with fp16, and not at all otherwise."""
    initial_loss_scale: float = flag(2.0**32, part_of="fp16")
    """First value of the dynamic scale."""
    min_loss_scale: float = flag(1.0, part_of="fp16")
    """Smallest dynamic loss scale."""
    loss_scale_window: float = flag(1000, part_of="fp16")
    """The dynamic scale doubles after this number of good steps in a row."""
    hysteresis: int = flag(2, part_of="fp16")
    """The dynamic scale is halved after this number of overflows."""
    on_loss_scale_floor: str = flag("warn", choices=("raise", "skip", "warn"), part_of="fp16")
    """Reaction to an overflow at the smallest loss scale: raise stops the run, skip skips the step,
    warn also logs a warning with what to change."""

    muon_scalar_optimizer: str = flag("adam", choices=_ELEMENTWISE_OPTIMIZERS, part_of="optimizer")
    """Optimizer of the parameters that are not hidden matrices under Muon: embeddings, head, norms,
    biases."""

    optimizer_cpu_offload: bool = False
    """Store optimizer state in host memory, and compute the update there."""
    optimizer_offload_path: str | None = None
    """Directory on a local disk: store optimizer state in a file there, which is read and written
    during the update. Takes a few MiB of host memory."""
    optimizer_offload_fraction: float = 1.0
    """Share of the parameters whose state is offloaded."""

    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 turns clipping off."""
    log_num_zeros_in_grad: bool = False
    """Count and log the zeros in the gradient, which reads it once more."""


@dataclass
@with_inert_fields("optimizer")
class OptimizerConfig(OptimizerFlags, UpdateSettings, HalfPrecision, ShardedOptimizerFlags):
    """Settings of the flags, and settings for callers of the library only."""

    on_nonfinite_grad: str = "raise"
    """Reaction of a step without loss scaling to gradients that are not finite: "raise" a
    NumericsError on all ranks, or "skip" the update and return False. The weights do not change
    either way."""
    timers: Any = None
    """`megatron.core.timers.Timers` or None."""

    @property
    def offloads_optimizer(self) -> bool:
        """Whether optimizer state leaves the device."""
        return self.optimizer_cpu_offload or self.optimizer_offload_path is not None

    def __post_init__(self) -> None:
        """Raise all problems together."""
        check_types(self)
        check_all(self, [_check_update, _check_precision, _check_state, refused_settings])
        warn_of_unused_settings(self)


def _check_update(config: OptimizerConfig) -> Iterator[MegatronError]:
    limits: list[tuple[str, str, float, float | None]] = [
        ("adam_beta1", "--adam-beta1", 0.0, 1.0),
        ("adam_beta2", "--adam-beta2", 0.0, 1.0),
        ("sgd_momentum", "--sgd-momentum", 0.0, 1.0),
        ("lion_beta1", "--lion-beta1", 0.0, 1.0),
        ("lion_beta2", "--lion-beta2", 0.0, 1.0),
        ("muon_momentum", "--muon-momentum", 0.0, 1.0),
        ("muon_num_ns_steps", "--muon-num-ns-steps", 1, None),
        ("muon_extra_scale_factor", "--muon-extra-scale-factor", 0.0, None),
        ("clip_grad", "--clip-grad", 0.0, None),
        ("weight_decay", "--weight-decay", 0.0, None),
        ("adam_eps", "--adam-eps", 0.0, None),
    ]
    yield from range_problems(config, limits)
    choices = [
        ("optimizer", tuple(OPTIMIZERS)),
        ("muon_scale_mode", SCALE_MODES),
        ("muon_tp_mode", TP_MODES),
        ("muon_scalar_optimizer", _ELEMENTWISE_OPTIMIZERS),
        ("on_nonfinite_grad", NONFINITE_POLICIES),
        ("on_loss_scale_floor", FLOOR_POLICIES),
    ]
    yield from choice_problems(config, choices)


def _check_precision(config: OptimizerConfig) -> Iterator[MegatronError]:
    yield from config.check_precision()
    if config.loss_scale is not None and not config.loss_scale > 0:
        yield ConfigError(
            f"loss_scale={config.loss_scale}.",
            rule="a loss scale is positive",
            flags=["--loss-scale"],
            fix="drop --loss-scale to scale dynamically",
        )
    if not 0 < config.min_loss_scale <= config.initial_loss_scale:
        yield ConfigError(
            f"min_loss_scale={config.min_loss_scale} and"
            f" initial_loss_scale={config.initial_loss_scale}.",
            rule="the dynamic scale begins at or above its positive floor",
            flags=["--min-loss-scale", "--initial-loss-scale"],
            fix="use a smaller --min-loss-scale",
        )
    if config.loss_scale_window < 1 or config.hysteresis < 1:
        yield ConfigError(
            f"loss_scale_window={config.loss_scale_window}, hysteresis={config.hysteresis}.",
            rule="both count steps and are at least 1",
            flags=["--loss-scale-window", "--hysteresis"],
            fix="use --loss-scale-window 1000 --hysteresis 2",
        )


def _check_state(config: OptimizerConfig) -> Iterator[MegatronError]:
    """Check dtypes and places of state."""
    for name, known in STATE_DTYPES.items():
        value = getattr(config, name)
        spelling = "--" + name.replace("_", "-")
        if value not in known:
            yield ConfigError(
                f"{name}={value}.",
                rule=f"{name} is one of {', '.join(map(str, known))}",
                flags=[spelling],
                fix=f"drop {spelling} to use float32",
            )
        elif value != torch.float32 and not config.use_precision_aware_optimizer:
            yield ConfigError(
                f"{name}={value} without use_precision_aware_optimizer.",
                rule="only the precision-aware optimizer stores state in other types than fp32",
                flags=[spelling, "--use-precision-aware-optimizer"],
                fix="add --use-precision-aware-optimizer",
            )
    for is_on, what, rule, flags, fix in (
        (
            config.use_precision_aware_optimizer,
            "use_precision_aware_optimizer",
            "only optimizers that update elements independently work in low precision",
            ["--use-precision-aware-optimizer"],
            "drop --use-precision-aware-optimizer, or use --optimizer lion",
        ),
        (
            config.offloads_optimizer,
            "offloaded optimizer state",
            "only optimizers that update elements independently can offload their state",
            ["--optimizer-cpu-offload", "--optimizer-offload-path"],
            "use --use-distributed-optimizer to shard it over data-parallel ranks",
        ),
    ):
        if is_on and config.optimizer not in _ELEMENTWISE_OPTIMIZERS:
            found = f"{what} with optimizer={config.optimizer!r}."
            yield ConfigError(found, rule=rule, flags=[*flags, "--optimizer"], fix=fix)
    if not 0.0 <= config.optimizer_offload_fraction <= 1.0:
        yield ConfigError(
            f"optimizer_offload_fraction={config.optimizer_offload_fraction}.",
            rule="a share is in [0, 1]",
            flags=["--optimizer-offload-fraction"],
            fix="drop it to offload everything",
        )
