"""Cost of a whole training: time with failures, GPU hours, energy, money and emissions.

Failures are independent and exponentially distributed. Each failure loses the steps since the last
checkpoint. Young, "A first order approximation to the optimum checkpoint interval",
Communications of the ACM 17(9), 1974; Daly, "A higher order estimate of the optimum checkpoint
interval for restart dumps", Future Generation Computer Systems 22(3), 2006. Pure arithmetic.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How often a run fails, and the time that a failure takes."""

    gpu_mtbf_hours: float = 50_000.0
    """Mean time between failures of one GPU, with its share of host and network. Llama 3 405B was
    interrupted 419 times unexpectedly in 54 days of 16,384 GPUs (2407.21783, section 3.3.4)."""
    checkpoint_s: float = 30.0
    """Training pauses this long for each checkpoint."""
    restart_s: float = 900.0
    """From a failure until training continues from the last checkpoint."""

    def mtbf_s(self, num_gpus: int) -> float:
        """Return the mean time between failures of a run that any GPU's failure stops."""
        return self.gpu_mtbf_hours * HOUR / num_gpus


def young_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the best seconds of training between checkpoints, to first order."""
    return math.sqrt(2 * checkpoint_s * mtbf_s)


def best_interval(checkpoint_s: float, mtbf_s: float) -> float:
    """Return the best seconds of training between checkpoints: Daly, equation 37.

    If a checkpoint takes more than twice the mean time between failures, return that mean time.
    """
    if checkpoint_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = checkpoint_s / (2 * mtbf_s)
    series = 1 + math.sqrt(ratio) / 3 + ratio / 9
    return young_interval(checkpoint_s, mtbf_s) * series - checkpoint_s


def slowdown(interval_s: float, checkpoint_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the expected time of a training over its time without failures and checkpoints.

    Daly, equation 20: restarts may fail as well. Infinite if failures prevent any progress.
    """
    exponent = (interval_s + checkpoint_s) / mtbf_s
    if exponent + restart_s / mtbf_s > 500:
        return math.inf
    return mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent) / interval_s


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Costs of an hour of a GPU in addition to the GPU itself."""

    node_overhead: float = 1.5
    """Power of a machine over the power limit of its GPUs: 8.4 kW measured for eight H100 of 700 W
    in training (2412.08602). 1 counts the GPUs alone, as model cards do."""
    pue: float = 1.2
    """Power of the data center over the power of its machines."""
    price_per_gpu_hour: float | None = None
    """Price in any currency."""
    grid_kg_co2_per_kwh: float | None = None
    """Emissions of the grid."""


@dataclass(frozen=True, kw_only=True)
class TrainingCost:
    """A training of `num_steps` steps on `num_gpus` GPUs."""

    num_steps: float
    days_without_failures: float
    days: float
    checkpoint_interval_s: float
    mtbf_hours: float
    lost_share: float
    """Share of the time lost to checkpoints, restarts and repeated steps."""
    gpu_hours: float
    kwh: float
    money: float | None
    kg_co2: float | None


def training_cost(
    *,
    step_s: float,
    num_steps: float,
    num_gpus: int,
    watts: float,
    failures: Failures,
    prices: Prices,
) -> TrainingCost:
    """Return the cost of a training with the best interval between checkpoints.

    Args:
        watts: power of one GPU.
    """
    mtbf = failures.mtbf_s(num_gpus)
    # A checkpoint is written between steps.
    interval = max(best_interval(failures.checkpoint_s, mtbf), step_s)
    factor = slowdown(interval, failures.checkpoint_s, failures.restart_s, mtbf)
    undisturbed = step_s * num_steps
    gpu_hours = undisturbed * factor * num_gpus / HOUR
    kwh = gpu_hours * watts / 1000 * prices.node_overhead * prices.pue
    price, grid = prices.price_per_gpu_hour, prices.grid_kg_co2_per_kwh
    return TrainingCost(
        num_steps=num_steps,
        days_without_failures=undisturbed / DAY,
        days=undisturbed * factor / DAY,
        checkpoint_interval_s=interval,
        mtbf_hours=mtbf / HOUR,
        lost_share=1 - 1 / factor,
        gpu_hours=gpu_hours,
        kwh=kwh,
        money=None if price is None else gpu_hours * price,
        kg_co2=None if grid is None else kwh * grid,
    )
