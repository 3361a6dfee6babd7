"""How much of a slow transfer is hidden when parameters are in host memory.

    python -m benchmarks.param_offload

One process trains the plain PyTorch GPT of `benchmarks.data_parallel` in fp32 with ZeRO-3 and its
shards in host memory (`param_cpu_offload`). On a CPU the host is the device, and the copies would
cost little, so each one also waits until it has taken as long as `--rate` bytes a second allow. The
computing thread notes how long it waits for a copy; the rest of the transfer is hidden:

    hidden = 1 - waited / (bytes / rate)

The table has the medians over steps, and the bytes that the host holds: parameters / ranks.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.data_parallel import CONFIG, Workload, backward, build_model, micro_batches
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.zero import shard_storage
from megatron.core.distributed.zero.stage3 import Zero3Buffer
from megatron.core.offload.device_copies import ThreadCopies
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line

WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Flags(Workload):
    """What the command line says."""

    vocabulary: int = 1024
    microbatches: int = 4
    rate: float = 1e9
    """Bytes a second of the slow copies."""
    rounds: int = 10
    """Steps."""


class Link(ThreadCopies):
    """Copies that take as long as a link would; notes what they carry, and who waits for them."""

    def __init__(self, rate: float) -> None:
        super().__init__(self._carry)
        self._rate = rate
        self.num_bytes, self.waited_s = 0, 0.0

    def _carry(self, target: Tensor, source: Tensor) -> None:
        started = time.perf_counter()
        target.copy_(source)
        self.num_bytes += source.nbytes
        time.sleep(max(0.0, source.nbytes / self._rate - (time.perf_counter() - started)))

    def start(self, source: Tensor) -> Callable[[], Tensor]:
        """See `ThreadCopies`."""
        wait = super().start(source)

        def timed() -> Tensor:
            started = time.perf_counter()
            target = wait()
            self.waited_s += time.perf_counter() - started
            return target

        return timed


def main() -> int:
    """Print the table."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    link, groups = Link(options.rate), ProcessGroupCollection.single()
    settings = DistributedDataParallelConfig(
        data_parallel_sharding_strategy="optim_grads_params", param_cpu_offload=True
    )
    with patch.object(shard_storage, "device_copies", lambda _: link):
        model = DistributedDataParallel(
            CONFIG, settings, build_model(options), pg_collection=groups
        )
    batches = micro_batches(0, options)

    def step() -> tuple[float, float]:
        link.num_bytes, link.waited_s = 0, 0.0
        started = time.perf_counter()
        model.zero_grad_buffer()
        with model.no_sync():
            for index in range(len(batches) - 1):
                backward(model, batches, index)
        backward(model, batches, -1)
        finalize_model_grads([model], pg_collection=groups)
        return time.perf_counter() - started, link.waited_s

    for _ in range(WARMUP_STEPS):
        step()
    step_s, waited_s = (
        statistics.median(figures)
        for figures in zip(*(step() for _ in range(options.rounds)), strict=True)
    )
    transfer_s = link.num_bytes / options.rate
    (buffer,) = model.gradient_buffers
    assert isinstance(buffer, Zero3Buffer)
    host = sum(shard.nbytes for shard in buffer.params.shards)
    parameters = sum(p.numel() for p in model.module.parameters()) * 4
    print(f"parameters {parameters / 2**20:.1f} MiB, on the host {host / 2**20:.1f} MiB")
    print(f"copied in a step {link.num_bytes / 2**20:.0f} MiB: {transfer_s:.2f} s at this rate")
    hidden = 1 - waited_s / transfer_s
    print(f"step {step_s:.2f} s, waited for copies {waited_s:.3f} s: {hidden:.0%} hidden")
    return 0


if __name__ == "__main__":
    sys.exit(main())
