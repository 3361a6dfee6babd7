"""Share of a slow transfer between device and host memory that computation hides.

    python -m benchmarks.offload_copies --kind zero2
    python -m benchmarks.offload_copies --kind zero3
    python -m benchmarks.offload_copies --kind zero3 --simulated --compute 1.0

One process trains the plain PyTorch GPT of `benchmarks.data_parallel` in bf16 with AdamW. The
state is in host memory, in one of two ways:

    zero2   gradients are copied to the host during backward, weights to the device during update
    zero3   the shards of the weights are in host memory, too: copied to the device for each gather

On a CPU the host is the device, and copies are fast. So each copy also waits until it has taken the
time that `--rate` bytes per second allow, in each direction. The computing thread records how long
it waits for a copy; the rest of the transfer is hidden:

    hidden = 1 - waited / (bytes / rate)

With `--simulated` nothing is timed: the same program starts and waits for copies by a simulated
clock, which only computation advances. A layer takes `--compute` times the transfer time of its
weights in the forward pass and twice that in the backward pass; the update takes `--update`
nanoseconds per element. The result does not depend on the machine.

`--timeline` prints the copies and the waits of the last step.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from benchmarks.data_parallel import CONFIG, Workload, backward, build_model, micro_batches
from benchmarks.slow_link import Clock, Interval, Record, SimulatedCopies, SlowCopies
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.zero import gathered_params, sharded_params, stage2
from megatron.core.offload.device_copies import DeviceCopies
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.definition import ElementwiseUpdate, Pieces
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag, no_flag

WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Flags(Workload):
    """Flags of the command line."""

    kind: str = flag("zero3", choices=("zero2", "zero3"))
    """Part of the state that is in host memory."""
    optimizer: bool = no_flag(True)
    vocabulary: int = 1024
    microbatches: int = 4
    rate: float = 1e9
    """Rate of the slow copies in bytes per second."""
    rounds: int = 10
    """Number of steps."""
    simulated: bool = False
    """Simulate the time instead of measuring it."""
    compute: float = 1.0
    """With --simulated: time of a layer's forward pass over the time of its transfer."""
    update: float = 3.0
    """With --simulated: nanoseconds of the update per element. AdamW reads and writes 30 bytes of
    each, which a core does at 10 GB/s."""
    bucket_size: int = 1_000_000
    """Maximum number of gradients that are reduced and copied at a time."""
    timeline: bool = False
    """Print the copies and the waits."""


@dataclass(frozen=True)
class Step:
    """Times of a step."""

    seconds: float
    transfer_s: float
    waited_s: float

    @property
    def hidden(self) -> float:
        """Share of the transfer without waiting."""
        return 1 - self.waited_s / self.transfer_s


KINDS: dict[str, dict[str, Any]] = {
    "zero2": {"data_parallel_sharding_strategy": "optim_grads"},
    "zero3": {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "param_cpu_offload": True,
    },
}


class Training:
    """A model whose copies use a slow link."""

    def __init__(self, model: nn.Module, options: Flags) -> None:
        self.options, self.record, self.clock = options, Record(), Clock()
        if options.simulated:
            self._give_time(model)
        self._groups = ProcessGroupCollection.single()
        overlap = {"overlap_cpu_optimizer_d2h_h2d": True}
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, bucket_size=options.bucket_size, **KINDS[options.kind],
            **overlap,
        )  # fmt: skip
        with ExitStack() as stack:
            for module, name in (
                (sharded_params, "weights"),
                (gathered_params, "weights"),
                (stage2, "gradients"),
            ):
                link = partial(self._link, name)
                stack.enter_context(patch.object(module, "device_copies", link))
            self.model = DistributedDataParallel(
                CONFIG, settings, model, pg_collection=self._groups
            )
        config = OptimizerConfig(
            lr=1e-3, bf16=True, optimizer_cpu_offload=True, use_distributed_optimizer=True,
            **overlap,
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(config, [self.model], pg_collection=self._groups)
        if options.simulated:
            self.optimizer.optimizer.update = self._timed(self.optimizer.optimizer.update)
        self._batches = micro_batches(0, options)

    def _link(self, name: str, _: torch.device, *, to_host: bool = False) -> DeviceCopies:
        if self.options.simulated:
            return SimulatedCopies(name, self.options.rate, self.record, self.clock)
        return SlowCopies(name, self.options.rate, self.record)

    def _give_time(self, model: nn.Module) -> None:
        per_byte = self.options.compute / self.options.rate
        inside = 0
        for block in model.blocks:
            num_bytes = sum(p.nbytes for p in block.parameters())
            self.clock.compute(block, num_bytes * per_byte)
            inside += num_bytes
        outside = sum(p.nbytes for p in model.parameters()) - inside
        self.clock.compute(model, outside * per_byte)

    def _timed(self, rule: ElementwiseUpdate) -> ElementwiseUpdate:
        def update(pieces: Pieces) -> None:
            rule.update(pieces)
            numel = sum(weight.numel() for weight in pieces.weights)
            self.clock.now += numel * self.options.update * 1e-9

        return replace(rule, update=update)

    def now(self) -> float:
        """Return the time of the clock in use."""
        return self.clock() if self.options.simulated else time.perf_counter()

    def step(self) -> Step:
        """Train on all micro batches, and update the weights."""
        self.record.clear()
        model, batches, begin = self.model, self._batches, self.now()
        model.zero_grad_buffer()
        with model.no_sync():
            for index in range(len(batches) - 1):
                backward(model, batches, index)
        backward(model, batches, -1)
        finalize_model_grads([model], pg_collection=self._groups)
        self.optimizer.step()
        transfer_s = self.record.num_bytes / self.options.rate
        return Step(self.now() - begin, transfer_s, self.record.waited_s)


def print_timeline(record: Record) -> None:
    """Print copies, and waits longer than zero, in order."""
    first = min(copy.begin for copy in record.copies)
    rows: list[tuple[str, Interval]] = [("copy", copy) for copy in record.copies]
    rows += [("wait", wait) for wait in record.waits if wait.end - wait.begin > 1e-5]
    for kind, (name, begin, end) in sorted(rows, key=lambda row: row[1].begin):
        print(f"{(begin - first) * 1e3:10.1f} ms  {kind} {name} {(end - begin) * 1e3:.1f} ms")


def main() -> int:
    """Print the table."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    training = Training(build_model(options).bfloat16(), options)
    for _ in range(WARMUP_STEPS):
        training.step()
    steps = [training.step() for _ in range(1 if options.simulated else options.rounds)]
    if options.timeline:
        print_timeline(training.record)
    transfer_s = steps[-1].transfer_s
    num_mib = transfer_s * options.rate / 2**20
    print(f"copied in a step {num_mib:.0f} MiB: {transfer_s:.2f} s at this rate")
    seconds = statistics.median(step.seconds for step in steps)
    waited_s = statistics.median(step.waited_s for step in steps)
    hidden = statistics.median(step.hidden for step in steps)
    print(f"step {seconds:.2f} s, waited for copies {waited_s:.3f} s: {hidden:.0%} hidden")
    return 0


if __name__ == "__main__":
    sys.exit(main())
