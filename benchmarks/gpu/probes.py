"""Stage A: small experiments that need a GPU, each with its own rows.

    python -m benchmarks.gpu.probes                      # all but `machine`
    python -m benchmarks.gpu.probes --names sdpa adam    # some
    python -m benchmarks.gpu.probes --rehearse           # tiny, on the CPU: figures are meaningless

Each probe runs in its own process, because an error of the device makes a process unusable. A probe
that fails has a row with its error, and the others run. Shapes are the shapes of one layer of Llama
3 8B with 8,192 tokens. TFLOP/s count the products that the formula needs: half of the scores in
causal attention, and 3.5 forward passes for both passes.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.forks import Case, Outcome, Run, first_errors, run_cases
from benchmarks.gpu.small_models import choose_cpu
from megatron.core.foundation import device
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

Row = dict[str, object]
_IMPORTS_S = time.process_time()
"""Seconds of processor time of the interpreter and the imports."""
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
_TOKENS = 8192
_TIMED, _WARM_UP = 7, 2
_PER_CALL_S = 0.4
"""Maximum seconds that the calls of one timing take."""
_LIMIT_S, _WHOLE_S = 15, 45


@dataclass(frozen=True)
class Bench:
    """Device of the probes, and the divisor of their sizes on it."""

    device: torch.device
    scale: int

    def tensor(self, *sizes: int, dtype: torch.dtype = BF16) -> Tensor:
        """Return a tensor of normal numbers."""
        return torch.randn(sizes, device=self.device, dtype=torch.float32).to(dtype)

    def ms(self, call: Callable[[], object]) -> float:
        """Return the median milliseconds of a call, by the device's own clock if it has one."""
        begin = time.perf_counter()
        for _ in range(_WARM_UP):
            call()
        device.synchronize()
        once_s = (time.perf_counter() - begin) / _WARM_UP
        repeats = max(3, min(_TIMED, int(_PER_CALL_S / max(once_s, 1e-6))))
        if self.device.type == "cpu":
            begin = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - begin)
        events = [[torch.Event(self.device, enable_timing=True) for _ in range(2)]
                  for _ in range(repeats)]  # fmt: skip
        for first, last in events:
            first.record()
            call()
            last.record()
        device.synchronize()
        return statistics.median(first.elapsed_time(last) for first, last in events)

    def kernels(self, call: Callable[[], object]) -> list[str]:
        """Return the names of the kernels that a call starts; on the CPU, of its operations."""
        on_cpu = self.device.type == "cpu"
        wanted = ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA
        where = DeviceType.CPU if on_cpu else DeviceType.CUDA  # host calls are events too
        call()
        with profile(activities=[wanted]) as trace:
            call()
            device.synchronize()
        events = [event for event in trace.events() or [] if event.device_type == where]
        return sorted({str(event.name)[:70] for event in events})[:4]


def machine(bench: Bench) -> Iterator[Row]:
    """Versions, memory, and the time of imports and of name resolution."""
    begin = time.perf_counter()
    socket.getfqdn()
    row: Row = {"getfqdn s": time.perf_counter() - begin, "imports, CPU s": _IMPORTS_S}
    row |= {"device": device.device_name(), "torch": torch.__version__,
            "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version(),
            "NCCL": device.nccl_version(), "torch has accelerator.Graph":
            hasattr(torch.accelerator, "Graph")}  # fmt: skip
    begin = time.perf_counter()
    torch.ones(1, device=bench.device).item()
    row["first tensor s"] = time.perf_counter() - begin
    if bench.device.type != "cpu":
        module = torch.get_device_module(bench.device.type)
        free, total = module.mem_get_info()
        row |= {"free GiB": round(free / 2**30, 1), "GiB": round(total / 2**30, 1),
                "number": torch.accelerator.device_count(),
                "capability": list(module.get_device_capability())}  # fmt: skip
    yield row


def ceilings(bench: Bench) -> Iterator[Row]:
    """Highest rates of products and copies on this machine."""
    for size, dtype in ((8192, BF16), (8192, torch.float16), (4096, BF16), (4096, torch.float32)):
        n = size // bench.scale
        a, b = bench.tensor(n, n, dtype=dtype), bench.tensor(n, n, dtype=dtype)
        yield {"product": n, "dtype": str(dtype)[6:], "TFLOP/s": 2e-9 * n**3 / bench.ms(
            lambda a=a, b=b: a @ b)}  # fmt: skip
    here = torch.empty(2**30 // bench.scale**2, device=bench.device)
    there = torch.empty_like(here)
    yield {"copy": "in the device", "TB/s": 2e-9 * here.nbytes / bench.ms(
        lambda: there.copy_(here))}  # fmt: skip
    small = here[: 2**26 // bench.scale**2]
    pinned = torch.empty(small.shape, pin_memory=bench.device.type != "cpu")
    for name, to, source in (("to host", pinned, small), ("to device", small, pinned)):
        yield {"copy": name, "GB/s": 1e-6 * small.nbytes / bench.ms(
            lambda to=to, source=source: to.copy_(source, non_blocking=True))}  # fmt: skip


def linears(bench: Bench) -> Iterator[Row]:
    """The fifteen products of a layer and the head, TFLOP/s."""
    shapes = {"qkv": (6144, 4096), "projection": (4096, 4096), "fc1": (28672, 4096),
              "fc2": (4096, 14336), "head": (128256, 4096)}  # fmt: skip
    tokens = _TOKENS // bench.scale
    for name, (out, into) in shapes.items():
        o, i = out // bench.scale, into // bench.scale
        x, w, g = bench.tensor(tokens, i), bench.tensor(o, i), bench.tensor(tokens, o)
        calls: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=x, w=w: F.linear(x, w),
            "input gradient": lambda g=g, w=w: g @ w,
            "weight gradient": lambda g=g, x=x: g.t() @ x,
            "weight gradient, other order": lambda g=g, x=x: (x.t() @ g).t(),
        }
        flops = 2e-9 * tokens * o * i
        yield {"linear": name} | {key: flops / bench.ms(call) for key, call in calls.items()}


def weight_gradient(bench: Bench) -> Iterator[Row]:
    """A weight gradient that is added to fp32: in two calls, or in one addmm into fp32."""
    tokens, o, i = (size // bench.scale for size in (_TOKENS, 28672, 4096))
    g, x = bench.tensor(tokens, o), bench.tensor(tokens, i)
    main = torch.zeros(o, i, device=bench.device)
    exact = g.float().t() @ x.float()
    flops = 2e-9 * tokens * o * i
    ms = bench.ms(lambda: main.add_(g.t() @ x))
    main.zero_().add_(g.t() @ x)
    off = float((main - exact).norm() / exact.norm())
    yield {"into fp32": "product, then add_", "ms": ms, "TFLOP/s": flops / ms, "error": off}
    for beta in (0, 1):

        def add(beta: int = beta) -> Tensor:
            return torch.ops.aten.addmm.dtype_out(
                main, g.t(), x, torch.float32, beta=beta, out=main
            )

        main.zero_()
        row: Row = {"into fp32": "addmm.dtype_out", "beta": beta}
        place = main.data_ptr()
        try:
            add()
        except NotImplementedError as error:  # torch has no such kernel for the CPU
            yield row | refusal(error)
            continue
        off = float((main - exact).norm() / exact.norm())
        ms = bench.ms(add)
        yield row | {"ms": ms, "TFLOP/s": flops / ms, "error": off,
                     "in place": place == main.data_ptr(),
                     "kernels": bench.kernels(add)}  # fmt: skip


def refusal(error: Exception) -> Row:
    """Return the cell for an operation that torch refuses."""
    return {"refused": str(error).splitlines()[0][:120]}


def sdpa(bench: Bench) -> Iterator[Row]:
    """Causal attention with fewer key heads: the kernel that torch chooses, and each by name."""
    names = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    backends = (None, *(getattr(SDPBackend, name) for name in names))
    for positions, batch, width in ((4096, 2, 128), (8192, 1, 128), (4096, 2, 64), (4096, 1, 256)):
        s, heads, key_heads = positions // bench.scale, 32, 8
        q, k, v = (bench.tensor(s, batch, n, width).requires_grad_()
                   for n in (heads, key_heads, key_heads))  # fmt: skip
        weights = bench.tensor(batch, heads, s, width)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            views = (x.permute(1, 2, 0, 3) for x in (q, k, v))
            return F.scaled_dot_product_attention(*views, is_causal=True, enable_gqa=True)

        def both(inputs: tuple[Tensor, ...] = (q, k, v), weights: Tensor = weights) -> object:
            return torch.autograd.grad(forward(*inputs), inputs, weights)

        flops = 2e-9 * batch * heads * s * s * width
        for backend in backends:
            row: Row = {"sdpa": "chosen" if backend is None else backend.name, "s": s, "d": width}
            try:
                with sdpa_kernel(backend) if backend is not None else torch.enable_grad():
                    row |= {"forward": flops / bench.ms(forward),
                            "both": 3.5 * flops / bench.ms(both)}  # fmt: skip
                    if backend is None:
                        row["kernels"] = bench.kernels(both)
            except RuntimeError as error:
                row |= refusal(error)
            yield row


def low_precision(bench: Bench) -> Iterator[Row]:
    """8-bit products, with one scale per tensor and one scale per row."""
    m, n, k = (size // bench.scale for size in (_TOKENS, 28672, 4096))
    a, b = bench.tensor(m, k, dtype=FP8), bench.tensor(n, k, dtype=FP8)
    ones = {name: [torch.ones(shape, device=bench.device) for shape in shapes]
            for name, shapes in (("tensor", ((), ())), ("row", ((m, 1), (1, n))))}  # fmt: skip
    for name, (left, right) in ones.items():
        for fast in (False, True):

            def product(left: Tensor = left, right: Tensor = right, fast: bool = fast) -> Tensor:
                return torch._scaled_mm(a, b.t(), scale_a=left, scale_b=right, out_dtype=BF16,
                                        use_fast_accum=fast)  # fmt: skip

            row: Row = {"_scaled_mm": f"a scale for a {name}", "fast accumulation": fast}
            try:
                row["TFLOP/s"] = 2e-9 * m * n * k / bench.ms(product)
            except RuntimeError as error:
                row |= refusal(error)
            yield row
    x = bench.tensor(m, k)
    yield {"cast to e4m3": m * k, "TB/s": 3e-9 * m * k / bench.ms(lambda: x.to(FP8))}


def grouped(bench: Bench) -> Iterator[Row]:
    """Products of eight experts at once: weights as one tensor, and stacked before the product."""
    experts = 8
    tokens, h, f = (size // bench.scale for size in (2 * _TOKENS, 4096, 14336))
    x, weights = bench.tensor(tokens, h), bench.tensor(experts, f, h)
    ends = torch.arange(1, experts + 1, device=bench.device, dtype=torch.int32) * (
        tokens // experts
    )
    apart = [weights[e].clone() for e in range(experts)]
    flops = 2e-9 * tokens * h * f
    yield {"grouped_mm": "weights are one tensor", "TFLOP/s": flops / bench.ms(
        lambda: F.grouped_mm(x, weights.transpose(1, 2), offs=ends))}  # fmt: skip
    yield {"grouped_mm": "after torch.stack", "TFLOP/s": flops / bench.ms(
        lambda: F.grouped_mm(x, torch.stack([w.t() for w in apart]), offs=ends))}  # fmt: skip


def waits_of(bench: Bench, call: Callable[[], object]) -> int:
    """Return the number of host waits for the device in a call."""
    call()
    if bench.device.type == "cpu":
        return 0
    module = torch.get_device_module(bench.device.type)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        module.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            module.set_sync_debug_mode("default")
    return len(seen)


def waits(bench: Bench) -> Iterator[Row]:
    """Number of host waits in segment_reduce, with and without its checks."""
    x = torch.rand(2**20, device=bench.device, dtype=torch.float64)
    lengths = torch.tensor([2**19, 2**19], device=bench.device)
    for unsafe in (False, True):

        def reduce(unsafe: bool = unsafe) -> Tensor:
            return torch.segment_reduce(x, "sum", lengths=lengths, unsafe=unsafe)

        yield {"host waits": "segment_reduce", "unsafe": unsafe, "number": waits_of(bench, reduce),
               "ms": bench.ms(reduce)}  # fmt: skip


def adam(bench: Bench) -> Iterator[Row]:
    """torch's fused AdamW with a scale and a flag on the device: 28 bytes a weight."""
    number = 2**28 // bench.scale**2
    weight = torch.nn.Parameter(bench.tensor(number, dtype=torch.float32))
    weight.grad = bench.tensor(number, dtype=torch.float32)
    optimizer = torch.optim.AdamW([weight], fused=True)
    optimizer.grad_scale = torch.ones((), device=bench.device)  # type: ignore[attr-defined]
    optimizer.found_inf = torch.zeros((), device=bench.device)  # type: ignore[attr-defined]
    yield {"fused AdamW": number, "TB/s": 28e-9 * number / bench.ms(optimizer.step),
           "host waits": waits_of(bench, optimizer.step)}  # fmt: skip


def graphs(bench: Bench) -> Iterator[Row]:
    """Small products started one by one, and by one graph."""
    number = 50
    x, w = bench.tensor(64, 256), bench.tensor(256, 256)

    def chain() -> Tensor:
        y = x
        for _ in range(number):
            y = y @ w
        return y

    row: Row = {"launches": number, "us each": 1e3 * bench.ms(chain) / number}
    if bench.device.type != "cpu":
        module = torch.get_device_module(bench.device.type)
        graph = module.CUDAGraph()
        with module.graph(graph):
            chain()
        row["us each by a graph"] = 1e3 * bench.ms(graph.replay) / number
    yield row


PROBES: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "machine": machine, "ceilings": ceilings, "linears": linears,
    "weight gradient": weight_gradient, "sdpa": sdpa, "low precision": low_precision,
    "grouped": grouped, "waits": waits, "adam": adam, "graphs": graphs,
}  # fmt: skip


def shown(value: object) -> object:
    """Return a value with four digits if it is a float."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main_of_probe() -> None:
    """Run the probe named by the command line of this process, and print its rows."""
    name = sys.argv[1]
    on_cpu = device.device_type() == "cpu"
    bench = Bench(device.current_device(), 64 if on_cpu else 1)
    for row in PROBES[name](bench):
        printed = {"probe": name} | {key: shown(value) for key, value in row.items()}
        print(f"ROW: {json.dumps(printed)}")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    names: tuple[str, ...] = flag(tuple(PROBES)[1:], choices=PROBES)
    """Names of probes. Default: all but `machine`."""
    rehearse: bool = False
    """Tiny sizes on the CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run probes and print their rows."""
    options = read_command_line(
        Flags, argv, prog="python -m benchmarks.gpu.probes", description=__doc__
    )
    if options.rehearse:
        choose_cpu()
    failed = []

    def show(outcome: Outcome) -> None:
        print(outcome.log, end="", flush=True)
        if outcome.problem:
            row = {"probe": outcome.case.name, "error": outcome.problem,
                   "errors": list(first_errors(outcome.log))}  # fmt: skip
            print(f"ROW: {json.dumps(row)}", flush=True)
            failed.append(outcome.case.name)

    cases = [Case(name=name, runs=(Run(words=(name,)),)) for name in options.names]
    with tempfile.TemporaryDirectory() as folder:
        run_cases(cases, Path(folder), main=main_of_probe, ranks_at_once=1, limit_s=_LIMIT_S,
                  whole_limit_s=_WHOLE_S, on_end=show)  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
