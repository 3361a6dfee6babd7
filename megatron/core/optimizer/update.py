"""One decision for all parameters: is the update of this step taken, and with what factor?

The host decides if it can read gradients without waiting. Otherwise the accelerator decides: the
norm, the factor of clipping and the refusal are tensors that the fused update reads (`grad_scale`
and `found_inf` of torch's optimizers), so the host queues the update without waiting for the
gradient, and reads the outcome later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron.core.foundation.errors import NumericsError
from megatron.core.optimizer.grad_scaler import ConstantGradScaler
from megatron.core.optimizer.gradient_norm import DeviceReport, GradientReader, joint_norm
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.qk_clip import AttentionLogits, RowFactors
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object

CLIP_EPSILON = 1e-6
"""Added to the norm before it divides: keeps the factor finite."""

NormCheck = Callable[[float], str | None]
"""Given the gradient norm, which is the same on all ranks, returns why its update is refused; or
raises, on all ranks."""

StepResult = tuple[bool, float | None, int | None]
"""(the weights were updated, gradient norm before clipping, zeros in the gradient if counted)."""


class UpdatedOptimizer(Protocol):
    """The part of a `MegatronOptimizer` that a decision reads and sets."""

    reader: GradientReader
    attention_logits: AttentionLogits
    norm_checks: list[NormCheck]
    nonfinite: str | None
    num_updates: int

    @property
    def decides_on_device(self) -> bool: ...

    def apply(
        self,
        factor: float | Tensor,
        row_factors: RowFactors | None = None,
        *,
        found_inf: Tensor | None = None,
    ) -> None: ...

    def nonfinite_parameters(
        self, bad_shards: Sequence[int]
    ) -> list[tuple[int, int, int, str]]: ...


class StepOutcome:
    """The outcome of a queued update; read from the device at most once."""

    def __init__(self, finish: Callable[[], StepResult]) -> None:
        self._finish: Callable[[], StepResult] | None = finish
        self._result: StepResult = (False, None, None)

    def read(self) -> StepResult:
        """Return the result of the step. All ranks read together.

        Raises:
            NumericsError: see `MegatronOptimizer.step`.
        """
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish()
        return self._result


def start_step(
    optimizers: Sequence[UpdatedOptimizer],
    config: OptimizerConfig,
    grad_scaler: ConstantGradScaler | None,
    is_refused: Tensor | None = None,
) -> StepOutcome:
    """Read all gradients, decide once, update all or none.

    Args:
        is_refused: fp32 [], equal on all ranks, 1 to refuse the update for any gradient. Only for
            optimizers that all decide on the device.
    """
    if all(optimizer.decides_on_device for optimizer in optimizers):
        return _start_on_device(optimizers, config, grad_scaler, is_refused)
    if is_refused is not None:
        raise TypeError("is_refused is for optimizers that decide on the device")
    result = _step_on_host(optimizers, config, grad_scaler)
    return StepOutcome(lambda: result)


@dataclass(frozen=True)
class _Decision:
    """The device's decision, [] each: norm and found_inf fp32, factor fp64."""

    norm: Tensor
    factor: Tensor
    found_inf: Tensor


@torch.no_grad()
def _decide(
    reports: Sequence[DeviceReport], inv_scale: float, max_norm: float, is_refused: Tensor | None
) -> _Decision:
    """Return the norm, the factor on gradients, and 1 if the update is refused."""
    norm = (torch.stack([report.total for report in reports]).sum().sqrt() * inv_scale).float()
    found_inf = norm.isfinite().logical_not().float()
    if is_refused is not None:
        found_inf = torch.maximum(found_inf, is_refused)
    # Like the host: `clip_factor` of the fp32 norm, computed in fp64.
    factor = torch.full_like(norm, inv_scale, dtype=torch.float64)
    if max_norm > 0.0:
        factor = factor * (max_norm / (norm.double() + CLIP_EPSILON)).clamp_max(1.0)
    return _Decision(norm, factor, found_inf)


def _start_on_device(
    optimizers: Sequence[UpdatedOptimizer],
    config: OptimizerConfig,
    grad_scaler: ConstantGradScaler | None,
    is_refused: Tensor | None,
) -> StepOutcome:
    reports = [optimizer.reader.read_on_device() for optimizer in optimizers]
    inv_scale = 1.0 if grad_scaler is None else grad_scaler.inv_scale
    decision = _decide(reports, inv_scale, config.clip_grad, is_refused)
    for optimizer in optimizers:
        optimizer.apply(decision.factor, found_inf=decision.found_inf)
    return StepOutcome(partial(_read, optimizers, config, grad_scaler, reports, decision))


def _read(
    optimizers: Sequence[UpdatedOptimizer],
    config: OptimizerConfig,
    grad_scaler: ConstantGradScaler | None,
    reports: Sequence[DeviceReport],
    decision: _Decision,
) -> StepResult:
    """Read the device's decision on the host."""
    norm, is_taken = torch.stack([decision.norm, 1.0 - decision.found_inf]).tolist()
    if is_taken:
        optimizers[0].nonfinite = None
        if grad_scaler is not None:
            grad_scaler.update(False)
        return True, norm, None
    for optimizer in optimizers:
        optimizer.num_updates -= 1
    if math.isfinite(norm):  # the caller has refused the update
        optimizers[0].nonfinite = None
        return False, norm, None
    bad = [report.is_bad.nonzero().flatten().tolist() for report in reports]
    return _refused(optimizers, config, grad_scaler, bad, norm)


def _step_on_host(
    optimizers: Sequence[UpdatedOptimizer],
    config: OptimizerConfig,
    grad_scaler: ConstantGradScaler | None,
) -> StepResult:
    reports = [optimizer.reader.read() for optimizer in optimizers]
    inv_scale = 1.0 if grad_scaler is None else grad_scaler.inv_scale
    norm = joint_norm(reports, inv_scale)
    reasons = [check(norm) for optimizer in optimizers for check in optimizer.norm_checks]
    refusal = next((reason for reason in reasons if reason is not None), None)
    if not all(report.is_finite for report in reports):
        bad = [report.bad_shards for report in reports]
        return _refused(optimizers, config, grad_scaler, bad, norm)
    optimizers[0].nonfinite = refusal
    if grad_scaler is not None:
        grad_scaler.update(False)
    if refusal is not None:
        for optimizer in optimizers:
            optimizer.attention_logits.forget()
        return False, norm, None
    num_zeros = None
    if config.log_num_zeros_in_grad:
        num_zeros = sum(optimizer.reader.count_zeros() for optimizer in optimizers)
    factor = inv_scale * clip_factor(norm, config.clip_grad)
    row_factors: dict[int, Tensor] = {}
    for optimizer in optimizers:
        # If several optimizers share the chunks, the first one takes the logits for all.
        row_factors |= optimizer.attention_logits.take()
    for optimizer in optimizers:
        optimizer.apply(factor, row_factors)
    return True, norm, num_zeros


def _refused(
    optimizers: Sequence[UpdatedOptimizer],
    config: OptimizerConfig,
    grad_scaler: ConstantGradScaler | None,
    bad_shards: Sequence[Sequence[int]],
    norm: float,
) -> StepResult:
    """Record which gradient was not finite.

    Raises:
        NumericsError: on all ranks, with `on_nonfinite_grad="raise"` and no loss scaling.
    """
    found = describe_nonfinite(optimizers, bad_shards)
    optimizers[0].nonfinite = found
    if grad_scaler is not None:
        grad_scaler.update(True, found)
    for optimizer in optimizers:
        optimizer.attention_logits.forget()
    if grad_scaler is None and config.on_nonfinite_grad == "raise":
        raise NumericsError(
            found,
            rule="the update of a step whose gradient is not finite is refused",
            flags=["--lr", "--clip-grad", "--no-check-for-nan-in-loss-and-grad"],
            fix="no weight was touched: look at the batch of this step, or lower --lr",
        )
    return False, norm, None


def clip_factor(norm: float, max_norm: float) -> float:
    """Return the factor that limits the norm of the gradient to `max_norm`."""
    if max_norm <= 0.0:
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPSILON))


def describe_nonfinite(
    optimizers: Sequence[UpdatedOptimizer], bad_shards: Sequence[Sequence[int]]
) -> str:
    """Name the first parameter, in backward order, whose gradient is not finite.

    Backward runs from the last chunk of the last stage to the first one, so this is the bad
    parameter nearest to the loss. The text is equal on all ranks.

    Communication: one all-gather of a small object over all processes.
    """
    bad: list[tuple[int, int, int, str]] = []
    for optimizer, shards in zip(optimizers, bad_shards, strict=True):
        bad += optimizer.nonfinite_parameters(shards)
    rank = torch_collectives.world().rank()
    everyone: list[Any] = all_gather_object(bad, torch_collectives.world())
    # If several ranks hold the parameter, the message names the first rank.
    found = [
        (*param_index, -r, name) for r, its in enumerate(everyone) for *param_index, name in its
    ]
    if not found:
        return f"the global gradient norm is not finite (seen by rank {rank})"
    *_, negative_rank, name = max(found)
    rank = -negative_rank
    num_bad = len({name for *_, name in found})
    return (
        f"gradient of {name} is not finite on global rank {rank}; it is the first in"
        f" backward order of {num_bad} such parameters."
    )
