"""One optimizer step: forward and backward of all micro batches, check, clip, update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.foundation.errors import NumericsError
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import loss_rank
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import (
    any_across_ranks,
    broadcast_object,
    raise_on_all_ranks,
)
from megatron.core.utils import get_model_config
from megatron.training.metrics.expert_load import first_bad_router
from megatron.training.metrics.flops import training_flops
from megatron.training.run.context import StepPlan, TrainingContext
from megatron.training.run.loss_reduction import (
    LossTable,
    Report,
    UnreadLosses,
    with_loss_tokens,
)
from megatron.training.run.state import StepResult, TrainState, UnreadStep


def train_step(context: TrainingContext, state: TrainState, plan: StepPlan) -> StepResult:
    """Train on one global batch.

    The update happens only if loss and gradients are finite on all ranks; otherwise weights and
    optimizer stay as they were, and the step is run again to find the cause (`context.rerun`).

    Raises:
        NumericsError: on all ranks, naming iteration, rank and micro batch.
    """
    iteration = state.iteration + 1
    if iteration in context.iterations_to_skip or state.passes_over(iteration):
        return _skip_step(context, plan)
    rerun, data = context.rerun, context.data.train
    if rerun is not None:
        data = rerun.record(context, state, plan)
    reports = _compute(context, data, state.consumed_train_samples, plan)
    try:
        if context.loss_guard is None and getattr(context.optimizer, "decides_on_device", False):
            step = start_step_on_device(context, state, plan, reports)
            return step if context.reads_steps_later else step.read()
        return _take_step(context, state, plan, loss_table(context, reports))
    except NumericsError as problem:
        if rerun is None:
            raise
        corrected = rerun.diagnose(context, problem)
    if corrected is None:
        return _skipped(context, plan)
    return _take_step(context, state, plan, corrected)


def compute_gradients(
    context: TrainingContext,
    data: object,
    first_sample: int,
    plan: StepPlan,
    *,
    dp_rank: int | None = None,
) -> LossTable:
    """Compute the reduced gradients of one global batch, and return its losses.

    Args: see `forward_backward`.
    """
    return loss_table(context, _compute(context, data, first_sample, plan, dp_rank=dp_rank))


def _compute(
    context: TrainingContext,
    data: object,
    first_sample: int,
    plan: StepPlan,
    **options: Any,
) -> list[Report]:
    """Compute the reduced gradients of one global batch; see `forward_backward`."""
    for chunk in context.model:
        chunk.zero_grad_buffer()  # type: ignore[operator]  # a DistributedDataParallel
    context.optimizer.zero_grad()
    return forward_backward(context, data, first_sample, plan, **options)


def _take_step(
    context: TrainingContext, state: TrainState, plan: StepPlan, losses: LossTable
) -> StepResult:
    """Check the losses, and update the weights from the gradients."""
    means = losses.means(context.groups.dp_cp)
    was_nan, refusal = _judge_losses(context, state, plan, losses, means)
    if refusal is not None:
        context.optimizer.attention_logits.forget()
        return replace(_skipped(context, plan), losses=means, skip_reason=refusal)
    if context.run.precision.empty_unused_memory_level >= 1:
        _return_cached_memory()

    rates = _learning_rates(context)
    with _timed(context, "optimizer"):
        was_updated, grad_norm, num_zeros = _named(context.optimizer.step, state)
    if was_updated:
        context.scheduler.step(increment=plan.global_batch_size)
    if context.run.precision.empty_unused_memory_level >= 2:
        _return_cached_memory()
    outcome = (was_updated, grad_norm, num_zeros)
    return _result(context, plan, means, outcome, rates=rates, was_nan=was_nan)


def start_step_on_device(
    context: TrainingContext, state: TrainState, plan: StepPlan, reports: Sequence[Report]
) -> UnreadStep:
    """Queue the update, which the device refuses if a loss or a gradient is not finite.

    Nothing is read from the device. The weights are those of the step's end once the device is
    there, and what it has found is in the result that `UnreadStep.read` returns.

    Communication: besides that of the optimizer one all-reduce of a number over all processes, if
    losses are checked.
    """
    losses = UnreadLosses.of(reports)
    rates, scale = _learning_rates(context), _loss_scale(context)
    with _timed(context, "optimizer"):
        outcome = context.optimizer.start_step(_refusal(context, losses))
    if context.reads_steps_later:
        context.scheduler.step(increment=plan.global_batch_size)

    def finish() -> StepResult:
        problem: NumericsError | None = None
        result: tuple[bool, float | None, float | None] = (False, None, None)
        try:
            result = _named(outcome.read, state)
        except NumericsError as error:
            problem = error
        table = _of_last_stage(context, losses.read())
        was_nan = False if result[0] and _stops(context) else _check_losses(
            context, state, plan, table
        )  # fmt: skip
        if problem is not None:
            raise problem
        if result[0] and not context.reads_steps_later:
            context.scheduler.step(increment=plan.global_batch_size)
        later_scale = scale if context.reads_steps_later else _loss_scale(context)
        return _result(
            context, plan, table.means(context.groups.dp_cp), result,
            rates=rates, was_nan=was_nan, scale=later_scale,
        )  # fmt: skip

    return UnreadStep(
        finish,
        learning_rate=rates[0],
        decoupled_learning_rate=rates[1],
        loss_scale=scale,
        num_samples=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        **_amount_of_work(context, plan),
    )


def _refusal(context: TrainingContext, losses: UnreadLosses) -> Tensor | None:
    """Return fp32 [], 1 if a loss of any rank is not finite; None if that is not asked."""
    if not _stops(context):
        return None
    if losses.flat is None:
        is_bad = torch.zeros((), device=device.current_device())
    else:
        is_bad = losses.flat.isfinite().all().logical_not().float().to(device.current_device())
    return torch_collectives.all_reduce(is_bad, torch_collectives.world(), dist.ReduceOp.MAX)


def _result(
    context: TrainingContext,
    plan: StepPlan,
    means: Mapping[str, float],
    outcome: tuple[bool, float | None, float | None],
    *,
    rates: tuple[float, float | None],
    was_nan: bool,
    scale: float | None = None,
) -> StepResult:
    was_updated, grad_norm, num_zeros = outcome
    return StepResult(
        losses=means,
        grad_norm=grad_norm,
        num_zeros=num_zeros,
        learning_rate=rates[0],
        decoupled_learning_rate=rates[1],
        loss_scale=_loss_scale(context) if scale is None else scale,
        num_samples=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        was_skipped=not was_updated,
        skip_reason=None if was_updated else context.optimizer.nonfinite,
        was_nan=was_nan,
        max_attention_logit=_max_attention_logit(context) if was_updated else None,
        **_amount_of_work(context, plan),
    )


def _amount_of_work(context: TrainingContext, plan: StepPlan) -> dict[str, Any]:
    """Return the tokens and operations of a step, as fields of its result."""
    whole = [context.size.seq_length] * plan.global_batch_size
    lengths = Counter(whole if plan.sample_lengths is None else plan.sample_lengths)
    sizes = {length: replace(context.size, seq_length=length) for length in lengths}

    return {
        "num_tokens": sum(n * count for n, count in lengths.items()),
        "flops": sum(training_flops(sizes[n], count) for n, count in lengths.items()),
    }


def forward_backward(
    context: TrainingContext,
    data: object,
    first_sample: int,
    plan: StepPlan,
    *,
    forward_only: bool = False,
    dp_rank: int | None = None,
    **options: object,
) -> list[Report]:
    """Run all micro batches of one global batch through the pipeline.

    Args:
        first_sample: absolute index of the batch's first sample: random draws are keyed by it.
        dp_rank: the replica whose samples they are. Default this one.
    Returns:
        what the loss function reported, one per micro batch on the last stage, [] elsewhere.
    """
    rng_state().begin_step(
        first_sample,
        micro_batch_size=plan.micro_batch_size,
        dp_rank=context.groups.dp.rank() if dp_rank is None else dp_rank,
        dp_size=context.groups.dp.size(),
    )
    model = context.model if len(context.model) > 1 else context.model[0]
    if not forward_only and context.config.calculate_per_token_loss:
        config, rows = context.config, plan.global_batch_size // plan.micro_batch_size
        of_routers = config.num_moe_experts and (config.balance_losses() or config.moe_z_loss_coeff)
        if of_routers or config.trains_indexer:
            data, tokens = with_loss_tokens(data, plan.num_microbatches, context.groups)
            options["tokens_per_microbatch"] = None if tokens is None else tokens / rows
    return context.forward_backward(
        forward_step_func=context.forward_step,
        data_iterator=data,
        model=model,
        num_microbatches=plan.num_microbatches,
        seq_length=context.run.model.seq_length,
        micro_batch_size=plan.micro_batch_size,
        decoder_seq_length=context.run.encoders.decoder_seq_length,
        forward_only=forward_only,
        pg_collection=context.groups,
        **options,
    )


def loss_table(context: TrainingContext, reports: Sequence[Report]) -> LossTable:
    """Return the table of losses on the last pipeline rank, which logs them.

    Communication:
        where another stage computes them (a pipeline in a V), a broadcast on the pipeline group.
    """
    return _of_last_stage(context, LossTable.of(reports))


def _of_last_stage(context: TrainingContext, table: LossTable) -> LossTable:
    group = context.groups.pp
    source = loss_rank(get_model_config(context.model[0]))
    return table if source == group.size() - 1 else broadcast_object(table, source, group)


def _judge_losses(
    context: TrainingContext,
    state: TrainState,
    plan: StepPlan,
    losses: LossTable,
    means: Mapping[str, float],
) -> tuple[bool, str | None]:
    """Check the losses, and ask the guard; return whether one is not finite, and its refusal."""
    if context.loss_guard is None:
        return _check_losses(context, state, plan, losses), None
    # One all-reduce for both questions.
    is_bad = losses.first_not_finite() is not None
    values, is_any_bad = context.loss_guard.share_losses(means, is_bad)
    was_nan = _check_losses(context, state, plan, losses, is_any_bad=is_any_bad)
    return was_nan, context.loss_guard.judge_losses(values)


def _check_losses(
    context: TrainingContext,
    state: TrainState,
    plan: StepPlan,
    losses: LossTable,
    *,
    is_any_bad: bool | None = None,
) -> bool:
    """Raise on all ranks if any loss of the step is not finite; return it if that is allowed.

    Under fp16 the loss scaler decides: an overflow is expected now and then, and is skipped.

    Args:
        is_any_bad: what the ranks have agreed on already.
    """
    found = losses.first_not_finite()
    if not _stops(context):
        return found is not None
    if is_any_bad is None:
        is_any_bad = any_across_ranks(found is not None, torch_collectives.world())
    if not is_any_bad:
        return False
    problem, routers = None, ""
    # What routers have counted is that of the newest step.
    if context.run.experts.num_moe_experts and not context.reads_steps_later:
        routers = first_bad_router(context.model, context.groups)
    if found is not None:
        microbatch, name, value = found
        first, count = state.consumed_train_samples, plan.global_batch_size
        if context.data.train_packing is None:  # else a micro batch is a row of some of them
            row = microbatch * context.groups.dp.size() + context.groups.dp.rank()
            first, count = first + row * plan.micro_batch_size, plan.micro_batch_size
        problem = NumericsError(
            f"iteration {state.iteration + 1}: {name} is {value} in micro batch"
            f" {microbatch} (samples {first} to {first + count - 1})." + routers,
            rule="weights are updated only from finite losses; this step was not applied",
            flags=["--no-check-for-nan-in-loss-and-grad", "--iterations-to-skip", "--lr"],
            fix=f"lower --lr, or resume with --iterations-to-skip {state.iteration + 1} if the"
            " samples are at fault",
        )
    raise_on_all_ranks(problem, torch_collectives.world())
    return True


def _stops(context: TrainingContext) -> bool:
    """Return whether a loss that is not finite is an error."""
    return context.run.schedule.check_for_nan_in_loss_and_grad and not context.run.precision.fp16


def _named(
    update: Callable[[], tuple[bool, float | None, float | None]], state: TrainState
) -> tuple[bool, float | None, float | None]:
    """Return what the optimizer says of its step; a problem that it finds names the iteration."""
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


def _skip_step(context: TrainingContext, plan: StepPlan) -> StepResult:
    """Take the samples of a step from the data and leave the model as it is."""
    iterators = context.data.train if isinstance(context.data.train, list) else [context.data.train]
    for iterator in iterators:
        for _ in range(plan.num_microbatches if iterator is not None else 0):
            next(iterator)
    return replace(_skipped(context, plan), was_passed_over=True)


def _skipped(context: TrainingContext, plan: StepPlan) -> StepResult:
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


def _learning_rates(context: TrainingContext) -> tuple[float, float | None]:
    """Return the rate of the main parameters, and that of embedding and head if it differs."""
    main, decoupled = 0.0, None
    for group in context.optimizer.param_groups:
        if group.get("is_decoupled_lr", False):
            decoupled = float(group["lr"])
        else:
            main = float(group["lr"])
    # Of groups with a factor on it (muP, --param-rules) none is the rate of the schedule.
    scheduled = get_canonical_lr_for_logging(context.optimizer.param_groups)
    return main if scheduled is None else float(scheduled), decoupled


def _max_attention_logit(context: TrainingContext) -> float | None:
    logits = getattr(context.optimizer, "attention_logits", None)
    return None if logits is None else logits.largest


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
