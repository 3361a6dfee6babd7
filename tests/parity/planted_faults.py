"""Plant faults of parallel code, and find them with one digest of a run of three steps.

    python -m tests.parity.planted_faults

Each fault replaces one attribute in the processes of a run. The run has `--layout-invariant-mode`,
and its digest of the weights is compared with the digest of one process. The same run is also
compared within the tolerances of the parity tests: losses alone, and losses, norms and weights.
The command prints a line for each fault and precision, and exits with status 1 if the digest misses
one.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch.distributed as dist

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transport.work import Work
from tests.parity.random_layouts.cases import Case
from tests.parity.random_layouts.execution import Execution
from tests.parity.random_layouts.job import run_rank
from tests.parity.random_layouts.outcomes import Kind, Result, compare
from tests.parity.random_layouts.same_bits import SIZES
from tests.parity.random_layouts.settings import Settings
from tests.parity.random_layouts.training import FIXED

STEPS = 3
MODEL: Settings = {
    **FIXED, **SIZES, "num-layers": 2, "seq-length": 16, "max-position-embeddings": 16,
    "position-embedding-type": "rope", "vocab-size": 120, "make-vocab-size-divisible-by": 8,
    "micro-batch-size": 1, "global-batch-size": 8, "train-iters": STEPS, "lr": 1e-3,
    "lr-decay-style": "constant", "clip-grad": 0.5, "mock-data": True, "log-digest-interval": STEPS,
}  # fmt: skip
PRECISIONS: dict[str, Settings] = {"fp32": {}, "bf16": {"bf16": True}}
TP: Settings = {"tensor-model-parallel-size": 2}
SP: Settings = {**TP, "sequence-parallel": True}
PP: Settings = {"pipeline-model-parallel-size": 2}
DP: Settings = {}
ZERO_1: Settings = {"use-distributed-optimizer": True}
ZERO_2: Settings = {**ZERO_1, "data-parallel-sharding-strategy": "optim_grads"}

_LINEAR = "megatron.core.tensor_parallel.linear_with_overlap:collectives"
_GRADIENTS = "megatron.core.distributed.finalize_model_grads"
_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_DDP = "megatron.core.distributed"


def _but(module: Any, **changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**{**vars(module), **changes})


def _on_rank_1(wrong: Callable[..., Any], right: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that has the fault on the second rank alone."""
    return lambda *args, **options: (wrong if dist.get_rank() else right)(*args, **options)


@dataclass(frozen=True)
class Fault:
    """A mistake of parallel code."""

    name: str
    layout: Settings
    """The layout in which it has an effect."""
    target: str
    """MODULE:ATTRIBUTE.ATTRIBUTE"""
    plant: Callable[[Any], Any]
    """Return the attribute with the fault, from the attribute without it."""
    ranks: int = 2

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Inside, this process has the fault."""
        module, _, path = self.target.partition(":")
        owner: Any = importlib.import_module(module)
        *parents, last = path.split(".")
        for name in parents:
            owner = getattr(owner, name)
        with mock.patch.object(owner, last, self.plant(getattr(owner, last))):
            yield


def _forgets_micro_batches(real: Any) -> Any:
    def register(buffer: Any, index: int, is_final: bool) -> None:
        real(buffer, index, is_final)
        if dist.get_rank() and not is_final:
            buffer.flat.parameters[index].main_grad.zero_()

    return register


def _without_bucket_0(real: Any) -> Any:
    def reduce(buffer: Any, bucket: Any, gradients: Any, *into: Any) -> Any:
        return Work.completed(gradients) if bucket.number == 0 else real(buffer, bucket, gradients)

    return reduce


def _skips_second_gather(real: Any) -> Any:
    calls = []

    def start_gathers(params: Any) -> None:
        calls.append(1)
        if len(calls) != 2:
            real(params)

    return start_gathers


def _shifts_rows(real: Any) -> Any:
    def forward(table: Any, ids: Any) -> Any:
        table.vocab_start_index = table.tp_rank * (table.num_embeddings_per_partition + 1)
        return real(table, ids)

    return forward


def _shifts_columns(real: Any) -> Any:
    def of(num_local: int, num_valid: int | None, group: Any) -> Any:
        shard = real(num_local, num_valid, group)
        return replace(shard, first_id=shard.first_id + group.rank())

    return staticmethod(of)


def _overwrites_sum(real: Any) -> Any:
    def start(buffer: Any, bucket: Any) -> Any:
        if dist.get_rank():
            buffer._has_sum[bucket.number] = False
        return real(buffer, bucket)

    return start


def _lower_rate(real: Any) -> Any:
    def step(scheduler: Any, increment: int) -> None:
        real(scheduler, increment)
        if dist.get_rank():
            for group in scheduler.param_groups:
                group["lr"] *= 0.999

    return step


FAULTS = (
    Fault("column-parallel backward: no sum of the input gradient", TP, _LINEAR,
          lambda real: _but(real, start_all_reduce=lambda x, group: Work.completed(x))),
    Fault("column-parallel backward: two sums", TP, _LINEAR,
          lambda real: _but(real, start_all_reduce=lambda x, group: real.start_all_reduce(
              real.all_reduce(x, group), group))),
    Fault("row-parallel forward: no sum", TP, _LINEAR,
          lambda real: _but(real, all_reduce=lambda x, group: x)),
    Fault("row-parallel forward: two sums", TP, _LINEAR,
          lambda real: _but(real, all_reduce=lambda x, group: real.all_reduce(
              real.all_reduce(x, group), group))),
    Fault("row-parallel forward: sum over the data-parallel group", TP, _LINEAR,
          lambda real: _but(real, all_reduce=lambda x, group: real.all_reduce(
              x, ProcessGroupCollection.current().dp)), ranks=4),
    Fault("sequence parallelism: gradients of norms are not summed", SP,
          f"{_GRADIENTS}:_sum_partial_gradients", lambda real: lambda model, groups: None),
    Fault("pipeline: gradients of the tied embedding are not summed", PP,
          f"{_GRADIENTS}:_sum_tied_gradients", lambda real: lambda model, groups: None),
    Fault("gradients are divided by one micro batch too many", DP,
          f"{_SCHEDULES}:ExactScale.of",
          lambda real: lambda config, count, tokens: real(config, count + 1, tokens)),
    Fault("a replica keeps only its last micro batch", DP,
          f"{_DDP}.zero.stage1:ParamAndGradBuffer.register_grad_ready", _forgets_micro_batches),
    Fault("one bucket of gradients is not reduced", DP,
          f"{_DDP}.zero.stage:ZeroStage._reduce", _without_bucket_0),
    Fault("a replica reduces gradients that are rounded to bf16", DP,
          f"{_DDP}.zero.stage:ZeroStage._reduce",
          lambda real: lambda buffer, bucket, gradients, *into: real(
              buffer, bucket, gradients.copy_(gradients.bfloat16()), *into)),
    Fault("ZeRO 1: weights are not gathered after the second step", ZERO_1,
          f"{_DDP}.zero.gathered_params:GatheredParams.start_gathers", _skips_second_gather),
    Fault("ZeRO 2: a shard keeps only the last micro batch", ZERO_2,
          f"{_DDP}.zero.stage2:Zero2Buffer._start_reduction", _overwrites_sum),
    Fault("the mask of one rank's heads is shifted by a key", TP,
          "megatron.core.transformer.dot_product_attention:DotProductAttention.window",
          lambda real: _on_rank_1(lambda *_: (-1, 1), real)),
    Fault("dropout depends on the rank", {**DP, "hidden-dropout": 0.1, "attention-dropout": 0.1},
          "megatron.core.parameters.rng:RandomState.next_key",
          lambda real: lambda state: (*real(state), dist.get_rank())),
    Fault("rows of the embedding begin one id too late on a rank", TP,
          "megatron.core.tensor_parallel.vocab_embedding:VocabParallelEmbedding.forward",
          _shifts_rows),
    Fault("columns of the loss begin one id too late on a rank", TP,
          "megatron.core.tensor_parallel.cross_entropy:VocabShard.of", _shifts_columns),
    Fault("the gradient norm lacks the other tensor-parallel rank", TP,
          "megatron.core.optimizer.gradient_norm:_Part.__init__",
          lambda real: lambda part, *args: real(part, *args[:-1], SINGLE_RANK)),
    Fault("weights that all ranks hold count twice in the gradient norm", TP,
          "megatron.core.optimizer.gradient_norm:is_counted_on_rank",
          lambda real: lambda parameter, groups: True),
    Fault("rotary positions of one stage begin at 1", PP,
          "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward",
          lambda real: _on_rank_1(
              lambda self, length, **options: real(self, length, offset=1, **options), real)),
    Fault("a replica reads the samples of another", DP,
          "megatron.training.datasets.data_samplers:MegatronPretrainingSampler.__post_init__",
          lambda real: lambda sampler: (real(sampler), setattr(sampler, "data_parallel_rank", 0))),
    Fault("the learning rate of one rank is 0.1 % lower", TP,
          "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step", _lower_rate),
    Fault("a stage computes its norms with another epsilon", PP,
          "megatron.core.transformer.norm:Norm.__init__",
          lambda real: _on_rank_1(
              lambda self, size, eps=1e-5, **options: real(self, size, eps * 1.0001, **options),
              real)),
)  # fmt: skip
"""Twenty and more mistakes, as data."""


def run_with_fault(groups: Any, name: str | None, words: list[str], metrics: str) -> Any:
    """Train with a fault, or without one; the job of a rank."""
    fault = next((fault for fault in FAULTS if fault.name == name), None)
    with fault.planted() if fault else contextlib.nullcontext():
        return run_rank(groups, words, metrics)


class FaultyExecution(Execution):
    """Runs of one model, each with a fault or without one."""

    fault: str | None = None
    digest: str | None = None
    """Of the last run; None if it did not reach its end."""

    def run_ranks(self, case: Case, body: Callable[..., Any], *args: object) -> list[Any]:
        """Run with the fault, and note the digest."""
        self.digest = None
        outcomes = super().run_ranks(case, run_with_fault, self.fault)
        text = "".join(outcome.log for outcome in outcomes)
        found = re.findall(r"digest of the weights: (\w+)", text)
        self.digest = found[-1] if found else None
        return outcomes

    def run_fault(self, case: Case, fault: Fault | None) -> Result:
        """Run a case with a fault."""
        self.fault = None if fault is None else fault.name
        return self.run(case)


@dataclass(frozen=True)
class Found:
    """What finds a fault."""

    stops: bool
    """The run with the fault does not reach its end."""
    by_digest: bool
    by_losses: bool
    """Within the tolerances of the parity tests."""
    by_tolerances: bool
    """The whole comparison: in fp32 losses, norms and weights; in bf16 losses."""


def find(execution: FaultyExecution, fault: Fault, precision: Settings) -> Found:
    """Run one process, the layout without the fault, and the layout with it.

    Raises:
        AssertionError: without the fault the digest differs from the digest of one process.
    """
    case = Case(fault.ranks, False, {**MODEL, **fault.layout, **precision})
    one = execution.run_fault(case.serial, None)
    expected = execution.digest
    right = execution.run_fault(case, None)
    assert expected is not None and execution.digest == expected, (fault.name, right.text)
    wrong = execution.run_fault(case, fault)
    verdict = compare(case, _without_digest(wrong), _without_digest(one))
    losses = compare(case, _losses_of(wrong), _losses_of(one))
    return Found(
        stops=wrong.kind is not Kind.EQUAL,
        by_digest=execution.digest != expected,
        by_losses=losses.kind is not Kind.EQUAL,
        by_tolerances=verdict.kind is not Kind.EQUAL,
    )


def _without_digest(result: Result) -> Result:
    return replace(result, figures=[f for f in result.figures if "digest" not in f.name])


def _losses_of(result: Result) -> Result:
    losses = [f for f in result.figures if "lm loss" in f.name and math.isfinite(f.value)]
    return replace(result, figures=losses, weights={})


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    only: str = ""
    """Plant only the faults with this text in their name."""


def main() -> int:
    """Plant every fault; return 1 if the digest misses one."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.planted_faults", description=__doc__
    )
    num_missed = 0
    for precision in PRECISIONS:
        found = []
        with tempfile.TemporaryDirectory() as folder:
            execution = FaultyExecution(Path(folder))
            for fault in (fault for fault in FAULTS if flags.only in fault.name):
                one = find(execution, fault, PRECISIONS[precision])
                found.append(one)
                seen = ", ".join(f"{k}: {'yes' if v else 'NO'}" for k, v in vars(one).items())
                print(f"{precision}, {fault.name}: {seen}", flush=True)
        missed = {way: sum(not getattr(one, way) for one in found) for way in vars(found[0])}
        print(f"{precision}: {len(found)} faults, missed: {missed}", flush=True)
        num_missed += missed["by_digest"]
    return int(num_missed > 0)


if __name__ == "__main__":
    sys.exit(main())
