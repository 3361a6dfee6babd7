"""Cost of each place and precision of optimizer state: `python -m benchmarks.optimizer_state`.

One process, one thread, weights of `--millions` million elements. Each variant updates them a few
times in a separate process. The table shows the median time of an update over the time with fp32
state in memory, measured in turns; the bytes of state in memory; and the growth of the peak
resident memory since before the optimizer was built. About 40 seconds.
"""

from __future__ import annotations

import importlib
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from tests.harness.machine import memory_bytes

MIB = 2**20
COMPACT = {"use_precision_aware_optimizer": True}
WAYS: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("fp32 model, fp32 state", torch.float32, {}),
    (
        "  bf16 moments",
        torch.float32,
        COMPACT | {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    ),
    ("  in host memory", torch.float32, {"optimizer_cpu_offload": True}),
    ("  in a file", torch.float32, {"optimizer_offload_path": ""}),
    ("bf16 model, fp32 state", torch.bfloat16, {}),
    ("  main weights as remainders", torch.bfloat16, COMPACT),
    (
        "  fp8 and fp16 moments",
        torch.bfloat16,
        COMPACT | {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.float16},
    ),
    ("  in a file", torch.bfloat16, {"optimizer_offload_path": ""}),
]


def measure(
    connection: Any, dtype: torch.dtype, settings: dict[str, Any], num_weights: int, directory: str
) -> None:
    """Build an optimizer; for each message of the connection, update once and send the time."""
    torch.set_num_threads(1)
    if "optimizer_offload_path" in settings:
        settings = settings | {"optimizer_offload_path": directory}
    groups = ProcessGroupCollection.single()
    layer = nn.Linear(4096, num_weights // 4096, bias=False).to(dtype)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    ddp = DistributedDataParallel(SimpleNamespace(), ddp_config, layer, pg_collection=groups)
    (buffer,) = ddp.gradient_buffers
    buffer.owned_gradients()[0].normal_()
    importlib.import_module("torch._dynamo")  # torch's own optimizers load it in their first step
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak memory
    before = memory_bytes("VmRSS")
    config = OptimizerConfig(lr=1e-4, bf16=dtype == torch.bfloat16, **settings)
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
    optimizer.step()
    connection.send(memory_bytes("VmHWM") - before)
    while connection.recv():
        began = time.perf_counter()
        optimizer.step()
        connection.send(time.perf_counter() - began)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    millions: int = 16
    rounds: int = 5
    directory: str = tempfile.gettempdir()
    """Directory of the file of state."""


def main() -> None:
    """Print the table."""
    options = read_command_line(Flags, description=__doc__)
    context = multiprocessing.get_context("spawn")
    num_weights = options.millions * 1_000_000 // 4096 * 4096
    memory: list[int] = []
    times: list[list[float]] = [[] for _ in WAYS]
    pipes: list[Any] = []
    processes: list[Any] = []
    for _, dtype, settings in WAYS:
        ours, theirs = context.Pipe()
        process = context.Process(
            target=measure, args=(theirs, dtype, settings, num_weights, options.directory)
        )
        process.start()
        memory.append(ours.recv())
        pipes.append(ours)
        processes.append(process)
    for _ in range(options.rounds):
        for pipe, found in zip(pipes, times, strict=True):
            pipe.send(True)
            found.append(pipe.recv())
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    plain = statistics.median(times[0])
    print(f"{num_weights:,} weights; median of {options.rounds} updates")
    print(f"{'':<30}{'s / update':>11}{'of the first':>14}{'peak MiB':>10}{'bytes / weight':>16}")
    for (name, _, _), held, found in zip(WAYS, memory, times, strict=True):
        median = statistics.median(found)
        print(
            f"{name:<30}{median:>11.4f}{median / plain:>14.2f}{held / MIB:>10.0f}"
            f"{held / num_weights:>16.2f}"
        )


if __name__ == "__main__":
    main()
