"""Part `limits`: what the machine can do at best, beside its data sheet.

Products of matrices, attention, copies, and what ranks exchange. `device_rows` and
`collective_rows` measure in processes of their own:

    python -m benchmarks.gpu.limits --output ROWS.json
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.processes import Machine, MeasurementFailedError, ranks_command, run
from benchmarks.gpu.report import Found, Row, Table
from megatron.core.foundation import device
from megatron.core.settings.command_line import read_command_line
from megatron.core.topology.group import Group
from megatron.core.transport import collectives
from megatron.training.launch import rank_info

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TIMEOUT_S = 1200


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is measured.

    Attributes:
        products: rows, columns and inner size.
        attentions: batch, heads, positions, width of a head.
        copies, messages: bytes.
    """

    products: tuple[tuple[int, int, int], ...]
    attentions: tuple[tuple[int, int, int, int], ...]
    copies: tuple[int, ...]
    messages: tuple[int, ...]
    calls: int
    rounds: int


FULL = Sizes(
    # Squares, then the layers of Llama 3 8B at 8,192 tokens: qkv, projection, MLP, head.
    products=(
        *((n, n, n) for n in (1024, 2048, 4096, 8192, 16384)),
        (8192, 6144, 4096), (8192, 4096, 4096), (8192, 28672, 4096), (8192, 4096, 14336),
        (8192, 128256, 4096),
    ),
    attentions=((4, 32, 2048, 128), (1, 32, 8192, 128), (1, 32, 32768, 128), (4, 32, 4096, 64)),
    copies=tuple(2**n for n in (20, 24, 28, 30)),
    messages=tuple(2**n for n in (16, 20, 24, 28, 30)),
    calls=10,
    rounds=5,
)  # fmt: skip
TINY = Sizes(
    products=((32, 16, 8),), attentions=((1, 2, 16, 8),), copies=(4096,), messages=(4096,),
    calls=1, rounds=1,
)  # fmt: skip


def seconds_of(call: Callable[[], object], sizes: Sizes) -> float:
    """Return the median seconds of a call among several that are queued together."""
    call()
    found = []
    for _ in range(sizes.rounds):
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(sizes.calls):
            call()
        device.synchronize()
        found.append((time.perf_counter() - begin) / sizes.calls)
    return statistics.median(found)


def _fp8_product(m: int, n: int, k: int) -> Callable[[], Tensor]:
    where = device.current_device()
    a = torch.randn(m, k, device=where).to(torch.float8_e4m3fn)
    b = torch.randn(n, k, device=where).to(torch.float8_e4m3fn).t()
    one = torch.ones((), device=where)
    return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def _product(m: int, n: int, k: int, dtype: torch.dtype) -> Callable[[], Tensor]:
    where = device.current_device()
    a = torch.randn(m, k, device=where).to(dtype)
    b = torch.randn(n, k, device=where).to(dtype).t()
    return lambda: torch.mm(a, b)


def product_rows(sizes: Sizes) -> Iterator[Row]:
    """Yield TFLOP/s of products by shape and precision; the second matrix as that of a linear."""
    for precision in (*DTYPES, "fp8"):
        for m, n, k in sizes.products:
            row: Row = {"precision": precision, "m": m, "n": n, "k": k}
            try:
                call = (
                    _fp8_product(m, n, k) if precision == "fp8"
                    else _product(m, n, k, DTYPES[precision])
                )  # fmt: skip
                seconds = seconds_of(call, sizes)
                yield row | {"ms": 1e3 * seconds, "TFLOP/s": 2e-12 * m * n * k / seconds}
            except (RuntimeError, ValueError) as error:
                yield row | {"error": str(error).splitlines()[0]}


def attention_rows(sizes: Sizes) -> Iterator[Row]:
    """Yield TFLOP/s of causal attention by torch; the half of the scores that it needs counts."""
    for b, n, s, d in sizes.attentions:
        q, k, v = (
            torch.randn(b, n, s, d, device=device.current_device(), dtype=torch.bfloat16)
            .requires_grad_()
            for _ in range(3)
        )  # fmt: skip

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        def both(inputs: tuple[Tensor, ...] = (q, k, v)) -> None:
            out = forward(*inputs)
            torch.autograd.grad(out, inputs, out)

        flops = 2.0 * b * n * s * s * d  # two products, half of each
        row: Row = {"b": b, "n": n, "s": s, "d": d}
        for name, call, times in (("forward", forward, 1.0), ("both passes", both, 3.5)):
            seconds = seconds_of(call, sizes)
            row |= {f"{name}, ms": 1e3 * seconds}
            row |= {f"{name}, TFLOP/s": 1e-12 * times * flops / seconds}
        yield row


def copy_rows(sizes: Sizes) -> Iterator[Row]:
    """Yield GB/s of copies; those within the device read and write each byte."""
    where = device.current_device()
    for count in sizes.copies:
        here, there = (torch.empty(count, dtype=torch.uint8, device=where) for _ in range(2))
        pageable = torch.empty(count, dtype=torch.uint8)
        pinned = pageable if where.type == "cpu" else pageable.pin_memory()
        copies: dict[str, tuple[Tensor, Tensor, int]] = {
            "within the device": (there, here, 2),
            "to the device, pinned": (here, pinned, 1),
            "to the device, pageable": (here, pageable, 1),
            "to the host, pinned": (pinned, here, 1),
        }
        for name, (target, source, times) in copies.items():
            seconds = seconds_of(
                lambda target=target, source=source: target.copy_(source, non_blocking=True), sizes
            )
            yield {"copy": name, "bytes": count, "GB/s": 1e-9 * times * count / seconds}


def collective_rows(group: Group, sizes: Sizes) -> Iterator[Row]:
    """Yield GB/s of each collective: bytes that a rank must send over its time.

    Args:
        sizes: `messages` are the bytes of the whole tensor.
    """
    ranks = group.size()
    share = (ranks - 1) / ranks
    for count in sizes.messages:
        whole = torch.zeros(count // 2 // ranks * ranks, 1, device=device.current_device())
        whole = whole.to(torch.bfloat16)
        piece = whole[: len(whole) // ranks].clone()
        calls: dict[str, tuple[Callable[[], object], float]] = {
            "all-reduce": (lambda x=whole: collectives.all_reduce(x, group), 2 * share),
            "all-gather": (lambda x=piece: collectives.all_gather(x, group), share),
            "reduce-scatter": (lambda x=whole: collectives.reduce_scatter(x, group), share),
            "all-to-all": (lambda x=whole: collectives.all_to_all(x, group), share),
        }
        for name, (call, sent) in calls.items():
            seconds = seconds_of(call, sizes)
            yield {
                "ranks": ranks, "collective": name, "bytes": count, "us": 1e6 * seconds,
                "GB/s": 1e-9 * sent * count / seconds,
            }  # fmt: skip


def beside_data_sheet(machine: Machine, kind: str, row: Row) -> Row:
    """Add the share of the data sheet, where there is one that says something of the row."""
    if machine.gpu is None or ("TFLOP/s" not in row and "GB/s" not in row):
        return row
    gpu = machine.gpu
    if kind == "products":
        peaks = {"bf16": gpu.peak_16_bit_flops, "fp16": gpu.peak_16_bit_flops}
        peak = (peaks | {"fp8": gpu.peak_8_bit_flops}).get(str(row["precision"]))
        rate = 1e12 * float(str(row["TFLOP/s"]))
    elif kind == "copies":
        peak = gpu.memory_bytes_per_s if row["copy"] == "within the device" else None
        rate = 1e9 * float(str(row["GB/s"]))
    else:
        peak, rate = gpu.nvlink_bytes_per_s, 1e9 * float(str(row["GB/s"]))
    return row if peak is None else row | {"of data sheet": rate / peak}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    output: Path
    tiny: bool = False


def main() -> None:
    """Measure as one rank of those that were started, or of the device alone; rank 0 writes."""
    options = read_command_line(Flags, description=__doc__)
    sizes, info = TINY if options.tiny else FULL, rank_info.read_rank_info()
    if info.world_size == 1:
        found = {
            "products": list(product_rows(sizes)),
            "attention": list(attention_rows(sizes)),
            "copies": list(copy_rows(sizes)),
        }
    else:
        device.set_local_device(info.local_rank)
        dist.init_process_group(device.communication_backend())
        group = dist.new_group(list(range(info.world_size)))
        found = {"collectives": list(collective_rows(group, sizes))}
        dist.destroy_process_group()
    if info.rank == 0:
        options.output.write_text(json.dumps(found), encoding="utf-8")


def measure(machine: Machine) -> Found:
    """Measure on one device, and what each number of ranks exchanges."""
    rows: dict[str, list[Row]] = {}
    failures = []
    for num_ranks in sorted({1, *machine.ranks}):
        output = machine.directory / f"limits-{num_ranks}.json"
        words = ["-m", "benchmarks.gpu.limits", "--output", str(output.resolve())]
        words += ["--tiny"] * machine.is_rehearsal
        log = machine.directory / "logs" / f"limits-{num_ranks}.log"
        try:
            run(ranks_command(num_ranks, words), log, timeout_s=_TIMEOUT_S)
        except MeasurementFailedError as error:
            failures.append(str(error))
            continue
        for kind, found in json.loads(output.read_text(encoding="utf-8")).items():
            rows.setdefault(kind, []).extend(beside_data_sheet(machine, kind, r) for r in found)
    return Found(tables=[Table(title=k, rows=found) for k, found in rows.items()],
                 failures=failures)  # fmt: skip


if __name__ == "__main__":
    main()
