"""Predicted strong and weak scaling: the fastest layout for each number of GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import numpy as np

from megatron.core.settings.flags import flag, unknown_words
from megatron_lattice.planner.hardware import Gpu, rows_hardware
from megatron_lattice.planner.layout_search import on_gpus, search_layouts
from megatron_lattice.planner.layout_space import Choices
from megatron_lattice.planner.predictor import Predictor
from megatron_lattice.planner.step_time import Parts, predict_step
from megatron_lattice.planner.training_cost import Failures, Prices
from megatron_lattice.planner.workload import Workloads


class Scaling(Enum):
    """Which batch is constant while GPUs are added."""

    STRONG = "strong"
    """The global batch."""
    WEAK = "weak"
    """The batch per GPU."""


# Layers, hidden size, heads, sequence, vocabulary. The first four: Narayanan et al., "Efficient
# Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (arXiv 2104.04473), Table
# 1. The others: the scaling measurements of Megatron-Core 0.8 on H100.
MODELS: Mapping[str, tuple[int, int, int, int, int]] = {
    "1.7B": (24, 2304, 24, 2048, 51200),
    "3.6B": (30, 3072, 32, 2048, 51200),
    "7.5B": (36, 4096, 32, 2048, 51200),
    "39.1B": (48, 8192, 64, 2048, 51200),
    "16B": (32, 6144, 48, 4096, 131072),
    "70B": (84, 8192, 64, 4096, 131072),
    "119B": (92, 10240, 80, 4096, 131072),
    "177B": (96, 12288, 96, 4096, 131072),
    "462B": (112, 18432, 144, 4096, 131072),
}
"""Published dense models of Megatron's scaling measurements."""

COUNTS = tuple(2**power for power in range(3, 15))
"""8 to 16,384 GPUs."""


@dataclass(frozen=True, kw_only=True)
class ScalingFlags:
    """Scale published models, or the flags of pretrain_gpt.py that follow, over numbers of GPUs."""

    gpu: str = flag(metavar="KIND")
    """A100, H100, H200, B200 ..."""
    models: tuple[str, ...] = ()
    """Published models by size, for example 1.7B 462B; all by default."""
    num_gpus: tuple[int, ...] = COUNTS
    global_batch_size: int = 2048
    """Samples of a step, for strong scaling."""
    samples_per_gpu: float = 1.0
    """Samples of a step for each GPU, for weak scaling."""
    train_tokens: float = 1e12
    """Tokens of the training whose cost is printed."""
    output: Path | None = flag(None, metavar="CURVES.csv")
    pictures: Path | None = flag(None, metavar="DIR")
    """Write scaling.png, and scaling.html that opens offline."""
    failures: Failures = Failures()
    prices: Prices = Prices()
    flags_of_training: tuple[str, ...] = unknown_words()


@dataclass(frozen=True)
class ScaledModel:
    """A model to scale.

    Attributes:
        row: a table of one row, see `run_workload.workload_of_run`.
        flops_of_sample: forward and backward, causal attention.
    """

    name: str
    row: Workloads
    flops_of_sample: float


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """The fastest layout of a model on a number of GPUs."""

    model: str
    scaling: Scaling
    gpu: str
    num_gpus: int
    global_batch_size: int
    layout: Workloads
    """A table of one row."""
    step_s: float
    memory_bytes: float
    tokens_per_s: float
    flops_per_s_per_gpu: float
    mfu: float
    """Model FLOPs over the peak of 16-bit products: causal attention, no recomputation."""
    bubble_share: float
    exposed_share: float
    """Share of the step that is exposed communication."""


def scaling_points(
    model: ScaledModel,
    gpu: Gpu,
    counts: Sequence[int],
    scaling: Scaling,
    batch: float,
    predictor: Predictor,
) -> list[ScalingPoint]:
    """Search the fastest layout for each number of GPUs; skip numbers without a layout that fits.

    Args:
        batch: samples of a step: in all for strong scaling, per GPU for weak scaling.
    """
    found = []
    for num_gpus in counts:
        samples = batch if scaling is Scaling.STRONG else max(round(batch * num_gpus), 1)
        row = on_gpus(model.row, gpu, num_gpus)
        row = row.replace(global_batch_size=np.array([float(samples)]))
        searched = search_layouts(row, Choices(), predictor)
        if not len(searched.order):
            continue
        best = int(searched.order[0])
        layout, seconds = searched.table.take(np.array([best])), searched.seconds[best]
        parts = Parts.of(predict_step(layout, predictor.hardware), np.array([seconds]))
        rate = model.flops_of_sample * samples / seconds / num_gpus
        peak = rows_hardware(layout, predictor.hardware).peak_16_bit_flops[0]
        found.append(
            ScalingPoint(
                model=model.name,
                scaling=scaling,
                gpu=gpu.name,
                num_gpus=num_gpus,
                global_batch_size=int(samples),
                layout=layout,
                step_s=float(seconds),
                memory_bytes=float(searched.memory[best]),
                tokens_per_s=float(samples * row.seq_length[0] / seconds),
                flops_per_s_per_gpu=float(rate),
                mfu=float(rate / peak),
                bubble_share=float(parts.columns["bubble"][0] / seconds),
                exposed_share=float(parts.exposed[0] / seconds),
            )
        )
    return found


def efficiency(points: Sequence[ScalingPoint]) -> list[float]:
    """Return each point's tokens per second and GPU, relative to the first point."""
    return [
        point.tokens_per_s / point.num_gpus * points[0].num_gpus / points[0].tokens_per_s
        for point in points
    ]
