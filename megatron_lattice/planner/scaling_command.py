"""Scaling curves of published models or of the flags of a run: text, CSV and pictures."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import ConfigError
from megatron.training.cli.parser import parse_command_line
from megatron.training.metrics.flops import training_flops
from megatron.training.metrics.model_size import ModelSize
from megatron_lattice import read_deepspeed_config
from megatron_lattice.planner.hardware import gpu_named
from megatron_lattice.planner.memory import GIB
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.scaling import (
    MODELS,
    ScaledModel,
    Scaling,
    ScalingFlags,
    ScalingPoint,
    efficiency,
    scaling_points,
)
from megatron_lattice.planner.search_command import WITHOUT_A_RUN, model_of_command
from megatron_lattice.planner.search_report import layout_text
from megatron_lattice.planner.training_cost import HOUR, TrainingCost, training_cost


@dataclass(frozen=True)
class Curve:
    """A model under one kind of scaling, with the cost of a training at each point."""

    points: list[ScalingPoint]
    costs: list[TrainingCost]


def scaling_curves(flags: ScalingFlags) -> list[Curve]:
    """Return the curves of all models, strong then weak; leave out curves without a point.

    Raises:
        ConfigError: an unknown GPU or model, or no layout fits at all.
    """
    predictor = load_predictor()
    gpu = gpu_named(flags.gpu, predictor.hardware)
    curves = []
    for model in scaled_models(flags):
        for scaling in Scaling:
            batch = flags.global_batch_size if scaling is Scaling.STRONG else flags.samples_per_gpu
            points = scaling_points(model, gpu, flags.num_gpus, scaling, batch, predictor)
            costs = [_cost(point, flags, gpu.watts) for point in points]
            if points:
                curves.append(Curve(points, costs))
    if not curves:
        raise ConfigError(
            f"nothing fits on {max(flags.num_gpus)} {gpu.name}.",
            rule="a curve needs a number of GPUs that a layout fits on",
            flags=["--num-gpus", "--gpu"],
            fix="allow more GPUs, or larger ones; `tools/plan.py search` lists changes that help",
        )
    return curves


def scaled_models(flags: ScalingFlags) -> list[ScaledModel]:
    """Return the models that the flags name.

    Raises:
        ConfigError: a name that is not in `MODELS`, or invalid flags.
    """
    if flags.flags_of_training:
        return [_scaled(_name_of(flags.flags_of_training), flags.flags_of_training, flags.gpu)]
    unknown = [name for name in flags.models if name not in MODELS]
    if unknown:
        raise ConfigError(
            f"model {unknown[0]!r} is not known.",
            rule=f"published models are {', '.join(MODELS)}",
            flags=["--models"],
            fix="name some of them, or give flags of pretrain_gpt.py in their place",
        )
    return [_scaled(name, _words(name), flags.gpu) for name in flags.models or MODELS]


def _words(name: str) -> list[str]:
    layers, hidden, heads, seq_length, vocab_size = MODELS[name]
    return shlex.split(
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --bf16"
        f" --seq-length {seq_length} --vocab-size {vocab_size}"
    )


def _name_of(words: Sequence[str]) -> str:
    """Return the name of the preset, if there is one."""
    if "--preset" in words[:-1]:
        return words[words.index("--preset") + 1]
    return "model"


def _scaled(name: str, words: Sequence[str], gpu: str) -> ScaledModel:
    defaults = {**WITHOUT_A_RUN, "global_batch_size": 1}
    command = parse_command_line(
        list(words), args_defaults=defaults, deepspeed_reader=read_deepspeed_config
    )
    run, row = model_of_command(command, gpu_named(gpu, load_predictor().hardware), 1)
    flops = training_flops(ModelSize.from_settings(run), 1)
    return ScaledModel(name, row, flops)


def _cost(point: ScalingPoint, flags: ScalingFlags, watts: float) -> TrainingCost:
    tokens_of_step = point.tokens_per_s * point.step_s
    return training_cost(
        step_s=point.step_s,
        num_steps=flags.train_tokens / tokens_of_step,
        num_gpus=point.num_gpus,
        watts=watts,
        failures=flags.failures,
        prices=flags.prices,
    )


def scaling_rows(curves: Sequence[Curve]) -> list[dict[str, str]]:
    """Return one row of text for each point, for `write_rows`."""
    rows = []
    for curve in curves:
        shares = efficiency(curve.points)
        for point, cost, share in zip(curve.points, curve.costs, shares, strict=True):
            rows.append(_row(point, cost, share))
    return rows


def _row(point: ScalingPoint, cost: TrainingCost, share: float) -> dict[str, str]:
    layout = point.layout
    sizes = {
        name: f"{getattr(layout, column)[0]:.0f}"
        for name, column in {
            "TP": "tensor_size", "PP": "pipeline_size", "CP": "context_size", "EP": "expert_size",
            "DP": "data_size", "VPP": "num_chunks", "MBS": "micro_batch_size",
            "zero": "sharding_stage",
        }.items()
    }  # fmt: skip
    numbers = {
        "step_s": point.step_s,
        "tokens_per_s": point.tokens_per_s,
        "tokens_per_s_per_gpu": point.tokens_per_s / point.num_gpus,
        "tflops_per_gpu_causal": point.flops_per_s_per_gpu / 1e12,
        "mfu_causal": point.mfu,
        "efficiency": share,
        "bubble_share": point.bubble_share,
        "exposed_share": point.exposed_share,
        "memory_GiB": point.memory_bytes / GIB,
        "steps": cost.num_steps,
        "days_without_failures": cost.days_without_failures,
        "days": cost.days,
        "mtbf_hours": cost.mtbf_hours,
        "checkpoint_interval_s": cost.checkpoint_interval_s,
        "lost_share": cost.lost_share,
        "gpu_hours": cost.gpu_hours,
        "kWh": cost.kwh,
        "money": cost.money,
        "kg_CO2": cost.kg_co2,
    }
    return {
        "model": point.model,
        "scaling": point.scaling.value,
        "gpu": point.gpu,
        "num_gpus": str(point.num_gpus),
        "global_batch_size": str(point.global_batch_size),
        **sizes,
        "recompute": str(layout.recompute[0]),
        "recompute_share": f"{layout.recompute_share[0]:.3g}",
        **{name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()},
    }


def write_rows(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Write rows of `scaling_rows` as CSV; create the directory if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def scaling_text(curves: Sequence[Curve], flags: ScalingFlags) -> str:
    """Return the curves as tables."""
    lines = []
    for curve in curves:
        first = curve.points[0]
        batch = (
            f"{first.global_batch_size} samples a step"
            if first.scaling is Scaling.STRONG
            else f"{flags.samples_per_gpu:g} samples a step and GPU"
        )
        lines += [
            f"{first.model}, {first.scaling.value} scaling on {first.gpu}: {batch},"
            f" {flags.train_tokens:.3g} tokens",
            f"{'GPUs':>6}{'s/step':>9}{'MFU':>7}{'of first':>9}{'days':>8}{'lost':>7}"
            f"{'checkpoint':>11}{'GPU hours':>11}{'MWh':>9}  layout",
        ]
        shares = efficiency(curve.points)
        for point, cost, share in zip(curve.points, curve.costs, shares, strict=True):
            lines.append(
                f"{point.num_gpus:>6}{point.step_s:>9.3f}{100 * point.mfu:>6.1f}%"
                f"{100 * share:>8.0f}%{cost.days:>8.1f}{100 * cost.lost_share:>6.1f}%"
                f"{cost.checkpoint_interval_s / HOUR * 60:>7.0f} min{cost.gpu_hours:>11.3g}"
                f"{cost.kwh / 1000:>9.3g}  {layout_text(point.layout, 0)}"
            )
        lines.append("")
    failures = flags.failures
    lines.append(
        "MFU: causal attention, no recomputation, 16-bit peak. lost: checkpoints of"
        f" {failures.checkpoint_s:g} s at the best interval, restarts of {failures.restart_s:g} s"
        f" and repeated steps, with a failure in {failures.gpu_mtbf_hours:g} GPU hours;"
        " contained in days, GPU hours and energy"
    )
    return "\n".join(lines)
