"""Stage C: each kernel of the step alone, at the step's shapes, compared with other libraries.

    python -m benchmarks.gpu.kernels                 # every case, in order of importance
    python -m benchmarks.gpu.kernels --only softmax  # some of them
    python -m benchmarks.gpu.kernels --once          # three of our kernels, once: for ncu
    python -m benchmarks.gpu.kernels --rehearse      # tiny sizes on the CPU

A row has the milliseconds of the forward pass and of both passes. Memory-bound cases have GB/s of
the bytes that no implementation can avoid, and their share of the rate of a copy; other cases have
TFLOP/s. The candidates are the entries of our kernel tables, torch, torch.compile, Liger and
cut-cross-entropy. If a candidate fails, only its row is lost.

A call is captured in a graph, which is replayed between two events: so the time is the device's and
not the host's, which starts a small kernel more slowly than the device runs it. If the capture is
refused, calls are queued behind a pause of the device; the row has the way as `timed by`.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.gpu import workload
from benchmarks.gpu.workload import Row
from benchmarks.plain_gpt import Sizes, rotate_half
from megatron.core.distributed.parameter_shard import ShardSpan
from megatron.core.foundation import device
from megatron.core.foundation.device_graph import DeviceGraph, MemoryPool, warm_up
from megatron.core.foundation.optional_imports import require
from megatron.core.fusions.fused_bias_dropout import BIAS_DROPOUT_ADD
from megatron.core.kernels import triton_kernels
from megatron.core.kernels.attention import ATTENTION
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.gated_activation import GATED, Gate
from megatron.core.kernels.grouped_products import GROUPED_PRODUCTS
from megatron.core.kernels.norms import ADDED_NORM, RMS_NORM, torch_rms_norm
from megatron.core.kernels.permutation import PERMUTATION
from megatron.core.kernels.registry import KernelTable, Request
from megatron.core.kernels.rotary import ROTARY
from megatron.core.kernels.vocab_softmax import CROSS_ENTROPY, RowStatistics, Targets
from megatron.core.kernels.weight_gradient import WEIGHT_GRADIENT
from megatron.core.low_precision.scaling import SCALED_CAST
from megatron.core.optimizer.definitions.adam import update_fp32
from megatron.core.optimizer.gradient_norm import SPAN_SQUARES, Segments
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.vocab_embedding import ROW_SUMS

Call = Callable[[], object]
BF16 = torch.bfloat16
EPSILON = 1e-5
WIDE_EXPERTS = (128, 8, 2048, 768)
"""Experts, experts per token, hidden size and width of fine-grained experts (Qwen3-30B-A3B)."""
TINY_EXPERTS = (4, 2, 32, 16)
_WARM_UP = 3
_ROUNDS = 3
_ROUND_MS = 8.0
_PAUSE_CYCLES = 20_000_000
"""10 ms of an H100, in which the host queues calls."""
_CASE_S, _COMPILED_S = 3.0, 8.0
"""Seconds that the candidates of a case may take; torch.compile takes the rest."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Run tiny sizes on the CPU."""
    only: tuple[str, ...] = ()
    """Cases to run. Default: all."""
    once: bool = False
    """Run the softmax, RMSNorm and SwiGLU of Triton once, without a clock."""


@dataclass(frozen=True)
class Candidate:
    """One implementation of a case.

    Attributes:
        run: a function of the case's inputs, or the reason why there is none here.
        is_slow_to_compile: measure it after the fast candidates of all cases.
    """

    name: str
    run: Callable[..., object] | str
    is_slow_to_compile: bool = False


@dataclass(frozen=True)
class Case:
    """One operation.

    Attributes:
        inputs: arguments of each candidate; backward differentiates the inputs that require it.
        forward_bytes, backward_bytes: bytes that any implementation must read and write.
        forward_flops, backward_flops: FLOPs of products; 0 for memory-bound cases.
    """

    candidates: Sequence[Candidate]
    inputs: tuple[Any, ...]
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    forward_flops: float = 0.0
    backward_flops: float = 0.0


@dataclass(frozen=True)
class Bench:
    """Sizes, device and repetitions of all cases."""

    sizes: Sizes
    batch: int
    where: torch.device
    is_rehearsal: bool

    @property
    def tokens(self) -> int:
        """Tokens of a micro batch."""
        return self.batch * self.sizes.sequence

    def random(self, *shape: int, grad: bool = True, dtype: torch.dtype = BF16) -> Tensor:
        """Return a tensor of normal numbers."""
        x = torch.randn(shape, device=self.where, dtype=dtype)
        return x.requires_grad_(grad)

    def ids(self, below: int, count: int) -> Tensor:
        """Return random ids [count]."""
        return torch.randint(below, (count,), device=self.where)

    def table(
        self,
        table: KernelTable[Any],
        *,
        needs: Sequence[str] = (),
        call: Callable[..., Callable[..., object]] | None = None,
    ) -> list[Candidate]:
        """Return the entries of a kernel table for the device.

        Args:
            call: makes the function to run from an entry's function; None uses that function.
        """
        request = Request(self.where.type, "bfloat16", frozenset(needs))
        return [
            Candidate(
                entry.name, entry.refusal(request) or (call(entry.run) if call else entry.run)
            )
            for entry in table.of_device(self.where.type)
        ]

    def compiled(self, run: Callable[..., object]) -> Candidate:
        """Return a candidate that torch.compile makes of a plain formula."""
        backend = "aot_eager" if self.is_rehearsal else "inductor"
        return Candidate("compiled", torch.compile(run, backend=backend, dynamic=False), True)

    def library(
        self, name: str, module: str, make: Callable[[Any], Callable[..., object]]
    ) -> Candidate:
        """Return a function of a library, or the reason why it cannot be imported."""
        if self.is_rehearsal:
            return Candidate(name, "needs a GPU")
        try:
            return Candidate(name, make(require(module, purpose="a comparison")))
        except Exception as error:  # some libraries fail during import
            return Candidate(name, f"{type(error).__name__}: {str(error)[:80]}")

    def milliseconds(self, call: Call) -> tuple[float, str]:
        """Return the median time of a call on the device, and "graph" or "calls"."""
        if self.where.type == "cpu":
            begin_s = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin_s), "calls"
        warm_up(call, _WARM_UP)
        run, how = call, "graph"
        try:
            graph = DeviceGraph(MemoryPool())
            graph.capture(call)  # type: ignore[arg-type]
            run = graph.replay
        except Exception as error:  # torch raises exceptions of several types
            print(f"no graph: {type(error).__name__}: {str(error).splitlines()[:1]}"[:300])
            how = "calls"
        once_ms = self.elapsed_ms(run, 1)
        count = max(1, min(50, round(_ROUND_MS / max(once_ms, 1e-3))))
        return statistics.median(self.elapsed_ms(run, count) for _ in range(_ROUNDS)), how

    def elapsed_ms(self, run: Call, count: int) -> float:
        """Return the time of one of `count` calls between two events."""
        begin, end = (torch.Event(self.where, enable_timing=True) for _ in range(2))
        pause = getattr(torch.get_device_module(self.where.type), "_sleep", None)
        if pause is not None:
            pause(_PAUSE_CYCLES)
        begin.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count


def norm(bench: Bench) -> Case:
    """RMSNorm of the hidden states, and the gradients of both inputs."""
    z, n = bench.sizes, 2.0 * bench.tokens * bench.sizes.hidden_size
    x, weight = bench.random(bench.tokens, z.hidden_size), bench.random(z.hidden_size)
    candidates = [
        *bench.table(RMS_NORM, needs=("training",)),
        bench.compiled(torch_rms_norm),
        bench.library("liger", "liger_kernel.ops.rms_norm", lambda m: lambda x, w, eps: (
            m.LigerRMSNormFunction.apply(x, w, eps, 0.0, "llama", False))),
    ]  # fmt: skip
    return Case(candidates, (x, weight, EPSILON), 2 * n, 3 * n)


def added_norm(bench: Bench) -> Case:
    """The sum with the residual and its RMSNorm."""
    z, n = bench.sizes, 2.0 * bench.tokens * bench.sizes.hidden_size
    x, residual = (bench.random(bench.tokens, z.hidden_size) for _ in range(2))
    weight = bench.random(z.hidden_size)

    def call(run: Callable[..., Any]) -> Callable[..., object]:
        def added(x: Tensor, residual: Tensor, weight: Tensor) -> object:
            choice = RMS_NORM.choose(Request.of(x, ("training",))).kernel.run
            return run(lambda y: choice(y, weight, EPSILON), x, None, residual, (weight,), EPSILON)

        return added

    candidates = bench.table(ADDED_NORM, needs=("training",), call=call)
    return Case(candidates, (x, residual, weight), 4 * n, 4 * n)


def gated(bench: Bench) -> Case:
    """SwiGLU of the packed product."""
    z, n = bench.sizes, 2.0 * bench.tokens * bench.sizes.ffn_size
    packed = bench.random(bench.tokens, 2 * z.ffn_size)

    def plain(packed: Tensor) -> Tensor:
        gate, up = packed.chunk(2, -1)
        return F.silu(gate) * up

    def liger(module: Any) -> Callable[..., object]:
        return lambda packed: module.LigerSiLUMulFunction.apply(
            *(half.contiguous() for half in packed.chunk(2, -1))
        )

    candidates = [
        *bench.table(GATED, call=lambda run: lambda x: run(x, Gate(F.silu), None, None)),
        bench.compiled(plain),
        bench.library("liger, after a split", "liger_kernel.ops.swiglu", liger),
    ]
    return Case(candidates, (packed,), 3 * n, 5 * n)


def rotation(bench: Bench) -> Case:
    """Rotary embedding of the queries [s, b, n, d]."""
    z = bench.sizes
    d = z.hidden_size // z.num_heads
    query = bench.random(z.sequence, bench.batch, z.num_heads, d)
    angles = torch.rand(z.sequence, 1, 1, d // 2, device=bench.where).repeat(1, 1, 1, 2)
    cos, sin = angles.cos(), angles.sin()

    def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate_half(x, cos.to(x.dtype), sin.to(x.dtype))

    candidates = bench.table(ROTARY, call=lambda run: lambda x, cos, sin: run(x, cos, sin, False))
    n = 2.0 * query.numel()
    return Case([*candidates, bench.compiled(plain)], (query, cos, sin), 2 * n, 2 * n)


def loss_passes(bench: Bench) -> Case:
    """The two passes of the cross entropy: statistics of rows of logits, and the gradient."""
    rows, columns = bench.tokens, bench.sizes.vocab_size
    logits, out = bench.random(rows, columns, grad=False), bench.random(rows, columns, grad=False)
    labels = bench.ids(columns, rows).unsqueeze(1)
    targets = Targets(labels, torch.ones_like(labels, dtype=torch.bool), columns)
    scale, local = (torch.rand(shape, device=bench.where) for shape in (rows, (3, rows)))

    def call(make: Callable[..., Any]) -> Callable[..., object]:
        kernel = make()

        def both(logits: Tensor, out: Tensor) -> None:
            kernel.measure(logits, targets, local, in_place=False)
            found = RowStatistics(local[0], local[0], local[0], local[1], None)
            kernel.gradient(logits, out, found, targets, scale)

        return both

    return Case(bench.table(CROSS_ENTROPY, call=call), (logits, out), 2.0 * 3 * logits.numel())


def cross_entropy(bench: Bench) -> Case:
    """The loss of each token from bf16 logits, and the gradient, written over the logits."""
    logits = bench.random(bench.tokens, bench.sizes.vocab_size)
    labels = bench.ids(bench.sizes.vocab_size, bench.tokens)

    def ours(logits: Tensor, labels: Tensor, *, overwrites: bool = False) -> Tensor:
        tp = ProcessGroupCollection.single().tp
        if overwrites:  # a leaf must not be overwritten; this view costs nothing
            logits = logits.view_as(logits)
        return vocab_parallel_cross_entropy(
            logits, labels, tp_group=tp, overwrite_logits=overwrites
        ).mean()

    def plain(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.float(), labels)

    candidates = [
        Candidate("ours", ours),
        Candidate("ours, in place", functools.partial(ours, overwrites=True)),
        bench.compiled(plain),
        Candidate("torch", F.cross_entropy),
        bench.library("liger", "liger_kernel.transformers", lambda m: m.LigerCrossEntropyLoss()),
    ]
    return Case(candidates, (logits, labels), 2.0 * logits.numel(), 4.0 * logits.numel())


def head_and_loss(bench: Bench) -> Case:
    """The product with the head and the loss; some candidates keep no logits in memory."""
    z = bench.sizes
    hidden = bench.random(bench.tokens, z.hidden_size)
    weight = (bench.random(z.vocab_size, z.hidden_size, grad=False) * 0.02).requires_grad_()
    labels = bench.ids(z.vocab_size, bench.tokens)
    tp = ProcessGroupCollection.single().tp

    def ours(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(x, weight)
        return vocab_parallel_cross_entropy(
            logits, labels, tp_group=tp, overwrite_logits=True
        ).mean()

    def liger(module: Any) -> Callable[..., object]:
        loss = module.LigerFusedLinearCrossEntropyLoss()
        return lambda x, weight, labels: loss(weight, x, labels)

    candidates = [
        Candidate("ours", ours),
        Candidate("ours, fused", lambda x, w, labels: linear_cross_entropy(x, w, labels).mean()),
        bench.library("liger", "liger_kernel.transformers", liger),
        bench.library("cut-cross-entropy", "cut_cross_entropy", lambda m: m.linear_cross_entropy),
    ]
    flops = 2.0 * bench.tokens * z.hidden_size * z.vocab_size
    return Case(candidates, (hidden, weight, labels), forward_flops=flops, backward_flops=2 * flops)


def attention(bench: Bench) -> Case:
    """Causal attention with fewer key heads; only the needed half of the scores counts."""
    z = bench.sizes
    d = z.hidden_size // z.num_heads
    query = bench.random(z.sequence, bench.batch, z.num_heads, d)
    key, value = (bench.random(z.sequence, bench.batch, z.num_kv_heads, d) for _ in range(2))
    options = AttentionOptions(scale=d**-0.5, mask=MaskSpec((-1, 0)))
    candidates = [
        replace(each, is_slow_to_compile=each.name == "flex")
        for each in bench.table(ATTENTION, call=lambda run: lambda q, k, v: run(q, k, v, options))
        if each.name not in ("unfused", "blockwise")  # they take minutes, or store all scores
    ]
    flops = 2.0 * bench.batch * z.num_heads * z.sequence**2 * d
    return Case(candidates, (query, key, value), forward_flops=flops, backward_flops=2.5 * flops)


def dropped_residual(bench: Bench) -> Case:
    """residual + dropout(x), with dropout that is independent of the layout."""
    z = bench.sizes
    x, residual = (bench.random(z.sequence, bench.batch, z.hidden_size) for _ in range(2))
    n = 2.0 * x.numel()
    candidates = bench.table(
        BIAS_DROPOUT_ADD, call=lambda run: lambda x, residual: run(x, None, residual, 0.1)
    )
    return Case(candidates, (x, residual), 3 * n, 2 * n)


def weight_gradient(bench: Bench) -> Case:
    """The gradient of the first MLP weight, added to an fp32 main gradient."""
    z = bench.sizes
    x = bench.random(bench.tokens, z.hidden_size, grad=False)
    grad = bench.random(bench.tokens, 2 * z.ffn_size, grad=False)
    weight = nn.Parameter(bench.random(2 * z.ffn_size, z.hidden_size, grad=False))
    main = torch.zeros(weight.shape, device=bench.where)
    weight.main_grad, weight.main_grad_is_fresh = main, False  # type: ignore[attr-defined]
    candidates = [
        *bench.table(WEIGHT_GRADIENT, call=lambda run: lambda grad, x: run(weight, grad.t(), x)),
        Candidate("product in bf16 alone", lambda grad, x: grad.t() @ x),
    ]
    return Case(candidates, (grad, x), forward_flops=2.0 * bench.tokens * weight.numel())


def embedding_sums(bench: Bench) -> Case:
    """Gradients of tokens, added to the rows of the embedding's fp32 main gradient."""
    z = bench.sizes
    table = torch.zeros(z.vocab_size, z.hidden_size, device=bench.where)
    rows = bench.ids(z.vocab_size, bench.tokens)
    values = bench.random(bench.tokens, z.hidden_size, grad=False, dtype=torch.float32)
    return Case(bench.table(ROW_SUMS), (table, rows, values), 3 * 4.0 * values.numel())


def adam(bench: Bench) -> Case:
    """AdamW on 2^26 weights with fp32 moments and main weights: ours writes bf16 weights too."""
    count = 2**10 if bench.is_rehearsal else 2**26
    main = nn.Parameter(torch.zeros(count, device=bench.where))
    main.grad = torch.randn(count, device=bench.where)
    optimizer = torch.optim.AdamW([main], fused=True)
    weight = torch.zeros(count, device=bench.where, dtype=BF16)

    def torchs() -> None:
        optimizer.step()
        weight.copy_(main.detach())

    columns = [torch.zeros(count // 128, 512, dtype=torch.uint8, device=bench.where)
               for _ in range(3)]  # fmt: skip
    settings = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}
    update = triton_kernels.deferred("adam", "update_blocks")
    reason = triton_kernels.missing()
    stored = Candidate("triton, state as it is stored", reason or (lambda: update(
        main.grad, weight, tuple(columns), (0, 0, 0), 0, 1, 1.0, settings, True)))  # fmt: skip

    def formula(main: Tensor, grad: Tensor, m: Tensor, v: Tensor, weight: Tensor) -> None:
        m.mul_(0.9).add_(grad, alpha=0.1)
        v.mul_(0.999).addcmul_(grad, grad, value=0.001)
        main.mul_(1 - 1e-5).addcdiv_(m / (1 - 0.9), (v / (1 - 0.999)).sqrt() + 1e-8, value=-1e-3)
        weight.copy_(main)

    step, refused = (torch.full((), value, device=bench.where) for value in (1.0, 0.0))
    moments, group = [torch.zeros_like(main) for _ in range(2)], optimizer.param_groups[0]
    one_pass = Candidate("triton", reason or (lambda: update_fp32(
        main.grad, main, *moments, weight, step, (step, refused), group, True)))  # fmt: skip
    compiled = bench.compiled(formula)
    assert not isinstance(compiled.run, str)
    state = main.detach(), main.grad, *(torch.zeros_like(main.detach()) for _ in range(2)), weight
    candidates = [
        one_pass,
        stored,
        Candidate("torch, fused, and a copy", torchs),
        replace(compiled, run=functools.partial(compiled.run, *state)),
    ]
    return Case(candidates, (), 30.0 * count)


def squares(bench: Bench) -> Case:
    """The sum of squares of 2^28 elements of a gradient, read once."""
    flat = torch.randn(2**12 if bench.is_rehearsal else 2**28, device=bench.where)
    segments = Segments.of(ShardSpan(flat, [], [flat.numel() // 128]))
    return Case(bench.table(SPAN_SQUARES), (flat, segments, False), 4.0 * flat.numel())


def rounding(bench: Bench) -> Case:
    """Hidden states times one scale, rounded to E4M3: the output has one byte per element."""
    x = bench.random(bench.tokens, bench.sizes.hidden_size, grad=False)
    scale = torch.ones((), device=bench.where)
    candidates = bench.table(
        SCALED_CAST, call=lambda run: lambda x, scale: run(x, scale, torch.float8_e4m3fn)
    )
    torchs = Candidate("torch", lambda x, scale: (x * scale).to(torch.float8_e4m3fn))
    return Case([*candidates, torchs], (x, scale), 3.0 * x.numel())


def _of_experts(bench: Bench) -> tuple[int, int, int, int]:
    return TINY_EXPERTS if bench.is_rehearsal else WIDE_EXPERTS


def permutation(bench: Bench) -> Case:
    """Permute tokens into the order of their experts and back."""
    experts, top, hidden, _ = _of_experts(bench)
    token = torch.arange(bench.tokens, device=bench.where).repeat_interleave(top)
    expert = bench.ids(experts, len(token)).sort().values
    order = torch.randperm(len(token), device=bench.where)

    def call(make: Callable[..., Any]) -> Callable[..., object]:
        made = make(expert, token[order], bench.tokens)
        return lambda x: made.unpermute(made.permute(x))

    x = bench.random(bench.tokens, hidden)
    n = 2.0 * x.numel()
    return Case(bench.table(PERMUTATION, call=call), (x,), 2 * (1 + top) * n, 2 * (1 + top) * n)


def expert_products(bench: Bench) -> Case:
    """The first product of fine-grained experts."""
    experts, top, hidden, width = _of_experts(bench)
    rows = bench.tokens * top
    x = bench.random(rows, hidden, grad=False)
    matrices = list(bench.random(experts, hidden, 2 * width, grad=False).unbind())
    counts = [rows // experts] * experts
    candidates = bench.table(GROUPED_PRODUCTS, call=lambda run: lambda x: run(x, counts, matrices))
    if bench.where.type != "cpu":
        stacked = torch.stack(matrices)
        ends = torch.tensor(counts, device=bench.where).cumsum(0).int()
        candidates.append(
            Candidate("torch, of one tensor", lambda x: F.grouped_mm(x, stacked, offs=ends))
        )
    return Case(candidates, (x,), forward_flops=4.0 * rows * hidden * width)


CASES: dict[str, Callable[[Bench], Case]] = {
    "cross entropy": cross_entropy,
    "weight gradient": weight_gradient,
    "gated": gated,
    "RMSNorm": norm,
    "residual and RMSNorm": added_norm,
    "rotation": rotation,
    "Adam": adam,
    "gradient norm": squares,
    "passes of the cross entropy": loss_passes,
    "attention": attention,
    "expert products": expert_products,
    "permutation": permutation,
    "embedding sums": embedding_sums,
    "dropout and residual": dropped_residual,
    "rounding to E4M3": rounding,
    "head and loss": head_and_loss,
}
"""In order of importance: there may be no time for the last cases."""
COMPILED = ("cross entropy", "RMSNorm", "gated", "rotation", "Adam", "attention")
"""Cases with candidates that are slow to compile: after all other candidates, in this order."""


def both_passes(run: Callable[..., object], inputs: Sequence[Any]) -> Call:
    """Return a call that runs the forward and the backward pass."""
    wanted = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
    made = run(*inputs)
    given = [torch.ones_like(x) for x in (made if isinstance(made, tuple) else (made,))]

    def call() -> None:
        found = run(*inputs)
        torch.autograd.grad(found if isinstance(found, tuple) else (found,), wanted, given)

    return call


def measure(bench: Bench, name: str, case: Case, copy_rate: float, *, slow: bool) -> Iterator[Row]:
    """Yield a row for each candidate; `slow` selects slow or fast compilation.

    Args:
        copy_rate: bytes per second that a copy reads and writes.
    """
    for each in case.candidates:
        if each.is_slow_to_compile != slow:
            continue
        row: Row = {"kernel": name, "by": each.name}
        if isinstance(each.run, str):
            yield row | {"not run": each.run}
            continue
        try:
            run = each.run
            forward, row["timed by"] = bench.milliseconds(lambda run=run: run(*case.inputs))
            row |= rates(row, "", forward, case.forward_bytes, case.forward_flops, copy_rate)
            if any(isinstance(x, Tensor) and x.requires_grad for x in case.inputs):
                both, way = bench.milliseconds(both_passes(run, case.inputs))
                if way != row["timed by"]:
                    row["both passes, timed by"] = way
                moved = case.forward_bytes + case.backward_bytes
                flops = case.forward_flops + case.backward_flops
                row |= rates(row, "both passes, ", both, moved, flops, copy_rate)
            yield row
        except Exception as error:  # one candidate failed: measure the others
            yield row | {"error": f"{type(error).__name__}: {str(error).splitlines()[:1]}"[:200]}


def rates(row: Row, what: str, ms: float, moved: float, flops: float, copy_rate: float) -> Row:
    """Return the cells of one measured time."""
    found: Row = {f"{what}ms": round(ms, 4)}
    if moved:
        found[f"{what}GB/s"] = round(1e-6 * moved / ms)
        found[f"{what}% of a copy"] = round(1e5 * moved / ms / copy_rate, 1)
    if flops:
        found[f"{what}TFLOP/s"] = round(1e-9 * flops / ms, 1)
    return found


def rate_of_a_copy(bench: Bench) -> float:
    """Return the bytes per second that a copy within the device reads and writes."""
    source = torch.zeros(2**12 if bench.is_rehearsal else 2**28, device=bench.where)
    target = torch.empty_like(source)
    return 2e3 * 4 * source.numel() / bench.milliseconds(lambda: target.copy_(source))[0]


def once(bench: Bench) -> None:
    """Run three of our kernels, for a profiler that repeats each of them."""
    for make in (loss_passes, norm, gated):
        case = make(bench)
        run = next((c.run for c in case.candidates if c.name == "triton"), "no entry")
        if isinstance(run, str):
            workload.print_row({"kernel": make.__name__, "not run": run})
        elif case.backward_bytes:
            both_passes(run, case.inputs)()
        else:
            run(*case.inputs)
    device.synchronize()


def main() -> None:
    """Measure the cases one after the other."""
    prog = "python -m benchmarks.gpu.kernels"
    options = read_command_line(Flags, prog=prog, description=__doc__)
    where = workload.choose_device(options.rehearse)
    work = workload.workload(options.rehearse)
    bench = Bench(work.sizes, work.micro_batch, where, options.rehearse)
    if options.once:
        once(bench)
        return
    copy_rate = rate_of_a_copy(bench)
    workload.print_row({"kernel": "copy", "GB/s": round(1e-9 * copy_rate)})
    names = options.only or tuple(CASES)
    turns = [(name, False) for name in names]
    turns += [(name, True) for name in COMPILED if name in names]
    for name, slow in turns:
        if workload.seconds_left() < (_COMPILED_S if slow else _CASE_S):
            workload.print_row({"kernel": name, "compiled": slow, "not run": "no time was left"})
            continue
        try:
            for row in measure(bench, name, CASES[name](bench), copy_rate, slow=slow):
                workload.print_row(row)
        except Exception as error:  # one case failed
            text = f"{type(error).__name__}: {error}"[:200]
            workload.print_row({"kernel": name, "error": text})
        if where.type != "cpu":
            torch.get_device_module(where.type).empty_cache()


if __name__ == "__main__":
    main()
