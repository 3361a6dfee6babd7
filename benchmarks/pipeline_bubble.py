"""Cost of a pipeline: dispatch, bubble, and messages.

    python -m benchmarks.pipeline_bubble             # all three tables, about a minute
    python -m benchmarks.pipeline_bubble --trace run.json   # also write the trace of the last run

1. Dispatch: Python time of the executor per compute step, on one process, with empty stages.
2. Bubble: 4 gloo processes whose stages sleep, so that the number of cores has no effect, against
   the simulated bubble and step. The excess is dispatch, messages and the machine's clock. With
   "exchange", a third of a forward is an exchange with other ranks; alternating forwards and
   backwards hide it.
3. Messages: 2 processes whose stages multiply matrices and exchange activations of 8 micro batches
   of sequence 256 and width 512, against the same work without a pipeline on the same two processes
   at the same time. The bubble alone would give 1.125 (and 1.0625 with 2 chunks).

The quietest of several steps counts: other programs on the machine can only add time.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.recorder import PipelineRecorder
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from tests.distributed.pipeline_parallel.sleeping_stages import SleepingCase, measure
from tests.harness.distributed import run_distributed

SEQUENCE, WIDTH, MICROBATCHES, LAYERS_PER_RANK = 256, 512, 8, 4
FORWARD_S = 0.020
"""Seconds of compute of all chunks of a rank."""
BUBBLE_CASES = [
    SleepingCase("gpipe", 1, 4, FORWARD_S),
    SleepingCase("gpipe", 1, 8, FORWARD_S),
    SleepingCase("1f1b", 1, 8, FORWARD_S),
    SleepingCase("1f1b", 1, 16, FORWARD_S),
    SleepingCase("1f1b", 2, 8, FORWARD_S / 2),
    SleepingCase("1f1b", 1, 16, FORWARD_S, exchange_s=FORWARD_S / 2),
    SleepingCase("1f1b", 1, 16, FORWARD_S, exchange_s=FORWARD_S / 2, overlap_f_b=True),
    SleepingCase("1f1b", 2, 16, FORWARD_S / 2, exchange_s=FORWARD_S / 4),
    SleepingCase("1f1b", 2, 16, FORWARD_S / 2, exchange_s=FORWARD_S / 4, overlap_f_b=True),
    SleepingCase("dualpipe-v", 2, 8, FORWARD_S / 2, exchange_s=FORWARD_S / 4),
    SleepingCase("dualpipe-v", 2, 8, FORWARD_S / 2, exchange_s=FORWARD_S / 4, overlap_f_b=True),
]


@dataclass
class Config(ModelParallelConfig):
    """A pipeline config with a width."""

    hidden_size: int = WIDTH


class Part(nn.Module):
    """A chunk of the model that multiplies, or does nothing."""

    def __init__(self, config: Config, *, num_layers: int = 0) -> None:
        super().__init__()
        self.config = config
        self.scale = nn.Parameter(torch.ones(()))
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(num_layers)
        )
        self.input: Tensor | None = None

    def set_input_tensor(self, tensor: Tensor) -> None:
        """Set the previous stage's output as the input."""
        self.input = tensor

    def forward(self, x: Tensor) -> Tensor:
        """Run the chunk; x [s, b, h] is used on the first stage only."""
        x = x if self.input is None else self.input
        self.input = None
        if not self.layers:
            return x * self.scale
        for layer in self.layers:
            x = x + layer(x)
        return x


def run_step(
    chunks: list[Part],
    groups: ProcessGroupCollection,
    num_microbatches: int,
    sequence: int,
    recorder: PipelineRecorder | None = None,
) -> float:
    """Run one step and return its wall time on this rank."""
    x = torch.ones(sequence, 1, WIDTH)

    def forward_step(iterator: Any, model: Part) -> Any:
        return model(x), lambda output: (output.mean(), {})

    started = time.perf_counter()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=None,
        model=chunks,
        num_microbatches=num_microbatches,
        seq_length=sequence,
        micro_batch_size=1,
        pg_collection=groups,
        recorder=recorder,
    )
    return time.perf_counter() - started


def dispatch_table() -> None:
    """Print the executor's Python time per compute step."""
    num_microbatches, x = 256, torch.ones(1, 1, WIDTH)
    part, groups = Part(Config()), ProcessGroupCollection.single()

    def bare() -> float:
        started = time.process_time()
        for _ in range(num_microbatches):
            (part(x).mean() / num_microbatches).backward()
        return time.process_time() - started

    def executor() -> float:
        started = time.process_time()
        run_step([part], groups, num_microbatches, 1)
        return time.process_time() - started

    best_bare, best_executor = (min(f() for _ in range(5)) for f in (bare, executor))
    steps = 2 * num_microbatches
    print("dispatch (one process, one multiplication as a stage)")
    print(f"  bare loop   {best_bare / steps * 1e6:6.1f} us a step")
    print(f"  executor    {best_executor / steps * 1e6:6.1f} us a step")
    print(f"  difference  {(best_executor - best_bare) / steps * 1e6:6.1f} us a step\n")


def bubble_table(num_steps: int) -> None:
    """Print measured against simulated bubbles and steps."""
    print(f"bubble (4 processes, {FORWARD_S * 1e3:.0f} ms forward per rank, asleep)")
    print(f"{'':<42}{'bubble':^28}{'step, s':^28}")
    print(f"  {'schedule':<36}{'m':>4}" + 2 * f"{'simulated':>10}{'measured':>9}{'excess':>9}")
    for case in BUBBLE_CASES:
        simulated = case.simulated()
        measured = run_distributed(measure, case.num_ranks, case, num_steps, pp=case.num_ranks)[0]
        name = case.schedule if case.num_chunks == 1 else f"{case.schedule}, v={case.num_chunks}"
        name += ", exchange" * (case.exchange_s > 0) + ", in turns" * case.overlap_f_b
        row = f"  {name:<36}{case.num_microbatches:>4}"
        for planned, found in (
            (simulated.bubble, min(measured.bubbles)),
            (simulated.makespan, min(measured.makespans_s)),
        ):
            row += f"{planned:>10.4f}{found:>9.4f}{found / planned - 1:>+9.1%}"
        print(row, flush=True)


def message_table(groups: ProcessGroupCollection, num_steps: int, trace: Path | None) -> None:
    """Print the wall time of a pipeline of 2 against the same work without one."""
    rank = dist.get_rank()
    if rank == 0:
        print("\nmessages (2 processes, 8 micro batches of sequence 256, width 512)")
        print(f"  {'layout':<14}{'bubble':>9}{'wall / work':>13}")
    alone = ProcessGroupCollection.single()
    for num_chunks in (1, 2, 4):
        config = Config(pipeline_model_parallel_size=2)
        chunks = [Part(config, num_layers=LAYERS_PER_RANK // num_chunks) for _ in range(num_chunks)]
        work_chunks = [Part(Config(), num_layers=LAYERS_PER_RANK)]
        recorder, pipeline_s, work_s = PipelineRecorder(), [], []
        for _ in range(num_steps):
            dist.barrier()
            pipeline_s.append(run_step(chunks, groups, MICROBATCHES, SEQUENCE, recorder))
            dist.barrier()
            work_s.append(run_step(work_chunks, alone, MICROBATCHES, SEQUENCE))
        if trace is not None:
            measured = recorder.trace(groups.pp, f"measured: p=2, v={num_chunks}, m=8")
            if rank == 0:
                trace.write_text(measured.to_json())
        best = torch.tensor([min(pipeline_s), min(work_s)], dtype=torch.float64)
        dist.all_reduce(best, op=dist.ReduceOp.MAX)
        if rank == 0:
            bubble = 1 + 1 / (num_chunks * MICROBATCHES)
            ratio = float(best[0] / best[1])
            print(f"  {f'pp2, v={num_chunks}':<14}{bubble:>9.4f}{ratio:>13.3f}", flush=True)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    steps: int = 5
    """Number of steps per line; the quietest counts."""
    trace: Path | None = None
    """File for the trace of the last pipeline."""


def worker(rank: int, world_size: int, store: str, options: Flags) -> None:
    """Run one rank of the last table."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    groups = parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    message_table(groups, options.steps, options.trace)
    dist.destroy_process_group()


def main() -> None:
    """Print the tables."""
    options = read_command_line(Flags, description=__doc__)
    torch.set_num_threads(1)
    dispatch_table()
    bubble_table(options.steps)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (2, os.path.join(folder, "store"), options)
        mp.spawn(worker, arguments, nprocs=2)


if __name__ == "__main__":
    main()
