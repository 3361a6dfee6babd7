"""The second half of a step: check losses and gradients, and update the weights or refuse to.

The host decides if it needs a loss or norm before the update. Otherwise the device decides, and the
host reads losses and norm later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.foundation.errors import NumericsError
from megatron.core.optimizer.update import StepOutcome
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.pipeline_parallel.layout import loss_rank
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    any_across_ranks,
    broadcast_object,
    raise_on_all_ranks,
)
from megatron.core.utils import get_model_config
from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.expert_load import first_bad_router
from megatron.training.metrics.flops import training_flops
from megatron.training.run.context import TrainingContext
from megatron.training.run.loss_reduction import DeferredLosses, LossTable, Report
from megatron.training.run.state import (
    AsyncStepResult,
    BatchPlan,
    StepResult,
    TakenStep,
    TrainState,
)

Rates = tuple[float, float | None]
"""(learning rate, decoupled learning rate of embedding and head or None)."""
Outcome = tuple[bool, float | None, float | None]
"""(the weights were updated, gradient norm, zeros in the gradient)."""


class StepDecision(Protocol):
    """Decides about the update of a step after its gradients are computed."""

    def finish(
        self,
        context: TrainingContext,
        state: TrainState,
        plan: BatchPlan,
        reports: Sequence[Report],
    ) -> TakenStep:
        """Update the weights if loss and gradients are finite, and return the step's result.

        Args:
            reports: reports of the loss function, one per micro batch on the last stage, [] on
                others.
        Raises:
            NumericsError: on all ranks.
        """
        ...


def decision_of(context: TrainingContext) -> StepDecision:
    """Return the decision of host or device, equal on all ranks."""
    if context.loss_guard is None and getattr(context.optimizer, "decides_on_device", False):
        return DeviceDecision.of(context.run)
    return HostDecision()


class HostDecision:
    """The host reads the losses and the gradient norm, and then updates the weights."""

    def finish(
        self,
        context: TrainingContext,
        state: TrainState,
        plan: BatchPlan,
        reports: Sequence[Report],
    ) -> StepResult:
        losses = loss_table(context, reports)
        means = losses.means(context.groups.dp_cp)
        guard, is_any_bad = context.loss_guard, None
        if guard is not None:  # one all-reduce for both checks
            is_any_bad = guard.share_losses(means, losses.first_not_finite() is not None)
        was_nan = _check_losses(context, state, plan, losses, is_any_bad=is_any_bad)
        if guard is not None and (refusal := guard.judge_losses()) is not None:
            context.optimizer.attention_logits.forget()
            return replace(skipped(context, plan), losses=means, skip_reason=refusal)
        if context.run.precision.empty_unused_memory_level >= 1:
            _return_cached_memory()
        rates = _learning_rates(context)
        with _timed(context, "optimizer"):
            outcome = _with_iteration_in_error(context.optimizer.step, state)
        if outcome[0]:
            context.scheduler.step(increment=plan.global_batch_size)
        if context.run.precision.empty_unused_memory_level >= 2:
            _return_cached_memory()
        return _result(context, plan, means, outcome, rates, _loss_scale(context), was_nan)


@dataclass(frozen=True)
class DeviceDecision:
    """The device refuses the update if a loss or a gradient is not finite.

    The host reads nothing from the device before the update is queued. With `defers_sync` the host
    reads losses and norm when they are logged, instead of at the end of each step. The host needs
    them at once if the next step depends on them: a loss scale, a rerun, or a schedule that does
    not advance if an update is refused.

    Communication: in addition to the optimizer's, one all-reduce of a number over all processes if
    losses are checked.
    """

    defers_sync: bool

    @staticmethod
    def of(run: ResolvedRun) -> DeviceDecision:
        checks = run.schedule.check_for_nan_in_loss_and_grad and not run.precision.fp16
        return DeviceDecision(defers_sync=checks and run.schedule.rerun_mode == "disabled")

    def finish(
        self,
        context: TrainingContext,
        state: TrainState,
        plan: BatchPlan,
        reports: Sequence[Report],
    ) -> TakenStep:
        losses = DeferredLosses.of(reports)
        rates, scale = _learning_rates(context), _loss_scale(context)
        with _timed(context, "optimizer"):
            outcome = context.optimizer.start_step(_refusal(context, losses))
        if self.defers_sync:
            context.scheduler.step(increment=plan.global_batch_size)
        read = partial(self._read, context, state, plan, losses, outcome, rates, scale)
        step = AsyncStepResult(read, num_samples=plan.global_batch_size, **_work(context, plan))
        return step if self.defers_sync else step.read()

    def _read(
        self,
        context: TrainingContext,
        state: TrainState,
        plan: BatchPlan,
        losses: DeferredLosses,
        queued: StepOutcome,
        rates: Rates,
        scale: float,
    ) -> StepResult:
        """Read losses and norm from the device. Collective."""
        outcome: Outcome = (False, None, None)
        problem, was_nan = None, False
        try:
            outcome = _with_iteration_in_error(queued.read, state)
        except NumericsError as error:
            problem = error
        table = _of_last_stage(context, losses.read())
        if not (outcome[0] and _raises_on_nonfinite(context)):
            # The counts of the routers are of the newest step.
            names_routers = not self.defers_sync
            was_nan = _check_losses(context, state, plan, table, names_routers=names_routers)
        if problem is not None:
            raise problem
        if not self.defers_sync:
            if outcome[0]:
                context.scheduler.step(increment=plan.global_batch_size)
            scale = _loss_scale(context)
        means = table.means(context.groups.dp_cp)
        return _result(context, plan, means, outcome, rates, scale, was_nan)


def loss_table(context: TrainingContext, reports: Sequence[Report]) -> LossTable:
    """Return the table of losses on the last pipeline rank, which logs them.

    Communication:
        a broadcast on the pipeline group if another stage computes the losses (V schedules).
    """
    return _of_last_stage(context, DeferredLosses.of(reports).read())


def skipped(context: TrainingContext, plan: BatchPlan) -> StepResult:
    """Return the result of a step without an update."""
    rates = _learning_rates(context)
    return StepResult(
        losses={},
        grad_norm=None,
        num_zeros=None,
        learning_rate=rates[0],
        decoupled_learning_rate=rates[1],
        loss_scale=_loss_scale(context),
        num_samples=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        was_skipped=True,
    )


def _of_last_stage(context: TrainingContext, table: LossTable) -> LossTable:
    group = context.groups.pp
    source = loss_rank(get_model_config(context.model[0]))
    return table if source == group.size() - 1 else broadcast_object(table, source, group)


def _raises_on_nonfinite(context: TrainingContext) -> bool:
    """Return whether a loss that is not finite is an error.

    With fp16 the loss scaler decides: overflows are expected, and their steps are skipped.
    """
    return context.run.schedule.check_for_nan_in_loss_and_grad and not context.run.precision.fp16


def _refusal(context: TrainingContext, losses: DeferredLosses) -> Tensor | None:
    """Return fp32 [], 1 if a loss of any rank is not finite, else 0; None without a check."""
    if not _raises_on_nonfinite(context):
        return None
    if losses.flat is None:
        is_bad = torch.zeros((), device=device.current_device())
    else:
        is_bad = losses.flat.isfinite().all().logical_not().float().to(device.current_device())
    return torch_collectives.all_reduce(is_bad, torch_collectives.world(), dist.ReduceOp.MAX)


def _check_losses(
    context: TrainingContext,
    state: TrainState,
    plan: BatchPlan,
    losses: LossTable,
    *,
    is_any_bad: bool | None = None,
    names_routers: bool = True,
) -> bool:
    """Return whether a loss of this rank is not finite and the check is off.

    Args:
        is_any_bad: whether a loss of any rank is not finite, if the ranks have already reduced it.
        names_routers: whether the counts of the routers are of this step.
    Raises:
        NumericsError: on all ranks, if a loss of any rank is not finite.
    """
    found = losses.first_not_finite()
    if not _raises_on_nonfinite(context):
        return found is not None
    if is_any_bad is None:
        is_any_bad = any_across_ranks(found is not None, torch_collectives.world())
    if not is_any_bad:
        return False
    problem, routers = None, ""
    if context.run.experts.num_moe_experts and names_routers:
        routers = first_bad_router(context.model, context.groups)
    if found is not None:
        microbatch, name, value = found
        first, count = state.consumed_train_samples, plan.global_batch_size
        if context.data.train_packing is None:  # else a micro batch packs some of the samples
            row = microbatch * context.groups.dp.size() + context.groups.dp.rank()
            first, count = first + row * plan.micro_batch_size, plan.micro_batch_size
        problem = NumericsError(
            f"iteration {state.iteration + 1}: {name} is {value} in micro batch"
            f" {microbatch} (samples {first} to {first + count - 1})." + routers,
            rule="weights are updated only from finite losses; this step was not applied",
            flags=["--no-check-for-nan-in-loss-and-grad", "--iterations-to-skip", "--lr"],
            fix=f"lower --lr, or resume with --iterations-to-skip {state.iteration + 1} if the"
            " samples are bad",
        )
    raise_on_all_ranks(problem, torch_collectives.world())
    return True


def _with_iteration_in_error(update: Callable[[], Outcome], state: TrainState) -> Outcome:
    """Run an update, and add the iteration to an error of the optimizer."""
    try:
        was_updated, grad_norm, num_zeros = update()
    except NumericsError as error:
        raise NumericsError(
            f"iteration {state.iteration + 1}: {error.found}",
            rule=error.rule,
            flags=error.flags,
            fix=error.fix,
        ) from None
    return (
        was_updated,
        None if grad_norm is None else float(grad_norm),
        None if num_zeros is None else float(num_zeros),
    )


def _result(
    context: TrainingContext,
    plan: BatchPlan,
    means: Mapping[str, float],
    outcome: Outcome,
    rates: Rates,
    loss_scale: float,
    was_nan: bool,
) -> StepResult:
    was_updated, grad_norm, num_zeros = outcome
    logits = getattr(context.optimizer, "attention_logits", None)
    return StepResult(
        losses=means,
        grad_norm=grad_norm,
        num_zeros=num_zeros,
        learning_rate=rates[0],
        decoupled_learning_rate=rates[1],
        loss_scale=loss_scale,
        num_samples=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        was_skipped=not was_updated,
        skip_reason=None if was_updated else context.optimizer.nonfinite,
        was_nan=was_nan,
        max_attention_logit=logits.largest if was_updated and logits is not None else None,
        **_work(context, plan),
    )


def _work(context: TrainingContext, plan: BatchPlan) -> dict[str, Any]:
    """Return the tokens and operations of a step, as fields of its result."""
    whole = [context.size.seq_length] * plan.global_batch_size
    lengths = Counter(whole if plan.sample_lengths is None else plan.sample_lengths)
    sizes = {length: replace(context.size, seq_length=length) for length in lengths}
    return {
        "num_tokens": sum(n * count for n, count in lengths.items()),
        "flops": sum(training_flops(sizes[n], count) for n, count in lengths.items()),
    }


def _learning_rates(context: TrainingContext) -> Rates:
    main, decoupled = 0.0, None
    for group in context.optimizer.param_groups:
        if group.get("is_decoupled_lr", False):
            decoupled = float(group["lr"])
        else:
            main = float(group["lr"])
    # Groups with a learning rate factor (muP, --param-rules) do not have the schedule's rate.
    scheduled = get_canonical_lr_for_logging(context.optimizer.param_groups)
    return main if scheduled is None else float(scheduled), decoupled


def _loss_scale(context: TrainingContext) -> float:
    scale = context.optimizer.get_loss_scale()
    return float(scale.item() if hasattr(scale, "item") else scale)


def _return_cached_memory() -> None:
    if device.device_type() != "cpu":
        torch.get_device_module(device.device_type()).empty_cache()


@contextmanager
def _timed(context: TrainingContext, name: str) -> Iterator[None]:
    context.timers(name, log_level=1).start()
    with torch.profiler.record_function(name):
        yield
    context.timers(name, log_level=1).stop()
