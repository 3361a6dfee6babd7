"""The lines of a training log in Megatron's format, so that existing parsers can read them.

Fields that Megatron does not print (tokens per second, share of the peak, remaining time, shares of
time) follow Megatron's fields on the same line, in the same format `name: value |`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from megatron.training.metrics.prediction import StepPrediction


@dataclass(frozen=True, kw_only=True)
class TrainingLine:
    """The contents of a log line: means over the steps since the last line."""

    iteration: int
    train_iters: int
    consumed_samples: int
    seconds_per_step: float
    learning_rate: float
    global_batch_size: int
    losses: Mapping[str, float]
    loss_scale: float
    grad_norm: float | None = None
    num_zeros: float | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    decoupled_learning_rate: float | None = None
    num_skipped: int = 0
    num_nan: int = 0
    tflops_per_device: float | None = None
    """Rate of the operations that `metrics.flops` counts."""
    tokens_per_second_per_device: float | None = None
    mfu: float | None = None
    """Share of the device's peak."""
    time_shares: Mapping[str, float] = field(default_factory=dict)
    """Part of `hooks.times.PARTS` -> share of the time since the last line, mean of all ranks."""
    prediction: StepPrediction | None = None


def training_line(line: TrainingLine, now: datetime | None = None) -> str:
    """Format a line; like Megatron's lines it begins with a space."""
    stamp = (now or datetime.now()).strftime("%Y-%m-%d %H:%M:%S")
    cells = [
        f" [{stamp}] iteration {line.iteration:8d}/{line.train_iters:8d}",
        f"consumed samples: {line.consumed_samples:12d}",
        f"elapsed time per iteration (ms): {line.seconds_per_step * 1000.0:.1f}",
    ]
    if line.tflops_per_device is not None:
        cells.append(f"throughput per GPU (TFLOP/s/GPU): {_rate(line.tflops_per_device)}")
    cells.append(f"learning rate: {line.learning_rate:.6E}")
    if line.decoupled_learning_rate is not None:
        cells.append(f"decoupled learning rate: {line.decoupled_learning_rate:.6E}")
    cells.append(f"global batch size: {line.global_batch_size:5d}")
    cells += [f"{name}: {value:.6E}" for name, value in line.losses.items()]
    cells.append(f"loss scale: {line.loss_scale:.1f}")
    if line.grad_norm is not None:
        cells.append(f"grad norm: {line.grad_norm:.3f}")
    if line.num_zeros is not None:
        cells.append(f"num zeros: {int(line.num_zeros)}")
    if line.params_norm is not None:
        cells.append(f"params norm: {line.params_norm:.3f}")
    if line.max_attention_logit is not None:
        cells.append(f"max attention logit: {line.max_attention_logit:.3f}")
    cells.append(f"number of skipped iterations: {line.num_skipped:3d}")
    cells.append(f"number of nan iterations: {line.num_nan:3d}")
    if line.tokens_per_second_per_device is not None:
        cells.append(f"tokens/s/device: {line.tokens_per_second_per_device:.1f}")
    if line.tflops_per_device is not None:
        cells.append("FLOP count: causal")
    if line.mfu is not None:
        cells.append(f"MFU (causal): {100.0 * line.mfu:.1f}%")
    if line.prediction is not None:
        cells.append(line.prediction.cell())
    left_s = line.seconds_per_step * max(line.train_iters - line.iteration, 0)
    cells.append(f"ETA: {duration(left_s)}")
    cells += [f"{part}: {100.0 * share:.1f}%" for part, share in line.time_shares.items()]
    return " | ".join(cells) + " |"


def _rate(tflops: float) -> str:
    """Format a rate with one decimal, as Megatron does, or with four if it is small."""
    return f"{tflops:.1f}" if tflops >= 1.0 else f"{tflops:.4f}"


def duration(seconds: float) -> str:
    """Format seconds as 1d 02:03:04, or 02:03:04 below a day."""
    full = round(seconds)
    days, rest = divmod(full, 86400)
    clock = f"{rest // 3600:02d}:{rest // 60 % 60:02d}:{rest % 60:02d}"
    return f"{days}d {clock}" if days else clock


def validation_lines(where: str, losses: Mapping[str, float]) -> str:
    """Format the result of an evaluation between two rules of dashes.

    Args:
        where: for example "iteration 100 on validation set".
    """
    text = f" validation loss at {where} | "
    for name, value in losses.items():
        text += f"{name} value: {value:.6E} | {name} PPL: {perplexity(value):.6E} | "
    rule = "-" * (len(text) + 1)
    return f"{rule}\n{text}\n{rule}"


def perplexity(loss: float) -> float:
    """Return exp(loss), with losses above 20 counted as 20, as in Megatron."""
    return math.exp(min(20.0, loss))
