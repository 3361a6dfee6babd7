"""Fit the constants of the time model to measured steps.

Regularised robust least squares of log(predicted / measured). Each constant is a positive number
with a prior and a width: a constant that the measurements do not determine keeps its prior.
Deterministic: damped Gauss-Newton steps from the priors, with derivatives by finite differences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_lattice.planner.autofill import autofill
from megatron_lattice.planner.hardware import Hardware
from megatron_lattice.planner.step_time import predict_step
from megatron_lattice.planner.workload import FloatArray, Workloads

ROBUST_WIDTH = 0.05
"""Beyond this residual the loss grows linearly, not quadratically."""
NUM_ROUNDS = 3
"""Each round fills the blanks again, with the constants of the previous round."""
NUM_STEPS = 12


@dataclass(frozen=True)
class Measured:
    """Rows with their measured seconds."""

    workloads: Workloads
    step_s: FloatArray
    weight: FloatArray

    def take(self, chosen: NDArray[Any]) -> Measured:
        """Return the rows of a mask or of indices."""
        return Measured(self.workloads.take(chosen), self.step_s[chosen], self.weight[chosen])


def balanced_weights(families: Sequence[str], exponent: float = 0.5) -> FloatArray:
    """Weight each row by the size of its family to the power of `-exponent`, with a mean of 1."""
    names, which, counts = np.unique(families, return_inverse=True, return_counts=True)
    return (counts**-exponent)[which] / np.mean((counts**-exponent)[which])


def fit(measured: Measured, hardware: Hardware) -> Hardware:
    """Return the hardware with the constants that fit best; the fit starts at the priors."""
    priors = {name: prior for name, prior in hardware.priors.items() if prior.width}
    names = list(priors)
    centre = np.log([priors[name].value for name in names])
    width = np.array([priors[name].width for name in names])
    theta = centre.copy()

    def with_theta(values: FloatArray) -> Hardware:
        return hardware.with_constants(dict(zip(names, np.exp(values).tolist(), strict=True)))

    for _ in range(NUM_ROUNDS):
        filled = autofill(measured.workloads, with_theta(theta))

        def residuals(values: FloatArray, filled: Workloads = filled) -> FloatArray:
            seconds = predict_step(filled, with_theta(values)).total
            return np.log(seconds / measured.step_s)

        theta = _minimise(residuals, theta, centre, width, measured.weight)
    return with_theta(theta)


def _loss(r: FloatArray, weight: FloatArray, distance: FloatArray) -> float:
    robust = 2 * (np.sqrt(1 + (r / ROBUST_WIDTH) ** 2) - 1)
    return float(weight @ robust + distance @ distance)


def _minimise(
    residuals: Callable[[FloatArray], FloatArray],
    theta: FloatArray,
    centre: FloatArray,
    width: FloatArray,
    weight: FloatArray,
) -> FloatArray:
    """Return the minimum of the loss: damped Gauss-Newton steps that start at `theta`."""
    damping = 1e-2
    r = residuals(theta)
    loss = _loss(r, weight, (theta - centre) / width)
    for _ in range(NUM_STEPS):
        jacobian = np.empty((len(r), len(theta)))
        for index in range(len(theta)):
            moved = theta.copy()
            moved[index] += 1e-4
            jacobian[:, index] = (residuals(moved) - r) / 1e-4
        # Iteratively reweighted: the second derivative of the robust loss at a residual.
        row_weight = weight / ROBUST_WIDTH**2 / np.sqrt(1 + (r / ROBUST_WIDTH) ** 2)
        normal = jacobian.T @ (jacobian * row_weight[:, None]) + np.diag(width**-2.0)
        gradient = jacobian.T @ (row_weight * r) + (theta - centre) / width**2
        improved = False
        for _ in range(6):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            tried = theta + np.clip(step, -0.7, 0.7)
            r_tried = residuals(tried)
            loss_tried = _loss(r_tried, weight, (tried - centre) / width)
            if loss_tried < loss:
                improved = loss - loss_tried > 1e-4 * loss
                theta, r, loss = tried, r_tried, loss_tried
                damping = max(damping / 5, 1e-5)
                break
            damping *= 6
        if not improved:
            break
    return theta
