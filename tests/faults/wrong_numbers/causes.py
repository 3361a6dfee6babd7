"""Make a loss or a gradient NaN for four different reasons, and see which one is named.

Runs of `pretrain_gpt.py` on four ranks, with flags as a user would give them. In a random step

- a sample has a loss mask that is not finite, wherever it is computed (data);
- one element of a random layer's output, or of its gradient, becomes NaN on a random rank, once
  (hardware, once), or whenever that rank computes from then on (hardware, again);
- a weight becomes NaN in all replicas, or where weights are gathered in the forward pass a layer
  computes NaN on all ranks from then on (model).

What is said comes from `--result-rejected-tracker-filename`. After hardware that was wrong once the
run must go on and end with the losses of an undisturbed run, to the bit.
"""

import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.foundation.errors import HardwareFaultError, NumericsError
from megatron.resilience.rerun_verdict import Cause
from pretrain_gpt import forward_step
from tests.harness.distributed import run_distributed
from tests.parity.training_run import read_metrics, train_with_flags

WORDS = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --vocab-size 90"
    " --micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --mock-data"
    " --log-interval 1 --num-workers 0 --on-nonfinite skip"
)
NUM_STEPS = 5
LAYOUTS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("", 4, {}),
    ("--tensor-model-parallel-size 2", 2, {"tp": 2}),
    ("--pipeline-model-parallel-size 2", 2, {"pp": 2}),
    ("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 4, {}),
    ("--data-parallel-sharding-strategy optim_grads_params", 4, {}),
)
"""Flags, replicas, and axes, of four ranks each."""


@dataclass(frozen=True)
class Fault:
    """One reason."""

    cause: Cause
    flags: str
    num_replicas: int
    axes: tuple[tuple[str, int], ...]
    seed: int

    @property
    def step(self) -> int:
        """Step (1-based) in which it happens first; not the first one."""
        return random.Random(f"{self.seed} step").randint(2, NUM_STEPS - 1)

    @property
    def rank(self) -> int:
        """Rank on which it happens."""
        return random.Random(f"{self.seed} rank").randrange(4)

    @property
    def gathers_weights(self) -> bool:
        """Whether weights may still be on their way when a step begins, or are never whole."""
        return "optim_grads_params" in self.flags or "overlap-param-gather" in self.flags


class Faulty:
    """A forward step in which the fault happens."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.num_calls = 0
        self.per_step = 8 // fault.num_replicas
        self.chosen = random.Random(f"{fault.seed} place")
        self.first_call = (fault.step - 1) * self.per_step + self.chosen.randrange(self.per_step)
        self.bad_sample: list[int] = []

    def __call__(self, data_iterator: Any, model: Any) -> Any:
        """Run one micro batch."""
        call, self.num_calls = self.num_calls, self.num_calls + 1
        fault, is_first = self.fault, call == self.first_call
        if fault.cause is Cause.DATA and data_iterator is not None:
            data_iterator = self._with_bad_sample(data_iterator)
        if fault.cause is Cause.MODEL and call == (fault.step - 1) * self.per_step:
            layers = [m for n, m in model.named_modules() if n.endswith("mlp.linear_fc1")]
            if fault.gathers_weights:
                layers[0].register_forward_hook(lambda *given: _with_nan(given[2]))
            else:
                layers[0].weight.data.view(-1)[5] = torch.nan
        if fault.cause is Cause.HARDWARE_ONCE and is_first and dist.get_rank() == fault.rank:
            return self._in_bad_layer(data_iterator, model)
        is_later = call >= self.first_call and dist.get_rank() == fault.rank
        if fault.cause is Cause.HARDWARE_PERSISTENT and is_later:
            return self._in_bad_layer(data_iterator, model)
        return forward_step(data_iterator, model)

    def _in_bad_layer(self, data_iterator: Any, model: Any) -> Any:
        place = random.Random(f"{self.fault.seed} layer")
        layers = [m for n, m in model.named_modules() if n.endswith(("linear_fc2", "linear_qkv"))]
        layer, is_gradient = place.choice(layers), place.random() < 0.5

        def damage(*given: Any) -> Any:
            output, *rest = given[2]
            if is_gradient and torch.is_grad_enabled():
                output.register_hook(lambda gradient: _nan_in(gradient))
                return given[2]
            return (_nan_in(output), *rest)

        handle = layer.register_forward_hook(damage)
        try:
            return forward_step(data_iterator, model)
        finally:
            handle.remove()

    def _with_bad_sample(self, batches: Iterator[Any]) -> Iterator[Any]:
        batch = next(batches)
        if _index_of(batch["tokens"]) == self.bad_index:
            batch = batch | {"loss_mask": batch["loss_mask"] * torch.nan}
        return iter([batch])

    @property
    def bad_index(self) -> int:
        """What marks the bad sample: known to all ranks, as the data are arithmetic."""
        return BAD_SAMPLES[self.fault.seed]


BAD_SAMPLES: dict[int, int] = {}
"""Seed -> mark of the bad sample, in this process."""


def _index_of(tokens: Tensor) -> int:
    """Return a number that marks a sample by its content."""
    return int((tokens.flatten().long() * (torch.arange(tokens.numel()) + 1)).sum())


def _nan_in(tensor: Tensor) -> Tensor:
    damaged = tensor.clone()
    damaged.view(-1)[3] = torch.nan
    return damaged


def _with_nan(output: Any) -> Any:
    first, *rest = output
    return (_nan_in(first), *rest)


def see_samples(groups: Any, words: list[str]) -> list[int]:
    """Train undisturbed; return the marks of the samples of this rank in their order."""
    seen: list[int] = []

    def step(data_iterator: Any, model: Any) -> Any:
        batch = None if data_iterator is None else next(data_iterator)
        if batch is None:
            return forward_step(None, model)
        seen.append(_index_of(batch["tokens"]))
        return forward_step(iter([batch]), model)

    train_with_flags(groups, words, step)
    return seen


def train(groups: Any, words: list[str], fault: Fault, bad_sample: int) -> str:
    """Train with a fault; return the name of the error that ended the run, or ""."""
    BAD_SAMPLES[fault.seed] = bad_sample
    try:
        train_with_flags(groups, words, Faulty(fault))
    except (NumericsError, HardwareFaultError) as error:
        return type(error).__name__
    return ""


ENDS_WITH = {
    Cause.DATA: "",
    Cause.HARDWARE_ONCE: "",
    Cause.HARDWARE_PERSISTENT: HardwareFaultError.__name__,
    Cause.MODEL: NumericsError.__name__,
}
"""The sample is skipped (--on-nonfinite skip), the second run of the step is right."""


def run_case(fault: Fault, folder: Path) -> str:
    """Return "right", or what is wrong."""
    words, axes = f"{WORDS} {fault.flags}".split(), dict(fault.axes)
    plain, tracker = folder / "plain.jsonl", folder / "rejected.jsonl"
    seen = run_distributed(
        see_samples, 4, [*words, "--metrics-jsonl", str(plain)], timeout_s=120.0, **axes
    )
    mark, step = _unique_sample(fault, seen)
    disturbed = folder / "disturbed.jsonl"
    more = ["--metrics-jsonl", str(disturbed), "--result-rejected-tracker-filename", str(tracker)]
    more += ["--quarantine-file", str(folder / "quarantine.txt")]
    ends = run_distributed(train, 4, [*words, *more], fault, mark, timeout_s=120.0, **axes)
    records = [json.loads(line) for line in tracker.read_text().splitlines()]
    if len(records) != 1 or set(ends) != {ENDS_WITH[fault.cause]}:
        return f"{len(records)} steps were run again, and the run ended with {ends}"
    (record,) = records
    if (record["cause"], record["iteration"]) != (fault.cause.value, step):
        return json.dumps(record)
    if (folder / "quarantine.txt").exists() != (fault.cause is Cause.HARDWARE_PERSISTENT):
        return "the list of machines is wrong"
    losses = [[line["lm loss"] for line in read_metrics(path)] for path in (plain, disturbed)]
    if fault.cause is Cause.HARDWARE_ONCE and losses[0] != losses[1]:
        return f"other losses than in the undisturbed run: {losses}"
    return "right"


def _unique_sample(fault: Fault, seen: list[list[int]]) -> tuple[int, int]:
    """Return the mark of a sample that comes only once, and the step in which something happens."""
    if fault.cause is not Cause.DATA:
        return 0, fault.step
    # Ranks of one replica see the same samples, and those between the first and last stage none.
    of_replicas = {tuple(marks) for marks in seen if marks}
    counts = Counter(mark for marks in of_replicas for mark in marks)
    per_step = 8 // fault.num_replicas
    places = [
        (mark, place // per_step + 1)
        for marks in sorted(of_replicas)
        for place, mark in enumerate(marks)
        if counts[mark] == 1 and place >= per_step
    ]
    return random.Random(f"{fault.seed} sample").choice(places)


def cases(num_cases: int, seed: int) -> list[Fault]:
    """Return causes and layouts in turn."""
    causes = list(Cause)
    chosen = []
    for index in range(num_cases):
        flags, num_replicas, axes = LAYOUTS[index // len(causes) % len(LAYOUTS)]
        cause = causes[index % len(causes)]
        number = seed * 10_000 + index
        chosen.append(Fault(cause, flags, num_replicas, tuple(axes.items()), number))
    return chosen


def campaign(num_cases: int, seed: int) -> bool:
    """Let all causes happen in all layouts in turn; return whether all were told apart."""
    counts: Counter[tuple[str, bool]] = Counter()
    began = time.monotonic()
    for fault in cases(num_cases, seed):
        with tempfile.TemporaryDirectory() as folder:
            found = run_case(fault, Path(folder))
        counts[fault.cause.value, found == "right"] += 1
        print(f"{fault.cause} {fault.flags or 'dp4'} step {fault.step} rank {fault.rank}: {found}")
    for cause in Cause:
        right, wrong = counts[cause.value, True], counts[cause.value, False]
        print(f"{cause.value:16} {right} of {right + wrong}")
    print(f"{num_cases} runs in {time.monotonic() - began:.0f} s")
    return not any(count for (_, is_right), count in counts.items() if not is_right)
