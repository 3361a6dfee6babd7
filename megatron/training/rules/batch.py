"""Rules about batches, the length of the run and its schedules."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.errors import MegatronError
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.settings.batch_size_phases import parse_phases
from megatron.training.config.resolve_batch import batch_size_at
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule


def _step(run: ResolvedRun) -> int:
    """Return the number of samples in one micro batch of all replicas, 0 if it is unknown."""
    return (run.schedule.micro_batch_size or 0) * run.topology.data_parallel_size


@rule
def replicas_share_the_batch(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that every replica has a whole number of micro batches."""
    size, step = run.schedule.global_batch_size, _step(run)
    if size is None or step < 1:
        return
    if size % step:
        near = max(round(size / step), 1) * step
        yield problem(
            f"--global-batch-size {size} cannot be split into micro batches of"
            f" {run.schedule.micro_batch_size} on {run.topology.data_parallel_size} replicas.",
            f"it is a multiple of micro batch * replicas = {step}",
            "--micro-batch-size",
            fix=f"use --global-batch-size {near}",
        )
        return
    yield from _enough_micro_batches(run, size // step, step, "--global-batch-size")


@rule
def replicas_share_the_batch_of_an_evaluation(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that every replica has a whole number of micro batches in an evaluation."""
    asked = run.config.schedule
    if not asked.eval_global_batch_size and not asked.eval_micro_batch_size:
        return
    size, micro = run.schedule.eval_batch
    step = (micro or 0) * run.topology.data_parallel_size
    if size is None or step < 1:
        return
    if size % step:
        yield problem(
            f"--eval-global-batch-size {size} cannot be split into micro batches of {micro} on"
            f" {run.topology.data_parallel_size} replicas.",
            f"it is a multiple of micro batch * replicas = {step}; the defaults are the batch"
            " sizes of training",
            "--eval-micro-batch-size",
            fix=f"use --eval-global-batch-size {max(round(size / step), 1) * step}",
        )
        return
    yield from _enough_micro_batches(run, size // step, step, "--eval-global-batch-size")


def _enough_micro_batches(
    run: ResolvedRun, num_microbatches: int, step: int, flag: str
) -> Iterator[MegatronError]:
    if num_microbatches < 1:
        return
    schedule = schedule_named(run.parallelism.pipeline_schedule)
    plan = StepPlan(
        schedule.name,
        run.parallelism.pipeline_model_parallel_size,
        run.parallelism.virtual_pipeline_model_parallel_size or 1,
        num_microbatches,
        run.parallelism.microbatch_group_size_per_vp_stage,
    )
    fewest = schedule.min_microbatches(plan)
    if num_microbatches < fewest:
        name = schedule.name_with(plan.num_chunks)
        yield problem(
            f"{num_microbatches} micro batches per step for {name} on"
            f" {plan.pipeline_size} pipeline ranks.",
            schedule.min_microbatches_rule,
            flag,
            "--pipeline-schedule",
            fix=f"use {flag} {fewest * step}, or a different --pipeline-schedule",
        )
        return
    try:
        schedule.orders(plan)
    except MegatronError as error:
        yield error


@rule
def the_batch_grows_in_whole_steps(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the replicas can share every batch size of a ramp."""
    schedule = run.schedule
    ramp, size, step = schedule.rampup_batch_size, schedule.global_batch_size, _step(run)
    if ramp is None or not size or step < 1:
        return
    start, increment, samples = ramp
    if start > size or (size - start) % increment:
        yield problem(
            f"--rampup-batch-size {start} {increment} {samples} with --global-batch-size {size}.",
            "the batch grows from the first number in steps of the second to exactly the global"
            " batch size",
            fix=f"use --rampup-batch-size {step} {step} {samples}",
        )
        return
    sizes = sorted({batch_size_at(0, ramp, size), increment, size})
    uneven = [s for s in sizes if s % step]
    if uneven:
        yield problem(
            f"--rampup-batch-size {start} {increment} {samples}: batches of {uneven[0]} cannot be"
            f" split into micro batches of {schedule.micro_batch_size} on"
            f" {run.topology.data_parallel_size}"
            " replicas.",
            f"start and increment are multiples of micro batch * replicas = {step}",
            "--micro-batch-size",
            fix=f"use --rampup-batch-size {step} {step} {samples}",
        )


@rule
def the_batch_changes_at_numbers_of_tokens(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the replicas can share every size of --step-batch-size-schedule."""
    schedule = run.schedule
    text, flag, step = (
        schedule.step_batch_size_schedule,
        "--step-batch-size-schedule",
        _step(run),
    )
    if text is None or not run.model.seq_length:
        return
    try:
        phases = parse_phases(text, run.model.seq_length)
    except ValueError as reason:
        yield problem(
            f"{flag} {text!r} {reason}.",
            "pairs TOKENS:SIZE in ascending order, beginning with 0 tokens",
            fix=f'use {flag} "0:{max(step, 1)}"',
        )
        return
    if phases[-1][1] != run.config.schedule.global_batch_size is not None:
        yield problem(
            f"{flag} {text!r} with --global-batch-size {run.config.schedule.global_batch_size}.",
            "the last size is the global batch size",
            fix=f"use --global-batch-size {phases[-1][1]}",
        )
    for _, size in phases if step else ():
        if size % step and not schedule.decrease_batch_size_if_needed:
            yield problem(
                f"{flag} {text!r}: batches of {size} cannot be split into micro batches of"
                f" {schedule.micro_batch_size} on {run.topology.data_parallel_size} replicas.",
                f"every size is a multiple of micro batch * replicas = {step}",
                "--micro-batch-size",
                fix=f"use {max(size // step, 1) * step} for {size}",
            )
        elif size != schedule.global_batch_size:
            yield from _enough_micro_batches(run, size // step, step, "--global-batch-size")


@rule
def the_run_has_a_length(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the length of the run is given."""
    asked = run.config.schedule
    if asked.train_iters is None and asked.train_samples is None and not asked.skip_train:
        yield problem(
            "neither --train-iters nor --train-samples is given.",
            "a run has a length",
            fix="add --train-iters 1000",
        )


@rule
def schedules_use_one_unit(run: ResolvedRun) -> Iterator[MegatronError]:
    """Refuse flags in steps together with flags in samples."""
    asked = run.config.schedule
    in_steps = {
        "--lr-decay-iters": asked.lr_decay_iters,
        "--lr-warmup-iters": asked.lr_warmup_iters,
        "--lr-wsd-decay-iters": asked.lr_wsd_decay_iters,
    }
    in_samples = {
        "--lr-decay-samples": asked.lr_decay_samples,
        "--lr-warmup-samples": asked.lr_warmup_samples,
        "--lr-wsd-decay-samples": asked.lr_wsd_decay_samples,
    }
    is_in_samples = asked.train_samples is not None and asked.train_iters is None
    unfit = in_steps if is_in_samples else in_samples
    wrong = [flag for flag, is_given in unfit.items() if is_given]
    if wrong:
        unit = "samples" if is_in_samples else "iters"
        other = "iters" if is_in_samples else "samples"
        yield problem(
            f"{', '.join(wrong)} in a run with --train-{unit}.",
            "the run and its schedules use one unit",
            *wrong,
            fix="use " + ", ".join(flag.replace(other, unit) for flag in wrong),
        )


@rule
def the_learning_rate_has_a_shape(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the rates and lengths of the learning rate schedule."""
    schedule = run.schedule
    asked, optimizer = run.config.schedule, run.config.optimizer
    lr, min_lr = optimizer.lr, optimizer.min_lr or 0.0
    trains = not asked.skip_train
    if lr is None and trains:
        yield problem("--lr is not given.", "training needs a learning rate", fix="add --lr 3e-4")
    elif lr is not None and (lr < min_lr or min_lr < 0):
        yield problem(
            f"--lr {lr:g} with --min-lr {min_lr:g}.",
            "0 <= min-lr <= lr",
            fix=f"use --lr 3e-4 --min-lr {max(min(min_lr, 3e-5), 0):g}"
            if lr < 0
            else f"use --min-lr {lr / 10:g}",
        )
    if lr is not None and lr >= 0 and not 0 <= asked.lr_warmup_init <= lr:
        yield problem(
            f"--lr-warmup-init {asked.lr_warmup_init:g} with --lr {lr:g}.",
            "warm-up rises from its first rate to --lr",
            fix="use --lr-warmup-init 0",
        )
    if (
        trains
        and schedule.lr_decay_steps
        and schedule.lr_warmup_steps >= schedule.lr_decay_steps > 0
    ):
        yield problem(
            f"warm-up ({schedule.lr_warmup_steps} samples) is not shorter than the decay length"
            f" ({schedule.lr_decay_steps} samples).",
            "the rate reaches --lr before it decays",
            "--lr-warmup-iters",
            "--lr-decay-iters",
            fix="use a shorter warm-up or a longer decay",
        )


@rule
def the_weight_decay_has_a_shape(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the start and the end of a changing weight decay."""
    optimizer = run.optimizer
    if optimizer.weight_decay_incr_style == "constant":
        asked = run.config.optimizer
        for flag, given in (
            ("--start-weight-decay", asked.start_weight_decay),
            ("--end-weight-decay", asked.end_weight_decay),
        ):
            if given is not None and given != optimizer.weight_decay:
                yield problem(
                    f"{flag} {given:g} with a constant weight decay.",
                    "only a changing weight decay has a start and an end",
                    "--weight-decay-incr-style",
                    fix="use --weight-decay-incr-style linear",
                )
        return
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    if start is None or end is None or start < 0 or end < start:
        yield problem(
            f"--weight-decay-incr-style {optimizer.weight_decay_incr_style} from {start} to {end}.",
            "0 <= start-weight-decay <= end-weight-decay, and both are given",
            "--start-weight-decay",
            "--end-weight-decay",
            fix="give both, for example --start-weight-decay 0.01 --end-weight-decay 0.1",
        )
