"""Cost of data parallelism on two ranks: ours, torch's, and the same work without communication.

    python -m benchmarks.data_parallel                  # gradients only
    python -m benchmarks.data_parallel --optimizer      # with clipping and AdamW, and ZeRO stages
    python -m benchmarks.data_parallel --optimizer --vocabulary 16384 --microbatches 1 --rounds 9
                                                        # 34 million parameters, one micro batch

`benchmarks.peak_memory` measures the memory of the same candidates. Two single-threaded gloo
processes run micro batches of sequence 256 through the same plain PyTorch GPT of width 512 (8
layers, 26 million parameters by default). All candidates take turns in the same run, step by step,
both processes at the same time; a row is the median of the ratios to the candidate "alone" of the
same turn, which runs our wrapper with one replica. `cpu` counts processor seconds of both the
computing thread and the communication threads.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

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


def build_model(options: argparse.Namespace) -> nn.Module:
    """Return the model that every candidate wraps."""
    sizes = Sizes(num_layers=options.layers, vocab_size=options.vocabulary, sequence=SEQUENCE)
    return PlainGPT2(sizes)


def micro_batches(rank: int, options: argparse.Namespace) -> list[torch.Tensor]:
    """Return token ids [1, s + 1] for each micro batch of a rank."""
    generator = torch.Generator().manual_seed(rank)
    shape = (options.microbatches, 1, SEQUENCE + 1)
    return list(torch.randint(options.vocabulary, shape, generator=generator))


def no_phase(_: str) -> AbstractContextManager[None]:
    """Note nothing about a phase of a step."""
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
    options: argparse.Namespace,
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


def torch_step(rank: int, options: argparse.Namespace) -> Step:
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


def fsdp2_step(rank: int, options: argparse.Namespace) -> Step:
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


def step_of(name: str, rank: int, options: argparse.Namespace) -> Step:
    """Return a step of a candidate."""
    if name in OURS:
        return our_step(rank, OURS[name], options)
    return torch_step(rank, options) if name == "torch DDP" else fsdp2_step(rank, options)


def seconds(step: Step) -> tuple[float, float]:
    """Return (wall, processor) seconds of one step, begun and ended together."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    step()
    dist.barrier()
    return time.perf_counter() - wall, time.process_time() - processor


def measure(rank: int, store: str, options: argparse.Namespace) -> None:
    """Let the candidates take turns; the job of one process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    names = [*OURS, "torch DDP", "torch FSDP2"]
    if not options.optimizer:
        names = ["alone", "stage 0", "stage 0, no overlap", "torch DDP"]
    steps = {name: step_of(name, rank, options) for name in names}
    for step in steps.values():
        step()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    order = list(steps)
    for turn in range(options.rounds):
        # Another order each time: what ran before leaves the caches and the clock in its state.
        shift = turn % len(order)
        for name in order[shift:] + order[:shift]:
            times[name].append(seconds(steps[name]))
    if rank == 0:
        print(f"{'':<28}{'wall ms':>9}{'ratio':>8}{'cpu ms':>9}{'ratio':>8}   range of wall ratios")
        for name, found in times.items():
            walls = [a[0] / b[0] for a, b in zip(found, times["alone"], strict=True)]
            cpus = [a[1] / b[1] for a, b in zip(found, times["alone"], strict=True)]
            wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
            print(
                f"{name:<28}{wall * 1e3:>9.0f}{statistics.median(walls):>8.3f}"
                f"{cpu * 1e3:>9.0f}{statistics.median(cpus):>8.3f}"
                f"   {min(walls):.3f} ... {max(walls):.3f}"
            )
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--optimizer", action="store_true", help="clip and update as well")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model")
    parser.add_argument("--vocabulary", type=int, default=1024, help="rows of the embedding")
    parser.add_argument("--microbatches", type=int, default=8, help="micro batches per step")
    parser.add_argument("--rounds", type=int, default=7, help="turns of each candidate")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(measure, args=(os.path.join(directory, "store"), options), nprocs=2)


if __name__ == "__main__":
    main()
