"""Draw the losses and print the closing table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no screen needed

from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TRAINING_SCALAR, VALIDATION_SCALAR = "lm loss", "lm loss validation"


def read_scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the (step, value) pairs of every TensorBoard scalar; a resumed run's values win."""
    events = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {}
    for tag in events.Tags()["scalars"]:
        scalars[tag] = sorted({event.step: event.value for event in events.Scalars(tag)}.items())
    return scalars


def draw_losses(directory: Path, picture: Path, unigram: float, title: str) -> None:
    """Draw training and held-out loss over steps, and the loss of context-free guessing."""
    scalars = read_scalars(directory)
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    steps, losses = zip(*scalars[TRAINING_SCALAR], strict=True)
    axes.plot(steps, losses, linewidth=1, color="tab:blue", alpha=0.25)
    axes.plot(steps, running_mean(losses), color="tab:blue", label="training (running mean)")
    if VALIDATION_SCALAR in scalars:
        steps, losses = zip(*scalars[VALIDATION_SCALAR], strict=True)
        axes.plot(steps, losses, "o-", color="tab:orange", label="held-out plays")
        axes.annotate(
            f"{losses[-1]:.2f}", (steps[-1], losses[-1]), textcoords="offset points", xytext=(0, 8),
            ha="right", color="tab:orange",
        )  # fmt: skip
    axes.axhline(unigram, linestyle="--", color="gray", label="guessing by word frequency")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=150)
    pyplot.close(figure)


def running_mean(losses: Sequence[float], weight: float = 0.9) -> list[float]:
    """Return the exponentially weighted mean up to each step, without bias to a start value."""
    means, total, weights = [], 0.0, 0.0
    for loss in losses:
        total, weights = weight * total + loss, weight * weights + 1.0
        means.append(total / weights)
    return means


def closing_table(rows: list[tuple[str, str]]) -> str:
    """Format (name, value) rows as a box."""
    width = max(len(name) for name, _ in rows) + 2
    inner = width + max(len(value) for _, value in rows) + 1
    lines = [f"│ {name:<{width}}{value:<{inner - width - 1}} │" for name, value in rows]
    return "\n".join([f"┌{'─' * (inner + 1)}┐", *lines, f"└{'─' * (inner + 1)}┘"])


def perplexity(loss: float) -> float:
    """Return the perplexity: the number of equally likely tokens with the same loss."""
    return math.exp(loss)
