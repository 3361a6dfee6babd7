"""Count what each stage sends and holds: `python -m tests.distributed.optimizer.state_bytes`.

A step of AdamW on a stack of equal linear layers, fp32 and bf16, on 1, 2 and 4 gloo ranks. Bytes
held for good (weights, gradients, main weights, moments; each storage once) and bytes sent in a
step are compared with the formulas; the command trains 100 million parameters and exits with
status 1 if any number is more than 2 % off.
"""

import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.settings.command_line import NoFlags, read_command_line
from tests.distributed.distributed.replicas import wrap
from tests.harness.distributed import run_distributed

TOLERANCE = 0.02
"""Padding of slots and shards to 128 elements."""


class Wide(nn.Module):
    """Linear layers without anything between."""

    def __init__(self, width, num_layers, dtype):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=dtype) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def expected_bytes(stage, dtype, num_ranks, num_layers):
    """Return bytes per parameter (sent in a step, held for good)."""
    n, rest = num_ranks, (num_ranks - 1) / num_ranks
    weight = torch.finfo(dtype).bits // 8
    gradient, optimizer = 4, 8 + (4 if weight == 2 else 0)
    held = sum(
        part / (n if stage >= first else 1)
        for part, first in ((weight, 3), (gradient, 2), (optimizer, 1))
    )
    # Stage 3 gathers every layer twice but the last one, which backward needs first.
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 - 1 / num_layers}[stage]
    reductions = 2 if stage == 0 else 1
    return (gradient * reductions + weight * gathers) * rest, held


def one_step(groups, dtype, stage, width=1024, num_layers=4, bucket_size=800_000):
    """Train one step and return (parameters, bytes sent by this rank, bytes of state it holds).

    Two replicas at stage 0 use gloo's own all-reduce, whose messages cannot be counted: -1.
    """
    ddp = wrap(
        groups,
        model=Wide(width, num_layers, dtype),
        grad_reduce_in_fp32=True,
        bucket_size=bucket_size,
        data_parallel_sharding_strategy=SHARDING_STRATEGIES[stage],
    )
    config = OptimizerConfig(
        lr=1e-2, bf16=dtype == torch.bfloat16, use_distributed_optimizer=stage > 0
    )
    optimizer = get_megatron_optimizer(config, [ddp], pg_collection=groups)
    sent, send = [0], dist.isend

    def counted(tensor, *arguments):
        sent[0] += tensor.numel() * tensor.element_size()
        return send(tensor, *arguments)

    dist.isend = counted
    try:
        ddp.zero_grad_buffer()
        ddp(torch.ones(3, width, dtype=dtype)).float().sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        ddp.finish_param_sync()
    finally:
        dist.isend = send
    held = [p.data for p in ddp.module.parameters()]
    held += [shard for shards in ddp.sharded_values().values() for shard in shards]
    held += [owned for buffer in ddp.gradient_buffers for owned in buffer.owned_gradients()]
    held += [getattr(buffer, "gradients", held[0]) for buffer in ddp.gradient_buffers]
    held += [main for item in optimizer.shards for main in [item.main_param.data]]
    held += [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    is_counted = sent[0] > 0 or not (stage == 0 and ddp.mesh().size == 2)
    num_parameters = sum(p.numel() for p in ddp.module.parameters())
    return num_parameters, sent[0] if is_counted else -1, sum(storages.values())


def differences(measured, expected) -> Iterator[str]:
    """Yield what is further off than the tolerance."""
    num_parameters, *counts = measured
    for what, count, per_parameter in zip(("sent", "held"), counts, expected, strict=True):
        wanted = per_parameter * num_parameters
        if count >= 0 and abs(count - wanted) > TOLERANCE * wanted:
            yield f"{what}: {count} bytes, expected {wanted:.0f}"


def main() -> int:
    """Print the table."""
    read_command_line(NoFlags, description=__doc__)
    num_layers, failures = 24, []
    print(
        f"{'ranks':>5} {'stage':>5} {'dtype':<9}{'sent/param':>11}{'theory':>8}{'held/param':>12}"
        f"{'theory':>8}{'held MiB':>10}"
    )
    for num_ranks in (1, 2, 4):
        for stage in range(4):
            for dtype in (torch.float32, torch.bfloat16):
                settings = dict(width=2048, num_layers=num_layers, bucket_size=None)
                per_rank = run_distributed(
                    one_step, num_ranks, dtype, stage, kwargs=settings, timeout_s=300.0
                )
                expected = expected_bytes(stage, dtype, num_ranks, num_layers)
                count, sent, held = max(per_rank, key=lambda found: found[2])
                shown = f"{sent / count:.3f}" if sent >= 0 else "-"
                name = str(dtype).removeprefix("torch.")
                print(
                    f"{num_ranks:>5} {stage:>5} {name:<9}{shown:>11}{expected[0]:>8.3f}"
                    f"{held / count:>12.3f}{expected[1]:>8.3f}{held / 2**20:>10.0f}",
                    flush=True,
                )
                for found in per_rank:
                    failures += differences(found, expected)
    print("\n".join(failures) or "all within 2 %")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
