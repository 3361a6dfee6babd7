"""Cost of the tensor-parallel layers and fused functions, against plain torch.

    python -m benchmarks.tensor_parallel             # one process, processor time
    python -m benchmarks.tensor_parallel --gloo      # collectives of two processes, wall time

Each function alternates with its plain counterpart in one run on one thread; figures are medians.
Shapes: 1,024 tokens, width 512, MLP 2,048 (gated: 1,408), vocabulary 32,000.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.initialization import init_method_normal
from megatron.core.settings.command_line import read_command_line
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.transport import collectives

TOKENS, WIDTH, FFN, GATED, VOCABULARY = 1024, 512, 2048, 1408, 32000
Call = Callable[[], object]


def take_turns(calls: dict[str, Call], rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Return the median seconds of each call; the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            begin = clock()
            call()
            seconds[name].append(clock() - begin)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}


def backward_of(function: Callable[..., Tensor], *leaves: Tensor) -> Call:
    """Return forward and backward of function(*leaves), gradients starting at None."""
    upstream: list[Tensor] = []

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        out = function(*leaves)
        if not upstream:
            upstream.append(torch.ones_like(out))
        out.backward(upstream[0])

    return call


def leaf(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape) * scale).to(dtype).requires_grad_()


def with_main_grad(layer: nn.Module, x: Tensor, *, is_fresh: bool) -> Call:
    """Return forward and backward of a layer whose gradients are written into fp32 buffers."""
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)

    def call() -> None:
        x.grad = None
        for parameter in layer.parameters():
            parameter.main_grad_is_fresh = is_fresh
        layer(x)[0].sum().backward()

    return call


def plain_linear(weight: Tensor, bias: Tensor, x: Tensor, *, is_fresh: bool) -> Call:
    """Return forward and backward of torch's linear with ordinary gradients."""

    def call() -> None:
        x.grad = None
        if is_fresh:
            weight.grad = bias.grad = None
        F.linear(x, weight, bias).sum().backward()

    return call


def linear_cases(dtype: torch.dtype) -> dict[str, dict[str, Call]]:
    config = ModelParallelConfig(params_dtype=dtype)
    cases: dict[str, dict[str, Call]] = {}
    x = leaf(TOKENS, 1, WIDTH, dtype=dtype)
    for is_fresh, when in ((True, "first micro batch"), (False, "later micro batch")):
        layers = [
            ColumnParallelLinear(WIDTH, FFN, config=config, init_method=init_method_normal(0.02))
            for _ in range(3)
        ]
        weight, bias = layers[0].weight, layers[0].bias
        assert weight is not None and bias is not None
        cases[f"linear, {when}"] = {
            "plain": plain_linear(weight, bias, x, is_fresh=is_fresh),
            "main gradient": with_main_grad(layers[1], x, is_fresh=is_fresh),
        }
    return cases


def head_case(dtype: torch.dtype) -> dict[str, Call]:
    hidden = leaf(TOKENS, 1, WIDTH, dtype=dtype)
    weight = leaf(VOCABULARY, WIDTH, dtype=dtype, scale=0.05)
    labels = torch.randint(0, VOCABULARY, (TOKENS, 1))

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w).view(-1, VOCABULARY), labels.view(-1))

    def separate(x: Tensor, w: Tensor, overwrite: bool = False) -> Tensor:
        logits = F.linear(x, w)
        return vocab_parallel_cross_entropy(logits, labels, overwrite_logits=overwrite).mean()

    return {
        "plain": backward_of(plain, hidden, weight),
        "ours": backward_of(separate, hidden, weight),
        "logits given away": backward_of(lambda x, w: separate(x, w, True), hidden, weight),
        "fused head": backward_of(
            lambda x, w: linear_cross_entropy(x, w, labels).mean(), hidden, weight
        ),
        "matrix products alone": backward_of(F.linear, hidden, weight),
    }


def embedding_case(dtype: torch.dtype) -> dict[str, Call]:
    config = ModelParallelConfig(params_dtype=dtype)
    table = VocabParallelEmbedding(
        VOCABULARY, WIDTH, config=config, init_method=init_method_normal(0.02)
    )
    weight, ids = leaf(VOCABULARY, WIDTH, dtype=dtype), torch.randint(0, VOCABULARY, (1, TOKENS))
    table.weight.main_grad = torch.zeros(table.weight.shape)
    table.weight.main_grad_is_fresh = False  # a tied head has written the gradient before
    return {
        "plain": backward_of(lambda w: F.embedding(ids, w), weight),
        "main gradient": backward_of(lambda w: table(ids), table.weight),
    }


def elementwise_cases(dtype: torch.dtype) -> dict[str, dict[str, Call]]:
    packed = leaf(TOKENS, 1, 2 * GATED, dtype=dtype)
    gate, up = leaf(TOKENS, 1, GATED, dtype=dtype), leaf(TOKENS, 1, GATED, dtype=dtype)
    x, residual = leaf(TOKENS, 1, WIDTH, dtype=dtype), leaf(TOKENS, 1, WIDTH, dtype=dtype)
    bias = leaf(WIDTH, dtype=dtype)
    fused = get_bias_dropout_add(True, True)

    def split(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return {
        "SwiGLU": {
            "plain": backward_of(lambda g, u: F.silu(g) * u, gate, up),
            "plain, packed": backward_of(split, packed),
            "ours, packed": backward_of(swiglu, packed),
        },
        "bias + residual": {
            "plain": backward_of(lambda x, b, r: r + (x + b), x, bias, residual),
            "ours": backward_of(lambda x, b, r: fused((x, b), r, 0.0), x, bias, residual),
        },
    }


def report(dtype: torch.dtype, rounds: int) -> None:
    """Print one line per variant: milliseconds, and the ratio to plain torch."""
    cases = {
        "head and loss": head_case(dtype),
        **linear_cases(dtype),
        "embedding": embedding_case(dtype),
        **elementwise_cases(dtype),
    }
    print(f"\n{str(dtype).removeprefix('torch.')}: forward + backward, processor time, one thread")
    for case, calls in cases.items():
        seconds = take_turns(calls, rounds, time.process_time)
        for name, value in seconds.items():
            ratio = value / seconds["plain"]
            print(f"  {case:28s} {name:24s} {value * 1e3:9.2f} ms  {ratio:5.2f}")


def time_collectives(rank: int, rendezvous: str, rounds: int) -> None:
    """Time the exchanges of two tensor-parallel ranks per layer: [256, 1, 512] in fp32."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    group = dist.new_group([0, 1])
    x, half = torch.randn(256, 1, WIDTH), torch.randn(128, 1, WIDTH)
    row = torch.randn(1, 3, 256)
    calls: dict[str, Call] = {
        "all-reduce 512 KiB": lambda: collectives.all_reduce(x, group),
        "torch's all-reduce": lambda: dist.all_reduce(x, group=group),
        "reduce-scatter 512 KiB": lambda: collectives.reduce_scatter(x, group),
        "all-gather to 512 KiB": lambda: collectives.all_gather(half, group),
        "loss statistics 3 KiB": lambda: collectives.all_gather(row, group),
        "barrier": lambda: dist.barrier(group=group),
    }
    wall = take_turns(calls, rounds, time.perf_counter)
    cpu = take_turns(calls, rounds, time.process_time)
    if rank == 0:
        print("\ngloo, two processes: wall and processor time of one call")
        for name in calls:
            print(f"  {name:28s} {wall[name] * 1e6:8.0f} us {cpu[name] * 1e6:8.0f} us")
    dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rounds: int = 9
    gloo: bool = False
    """Time collectives instead."""


def main() -> None:
    """Parse the command line and print the tables."""
    options = read_command_line(Flags, description=__doc__)
    torch.set_num_threads(1)
    if options.gloo:
        with tempfile.TemporaryDirectory() as directory:
            rendezvous = f"file://{os.path.join(directory, 'rendezvous')}"
            mp.spawn(time_collectives, args=(rendezvous, 20 * options.rounds), nprocs=2)
        return
    for dtype in (torch.float32, torch.bfloat16):
        report(dtype, options.rounds)


if __name__ == "__main__":
    main()
