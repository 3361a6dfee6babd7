"""Runs of one step, again and elsewhere, and what follows from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.model_parameters import names_in_model
from megatron.core.foundation.errors import HardwareFaultError, NumericsError
from megatron.core.foundation.quarantine import add_to_quarantine
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import all_gather_object
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rerun.data import Batches
from megatron.training.rerun.injection import ErrorInjector
from megatron.training.rerun.verdict import (
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
from megatron.training.run.context import StepPlan, TrainingContext
from megatron.training.run.loss_reduction import LossTable
from megatron.training.run.state import TrainState
from megatron.training.run.step import compute_gradients


class StepRerun:
    """Remembers the samples of a step and of the one before it, and runs them again.

    What a step changes besides gradients (buffers: the bias of experts, amaxes of FP8) is put back
    before each run, and random draws belong to samples, so a run is repeated to the bit.
    """

    def __init__(self, run: ResolvedRun, injector: ErrorInjector) -> None:
        self.policy = run.schedule.on_nonfinite
        self.quarantine_file = run.schedule.quarantine_file
        self.tracker_file = run.schedule.result_rejected_tracker_filename
        self.injector = injector
        self.iteration = 0
        self._batches: Batches | None = None
        self._earlier: Batches | None = None
        self._buffers: list[tuple[Tensor, Tensor]] = []

    def record(self, context: TrainingContext, state: TrainState, plan: StepPlan) -> Any:
        """See `Rerun`."""
        self._earlier, self.iteration = self._batches, state.iteration + 1
        dp = context.groups.dp
        self._batches = Batches.of(
            context.data.train, state.consumed_train_samples, plan, dp.rank()
        )
        self._buffers = [
            (buffer, buffer.detach().clone())
            for chunk in context.model
            for buffer in chunk.buffers()
        ]
        self.injector.begin_run(self.iteration, is_rerun=False, samples_of=dp.rank())
        return self._batches.iterators()

    def diagnose(self, context: TrainingContext, problem: NumericsError) -> LossTable | None:
        """See `Rerun`.

        Communication: up to three runs of the step, with a broadcast of samples on `dp` and a
        gather of what was found over all processes in each.
        """
        losses: list[LossTable] = []
        hosts: dict[int, str] = {}

        def observe(samples: int | str) -> Observation:
            table, found, hosts_of = self._run_again(context, samples)
            losses.append(table)
            hosts.update(hosts_of)
            return found

        verdict = find_cause(
            problem.found.splitlines()[0],
            observe,
            num_replicas=context.groups.dp.size(),
            has_earlier=self._earlier is not None,
        )
        self._restore_buffers_unless(verdict.cause is Cause.HARDWARE_ONCE)
        at_fault = [hosts[replica] for replica in verdict.replicas if replica in hosts]
        self._write(verdict, at_fault)
        if verdict.cause is Cause.HARDWARE_ONCE:
            self._warn(verdict, "the gradients of the second run are used")
            return losses[-1]
        if verdict.cause is Cause.HARDWARE_PERSISTENT:
            raise self._hardware_fault(verdict, at_fault)
        if self.policy == "skip" and verdict.cause is Cause.DATA:
            self._batches = self._earlier  # which were finite
            self._warn(verdict, "the step is skipped (--on-nonfinite skip)")
            return None
        raise NumericsError(
            f"{problem.found}\n  {verdict.describe()}",
            rule=problem.rule,
            flags=[*problem.flags, "--on-nonfinite"],
            fix=problem.fix
            if verdict.cause is Cause.DATA
            else "the weights are at fault: resume from an earlier checkpoint with a lower --lr",
        )

    def _run_again(
        self, context: TrainingContext, samples: int | str
    ) -> tuple[LossTable, Observation, dict[int, str]]:
        """Return losses, what was not finite, and the hosts of each replica that has a problem."""
        assert self._batches is not None
        dp = context.groups.dp
        batches = self._batches
        if samples == EARLIER:
            assert self._earlier is not None
            batches = self._earlier
        elif samples != OWN:
            batches = self._batches.shared(int(samples), dp)
        self._restore_buffers_unless(False)
        context.optimizer.attention_logits.forget()
        samples_of = None if samples == EARLIER else batches.dp_rank
        self.injector.begin_run(self.iteration, is_rerun=True, samples_of=samples_of)
        batches.rewind()
        with _local_gradients_checked(context.model):
            losses = compute_gradients(
                context,
                batches.iterators(),
                batches.first_sample,
                batches.plan,
                dp_rank=batches.dp_rank,
            )
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
        return losses, Observation(problems, weights), hosts

    def _restore_buffers_unless(self, is_right: bool) -> None:
        if not is_right:
            for buffer, before in self._buffers:
                buffer.detach().copy_(before)

    def _hardware_fault(self, verdict: Verdict, hosts: list[str]) -> HardwareFaultError:
        added = ""
        if self.quarantine_file is not None:
            added = f" (they are in {self.quarantine_file})"
        return HardwareFaultError(
            f"iteration {self.iteration}: hosts {', '.join(sorted(set(hosts)))} compute something"
            f" else from the same samples than other replicas do.\n  {verdict.describe()}",
            rule="replicas compute the same from the same samples; no weight was changed",
            flags=["--rerun-mode", "--quarantine-file"],
            fix=f"leave these hosts out{added}, test them, and resume from the last checkpoint",
        )

    def _warn(self, verdict: Verdict, what: str) -> None:
        if torch_collectives.world().rank() == 0:
            text = f"WARNING: iteration {self.iteration}: {what}; {verdict.describe()}"
            print(text, file=sys.stderr, flush=True)

    def _write(self, verdict: Verdict, hosts: list[str]) -> None:
        """Add to the lists of rejected results and of machines; rank 0 only."""
        if torch_collectives.world().rank() != 0:
            return
        if self.quarantine_file is not None and verdict.cause is Cause.HARDWARE_PERSISTENT:
            reason = f"iteration {self.iteration}: other results than other replicas"
            add_to_quarantine(self.quarantine_file, hosts, reason)
        if self.tracker_file is not None:
            write_rejected_result(self.tracker_file, self.iteration, verdict, hosts)


@contextmanager
def _local_gradients_checked(model: list[Any]) -> Iterator[None]:
    """Inside, gradients are looked at before their reduction, so that the replica is known."""
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
    """Return the first thing of this rank's run that is not finite; "" if there is none."""
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
    """Return the name of the first local weight that is not finite; "" if there is none."""
    for chunk in context.model:
        inner = getattr(chunk, "module", chunk)
        names = names_in_model(inner)
        # Of a sharded parameter the rest of its memory holds anything.
        sharded = chunk.sharded_values() if isinstance(chunk, DistributedDataParallel) else {}
        for local, parameter in inner.named_parameters():
            for values in sharded.get(parameter, [parameter.detach()]):
                if not bool(torch.isfinite(values).all()):
                    return names[local]
    return ""


def rerun_of(run: ResolvedRun, dp_rank: int, dp_size: int) -> StepRerun | None:
    """Return what --rerun-mode asks for."""
    schedule = run.schedule
    # Samples that ranks share cannot be computed by one replica after the other.
    if schedule.rerun_mode == "disabled" or run.parallelism.hybrid_context_parallel:
        return None
    kind = RerunDiagnostic(schedule.error_injection_type)
    injector = ErrorInjector(schedule.error_injection_rate, kind, schedule.seed, dp_rank, dp_size)
    return StepRerun(run, injector)
