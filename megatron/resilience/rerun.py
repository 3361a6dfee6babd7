"""Run a step again whose loss or gradient is not finite, and name the cause.

The reruns use the same samples on the same ranks, then on all replicas, then other samples. Their
results show whether the cause is hardware that failed once, hardware that fails again, samples, or
weights (`rerun_verdict`).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.model_parameters import names_in_model
from megatron.core.foundation.errors import HardwareFaultError, NumericsError
from megatron.core.foundation.failure_file import add_to_quarantine
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object, broadcast_object
from megatron.core.utils import as_list
from megatron.resilience.rerun_verdict import (
    EARLIER,
    OWN,
    Cause,
    Observation,
    RerunDiagnostic,
    Verdict,
    find_cause,
    host_name,
    write_rejected_result,
)
from megatron.training.run.context import TrainingContext, TrainStep
from megatron.training.run.loss_reduction import LossTable, Report
from megatron.training.run.state import BatchPlan, TakenStep, TrainState
from megatron.training.run.step import compute_gradients
from megatron.training.run.update import HostDecision, loss_table, skipped


class RerunDataIterator:
    """An iterator that repeats its batches after `rewind`, until `advance` drops them."""

    def __init__(self, iterable: Iterable[Any], make_iterable: bool = True) -> None:
        self.iterable = iter(iterable)
        self.saved_microbatches: list[Any] = []
        self._next = 0

    def __iter__(self) -> RerunDataIterator:
        return self

    def __next__(self) -> Any:
        if self._next == len(self.saved_microbatches):
            self.saved_microbatches.append(next(self.iterable))
        batch = self.saved_microbatches[self._next]
        self._next += 1
        return dict(batch) if type(batch) is dict else batch  # a forward step may change entries

    def rewind(self) -> None:
        """Return to the batch after the last `advance`."""
        self._next = 0

    def advance(self) -> None:
        """Drop the batches so far."""
        self.saved_microbatches, self._next = [], 0

    def state_dict(self) -> dict[str, Any]:
        """Return the batches that can be repeated, and the position among them."""
        return {"saved_microbatches": self.saved_microbatches, "replay_pos": self._next}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the batches of `state_dict`."""
        self.saved_microbatches = state_dict["saved_microbatches"]
        self._next = state_dict["replay_pos"]


@dataclass(frozen=True)
class StepBatches:
    """All micro batches of one step of one replica."""

    of_chunks: tuple[RerunDataIterator | None, ...]
    """One iterator for each model chunk; None for a chunk that reads no data."""
    is_list: bool
    """Whether the schedule needs a list of iterators."""
    first_sample: int
    """Absolute index of the first sample of the step, over all replicas."""
    plan: BatchPlan
    dp_rank: int
    """The replica to which the samples belong, a key of dropout."""

    @classmethod
    def of(cls, data: Any, first_sample: int, plan: BatchPlan, dp_rank: int) -> StepBatches:
        """Return the next batches of an iterator, or of a list with one iterator per chunk."""
        found = tuple(None if it is None else RerunDataIterator(it) for it in as_list(data))
        return cls(found, isinstance(data, list), first_sample, plan, dp_rank)

    def iterators(self) -> Any:
        """Rewind the iterators, and return them in the form that the schedule needs."""
        for iterator in self.of_chunks:
            if iterator is not None:
                iterator.rewind()
        return list(self.of_chunks) if self.is_list else self.of_chunks[0]

    def shared(self, source: int, dp: Group) -> StepBatches:
        """Return the batches of rank `source` of the data-parallel group, on all of its ranks.

        Communication: one broadcast of pickles on `dp`.
        """
        own = [None if it is None else it.saved_microbatches for it in self.of_chunks]
        theirs = broadcast_object(own, source, dp)
        found = tuple(None if each is None else RerunDataIterator(each) for each in theirs)
        return replace(self, of_chunks=found, dp_rank=source)


class ErrorInjector:
    """Make the losses of one replica NaN, in one of `rate` steps on average.

    `transient_error`: in the first run of the step only; `persistent_error`: in all runs of this
    replica; `correct_result`: on all replicas that compute this replica's samples. Steps and
    replicas are drawn from the seed, equally on all ranks.
    """

    def __init__(self, rate: int, kind: RerunDiagnostic, seed: int, dp_rank: int, dp_size: int):
        self.rate, self.kind, self.seed = rate, kind, seed
        self.dp_rank, self.dp_size = dp_rank, dp_size
        self.is_active = False

    def begin_run(self, iteration: int, *, is_rerun: bool, samples_of: int | None) -> None:
        """Decide whether the losses of a run of a step are wrong.

        Args:
            samples_of: the replica whose samples of this step are computed; None for samples of
                another step.
        """
        chosen = random.Random(f"{self.seed} {iteration}")
        is_hit = self.rate > 0 and chosen.randrange(self.rate) == 0
        replica = chosen.randrange(self.dp_size)
        self.is_active = (
            is_hit
            and {
                RerunDiagnostic.TRANSIENT_ERROR: not is_rerun and self.dp_rank == replica,
                RerunDiagnostic.PERSISTENT_ERROR: self.dp_rank == replica,
                RerunDiagnostic.CORRECT_RESULT: samples_of == replica,
            }[self.kind]
        )

    def around(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `forward_step` with NaN losses while `is_active` is set."""

        def call(*inputs: Any, **named: Any) -> Any:
            output, loss_func = forward_step(*inputs, **named)
            if not self.is_active:
                return output, loss_func
            return output, (lambda *given, **more: _wrong(loss_func(*given, **more)))

        return call


def _wrong(result: Any) -> Any:
    """Replace the loss and the reports in a loss function's result by NaN."""
    if not isinstance(result, tuple):
        return result
    loss, *rest, report = result
    return (
        loss * torch.nan,
        *rest,
        {k: v * torch.nan if isinstance(v, Tensor) else v for k, v in report.items()},
    )


class StepRerun:
    """A train step that keeps the samples of two steps, and can run them again.

    Buffers that a step changes (expert biases, FP8 amaxes) are restored before each run, and random
    draws are keyed by samples, so reruns are bit-identical.
    """

    def __init__(self, step: TrainStep, injector: ErrorInjector) -> None:
        self._step, self.injector = step, injector
        self.iteration = 0
        self._batches: StepBatches | None = None
        self._earlier: StepBatches | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def __call__(self, context: TrainingContext, state: TrainState, plan: BatchPlan) -> TakenStep:
        """Take a step; if it is not finite, find the cause.

        If hardware failed once, the update uses the gradients of the second run.

        Raises:
            MegatronError: on all ranks; the run must end.
        """
        self._record(context, state, plan)
        assert self._batches is not None
        data = replace(context.data, train=self._batches.iterators())
        try:
            return self._step(replace(context, data=data), state, plan)
        except NumericsError as problem:
            reports = self._diagnose(context, problem)
        if reports is None:
            return skipped(context, plan)
        return HostDecision().finish(context, state, plan, reports)

    def _record(self, context: TrainingContext, state: TrainState, plan: BatchPlan) -> None:
        """Store the samples of the new step and the values of the buffers."""
        self._earlier, self.iteration = self._batches, state.iteration + 1
        dp_rank = context.groups.dp.rank()
        first_sample = state.consumed_train_samples
        self._batches = StepBatches.of(context.data.train, first_sample, plan, dp_rank)
        self._buffers = [
            (buffer, buffer.detach().clone())
            for chunk in context.model
            for buffer in chunk.buffers()
        ]
        self.injector.begin_run(self.iteration, is_rerun=False, samples_of=dp_rank)

    def _diagnose(self, context: TrainingContext, problem: NumericsError) -> list[Report] | None:
        """Return the reports of a run with correct gradients, or None if the step must be skipped.

        Communication: up to three runs of the step, each with a broadcast of samples on `dp` and an
        all-gather of the results over all processes.
        """
        schedule = context.run.schedule
        runs: list[list[Report]] = []
        hosts: dict[int, str] = {}

        def observe(samples: int | str) -> Observation:
            reports, found, hosts_of = self._run_again(context, samples)
            runs.append(reports)
            hosts.update(hosts_of)
            return found

        verdict = find_cause(
            problem.found.splitlines()[0],
            observe,
            num_replicas=context.groups.dp.size(),
            has_earlier=self._earlier is not None,
        )
        at_fault = [hosts[replica] for replica in verdict.replicas if replica in hosts]
        if torch_collectives.world().rank() == 0:
            if schedule.quarantine_file is not None and verdict.cause is Cause.HARDWARE_PERSISTENT:
                reason = f"iteration {self.iteration}: results differ from other replicas"
                add_to_quarantine(schedule.quarantine_file, at_fault, reason)
            if (tracker := schedule.result_rejected_tracker_filename) is not None:
                write_rejected_result(tracker, self.iteration, verdict, at_fault)
        if verdict.cause is Cause.HARDWARE_ONCE:
            self._warn(verdict, "the gradients of the second run are used")
            return runs[-1]
        self._restore_buffers()
        if verdict.cause is Cause.HARDWARE_PERSISTENT:
            raise self._hardware_fault(verdict, at_fault, schedule.quarantine_file)
        if schedule.on_nonfinite == "skip" and verdict.cause is Cause.DATA:
            self._batches = self._earlier  # the next step needs the samples of a finite step
            self._warn(verdict, "the step is skipped (--on-nonfinite skip)")
            return None
        raise NumericsError(
            f"{problem.found}\n  {verdict.describe()}",
            rule=problem.rule,
            flags=[*problem.flags, "--on-nonfinite"],
            fix=problem.fix
            if verdict.cause is Cause.DATA
            else "the weights are the cause: resume from an earlier checkpoint with a lower --lr",
        )

    def _run_again(
        self, context: TrainingContext, samples: int | str
    ) -> tuple[list[Report], Observation, dict[int, str]]:
        """Return reports, the non-finite values, and the host of each replica with a problem."""
        assert self._batches is not None
        dp, batches = context.groups.dp, self._batches
        if samples == EARLIER:
            assert self._earlier is not None
            batches = self._earlier
        elif samples != OWN:
            batches = batches.shared(int(samples), dp)
        self._restore_buffers()
        context.optimizer.attention_logits.forget()
        samples_of = None if samples == EARLIER else batches.dp_rank
        self.injector.begin_run(self.iteration, is_rerun=True, samples_of=samples_of)
        with _local_gradients_checked(context.model):
            reports = compute_gradients(
                context,
                batches.iterators(),
                batches.first_sample,
                batches.plan,
                dp_rank=batches.dp_rank,
            )
        losses = loss_table(context, reports)
        mine = (dp.rank(), host_name(), _problem(context, losses), _bad_weight(context))
        everyone = all_gather_object(mine, torch_collectives.world())
        problems: dict[int, str] = {}
        weights: dict[int, str] = {}
        hosts: dict[int, str] = {}
        for rank, (replica, host, text, weight) in enumerate(everyone):
            if text and replica not in problems:
                problems[replica], hosts[replica] = f"{text} on global rank {rank}", host
            if weight:
                weights.setdefault(replica, weight)
        return reports, Observation(problems, weights), hosts

    def _restore_buffers(self) -> None:
        for buffer, before in self._buffers:
            buffer.detach().copy_(before)

    def _hardware_fault(
        self, verdict: Verdict, hosts: list[str], quarantine: str | None
    ) -> HardwareFaultError:
        added = "" if quarantine is None else f" (they are in {quarantine})"
        return HardwareFaultError(
            f"iteration {self.iteration}: from the same samples, hosts"
            f" {', '.join(sorted(set(hosts)))} compute other results than other replicas.\n"
            f"  {verdict.describe()}",
            rule="replicas compute equal results from the same samples; no weight was changed",
            flags=["--rerun-mode", "--quarantine-file"],
            fix=f"exclude these hosts{added}, test them, and resume from the last checkpoint",
        )

    def _warn(self, verdict: Verdict, what: str) -> None:
        if torch_collectives.world().rank() == 0:
            text = f"WARNING: iteration {self.iteration}: {what}; {verdict.describe()}"
            print(text, file=sys.stderr, flush=True)


@contextmanager
def _local_gradients_checked(model: list[Any]) -> Iterator[None]:
    """In this block, check gradients before their reduction, to identify the replica."""
    buffers = [
        buffer
        for chunk in model
        if isinstance(chunk, DistributedDataParallel)
        for buffer in chunk.gradient_buffers
    ]
    before = [buffer.checks_finite for buffer in buffers]
    for buffer in buffers:
        buffer.checks_finite = True
    try:
        yield
    finally:
        for buffer, checks_finite in zip(buffers, before, strict=True):
            buffer.checks_finite = checks_finite


def _problem(context: TrainingContext, losses: LossTable) -> str:
    """Describe the first non-finite loss or gradient of this rank's run; "" if all are finite."""
    found = losses.first_not_finite()
    if found is not None:
        microbatch, name, value = found
        return f"{name} is {value} in micro batch {microbatch}"
    for chunk in reversed(context.model):
        problem = getattr(chunk, "nonfinite_problem", lambda: None)()
        if problem is not None:
            return str(problem.found).partition(" in data replica")[0]
    return ""


def _bad_weight(context: TrainingContext) -> str:
    """Return the name of the first local weight that is not finite; "" if all are finite."""
    for chunk in context.model:
        inner = getattr(chunk, "module", chunk)
        names = names_in_model(inner)
        # The unsharded memory of a sharded parameter is undefined.
        sharded = chunk.sharded_values() if isinstance(chunk, DistributedDataParallel) else {}
        for local, parameter in inner.named_parameters():
            for values in sharded.get(parameter, [parameter.detach()]):
                if not bool(torch.isfinite(values).all()):
                    return names[local]
    return ""


def with_rerun(context: TrainingContext, step: TrainStep) -> TrainStep:
    """Wrap a step if --rerun-mode is set; injected errors change the context's forward step."""
    schedule = context.run.schedule
    # With hybrid context parallelism, replicas share samples, so they cannot swap them.
    if schedule.rerun_mode == "disabled" or context.run.parallelism.hybrid_context_parallel:
        return step
    kind, dp = RerunDiagnostic(schedule.error_injection_type), context.groups.dp
    injector = ErrorInjector(
        schedule.error_injection_rate, kind, schedule.seed, dp.rank(), dp.size()
    )
    context.forward_step = injector.around(context.forward_step)
    return StepRerun(step, injector)
