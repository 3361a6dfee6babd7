"""Cost of data parallelism on two ranks: ours, torch's, and the same work without communication.

    python -m benchmarks.data_parallel                  # gradients only
    python -m benchmarks.data_parallel --optimizer      # with clipping and AdamW, and ZeRO stages
    python -m benchmarks.data_parallel --optimizer --vocabulary 16384 --microbatches 1 --rounds 12
                                                        # 34 million parameters, one micro batch

`benchmarks.peak_memory` measures the memory of the same candidates. Single-threaded gloo ranks run
micro batches of sequence 256 through the same plain PyTorch GPT of width 512 (8 layers, 26 million
parameters by default).

The yardstick "alone" is our wrapper with one replica, also on two ranks at a time. The yardstick
and each candidate run in their own pairs of processes, so that settings of the C library and the
state of the heap do not affect other candidates. They alternate step by step. Each step is compared
with the mean of the yardstick's steps before and after it, which cancels drift of the machine. The
table has the medians of these ratios, and in brackets the ratio of the medians. `cpu` counts
processor seconds of the computing and the communicating threads, `faults` counts the pages that a
step touched for the first time. All are means of the two ranks.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks.plain_gpt import PlainGPT2, Sizes
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

SEQUENCE = 256
CONFIG = SimpleNamespace(calculate_per_token_loss=False)
Step = Callable[[], None]
Phase = Callable[[str], AbstractContextManager[None]]

OURS: dict[str, dict[str, object] | None] = {
    "alone": None,
    "stage 0": {"overlap_grad_reduce": True},
    "stage 0, no overlap": {},
    "stage 1": {"overlap_grad_reduce": True, "use_distributed_optimizer": True},
    "stage 1, gather overlapped": {
        "overlap_grad_reduce": True,
        "use_distributed_optimizer": True,
        "overlap_param_gather": True,
    },
    "stage 2": {"data_parallel_sharding_strategy": "optim_grads"},
    "stage 3": {"data_parallel_sharding_strategy": "optim_grads_params"},
}
CANDIDATES = (*OURS, "torch DDP", "torch FSDP2")
WARMUP_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Work of a step; the flags of this benchmark and of others."""

    optimizer: bool = False
    """Also clip the gradients and update the weights."""
    layers: int = 8
    """Layers of the model."""
    vocabulary: int
    """Rows of the embedding."""
    microbatches: int
    """Micro batches per step."""


@dataclass(frozen=True, kw_only=True)
class Flags(Workload):
    """Flags of the command line."""

    vocabulary: int = 1024
    microbatches: int = 8
    rounds: int = 7
    """Steps of each candidate."""
    only: tuple[str, ...] | None = flag(None, choices=CANDIDATES)
    """Names of candidates. Default: all."""


def build_model(options: Workload) -> nn.Module:
    """Return the model that every candidate wraps."""
    sizes = Sizes(num_layers=options.layers, vocab_size=options.vocabulary, sequence=SEQUENCE)
    return PlainGPT2(sizes)


def micro_batches(rank: int, options: Workload) -> list[torch.Tensor]:
    """Return token ids [1, s + 1] for each micro batch of a rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (options.microbatches, 1, SEQUENCE + 1)
    return list(torch.randint(options.vocabulary, shape, generator=generator))


def no_phase(_: str) -> AbstractContextManager[None]:
    """Enter a phase of a step without recording it."""
    return nullcontext()


def backward(
    model: nn.Module, batches: list[torch.Tensor], index: int, phase: Phase = no_phase
) -> None:
    """Run one micro batch forward and backward."""
    ids = batches[index]
    with phase("forward"):
        loss = model(ids[:, :-1], ids[:, 1:]) / len(batches)
    with phase("backward"):
        loss.backward()


def our_step(
    rank: int,
    settings: dict[str, object] | None,
    options: Workload,
    phase: Phase = no_phase,
) -> Step:
    """Return a step of our wrapper; `settings` None is one replica without communication.

    Args:
        phase: entered around "forward", "backward", "finish" (the reduction) and "update".
    """
    groups = ProcessGroupCollection.single()
    if settings is not None:
        groups = groups.with_groups(dp_cp=dist.group.WORLD, dp=dist.group.WORLD)
    ddp_config = DistributedDataParallelConfig(**(settings or {}))  # type: ignore[arg-type]
    ddp = DistributedDataParallel(CONFIG, ddp_config, build_model(options), pg_collection=groups)
    config = OptimizerConfig(
        lr=1e-4, use_distributed_optimizer=ddp_config.use_distributed_optimizer
    )
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
    batches = micro_batches(rank, options)

    def step() -> None:
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            for index in range(len(batches) - 1):
                backward(ddp, batches, index, phase)
        backward(ddp, batches, -1, phase)
        with phase("finish"):
            finalize_model_grads([ddp], pg_collection=groups)
        if options.optimizer:
            with phase("update"):
                optimizer.step()

    return step


def torch_step(rank: int, options: Workload) -> Step:
    """Return a step of torch's DistributedDataParallel with its defaults."""
    ddp = nn.parallel.DistributedDataParallel(build_model(options), gradient_as_bucket_view=True)
    rule = torch.optim.AdamW(ddp.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    batches = micro_batches(rank, options)

    def step() -> None:
        ddp.zero_grad()
        with ddp.no_sync():
            for index in range(len(batches) - 1):
                backward(ddp, batches, index)
        backward(ddp, batches, -1)
        if options.optimizer:
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            rule.step()

    return step


def fsdp2_step(rank: int, options: Workload) -> Step:
    """Return a step of torch's fully_shard, one unit per layer, with its defaults."""
    from torch.distributed.fsdp import fully_shard

    model: Any = build_model(options)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    rule = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
    batches = micro_batches(rank, options)

    def step() -> None:
        model.zero_grad()
        model.set_requires_gradient_sync(False)
        for index in range(len(batches) - 1):
            backward(model, batches, index)
        model.set_requires_gradient_sync(True)
        backward(model, batches, -1)
        if options.optimizer:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rule.step()

    return step


def step_of(name: str, rank: int, options: Workload) -> Step:
    """Return a step of a candidate."""
    if name in OURS:
        return our_step(rank, OURS[name], options)
    return torch_step(rank, options) if name == "torch DDP" else fsdp2_step(rank, options)


def become_rank(rank: int, store: str, name: str) -> None:
    """Run one of the two ranks of a candidate, in a process that has allocated nothing yet."""
    if name.startswith("torch"):
        os.environ["THP_MEM_ALLOC_ENABLE"] = "0"  # ours only: see `megatron.core.foundation.device`
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)


class Cost(NamedTuple):
    """Cost of a step for a rank."""

    wall: float
    processor: float
    faults: float


def cost(step: Step) -> Cost:
    """Measure one step, begun and ended together."""
    dist.barrier()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    wall, processor = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    return Cost(wall, processor, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)


def serve(rank: int, store: str, name: str, options: Workload, orders: Any) -> None:
    """Run a step of a candidate for each order received; the main function of a process."""
    become_rank(rank, f"file://{store}", name)
    step = step_of(name, rank, options)
    while orders.recv():
        orders.send(cost(step))
    dist.destroy_process_group()


class Ranks:
    """Two processes of one candidate that alternate with others."""

    def __init__(self, name: str, options: Workload) -> None:
        context = mp.get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        self._pipes, self._processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            arguments = (rank, f"{self._directory.name}/store", name, options, theirs)
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for _ in range(WARMUP_STEPS):
            self.step()

    def step(self) -> Cost:
        """Run a step and return its cost, the mean over the ranks."""
        for pipe in self._pipes:
            pipe.send(True)
        found = [pipe.recv() for pipe in self._pipes]
        return Cost(*(statistics.mean(column) for column in zip(*found, strict=True)))

    def end(self) -> None:
        """End the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(False)
            process.join()
        self._directory.cleanup()


def ratios(found: Sequence[float], around: Sequence[float]) -> list[float]:
    """Divide each figure by the mean of the yardstick's figures before and after it."""
    pairs = zip(around, around[1:], strict=False)
    return [2 * figure / (a + b) for figure, (a, b) in zip(found, pairs, strict=True)]


def compare(name: str, yardstick: Ranks, options: Flags) -> None:
    """Alternate a candidate with the yardstick, and print the candidate's row."""
    candidate = Ranks(name, options)
    around, found = [yardstick.step()], []
    for _ in range(options.rounds):
        found.append(candidate.step())
        around.append(yardstick.step())
    candidate.end()
    middle = Cost(*(statistics.median(column) for column in zip(*found, strict=True)))
    alone = Cost(*(statistics.median(column) for column in zip(*around, strict=True)))
    walls, cpus = (ratios([c[i] for c in found], [c[i] for c in around]) for i in range(2))
    print(
        f"{name:<27}{middle.wall * 1e3:>6.0f} {statistics.median(walls):.3f}"
        f" ({middle.wall / alone.wall:.3f}){middle.processor * 1e3:>7.0f}"
        f" {statistics.median(cpus):.3f} ({middle.processor / alone.processor:.3f})"
        f"{middle.faults:>8.0f}   {min(walls):.2f} ... {max(walls):.2f}"
        f"  {min(cpus):.2f} ... {max(cpus):.2f}",
        flush=True,
    )


def main() -> None:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    without_optimizer = ("alone", "stage 0", "stage 0, no overlap", "torch DDP")
    names = options.only or (CANDIDATES if options.optimizer else without_optimizer)
    yardstick = Ranks("alone", options)
    print(f"{'':<27}{'wall ms':>7}{'ratio':>14}{'cpu ms':>9}{'ratio':>14}{'faults':>8}   ranges")
    for name in names:
        compare(name, yardstick, options)
    yardstick.end()


if __name__ == "__main__":
    main()
