"""Operators of a layer and of the output layer: operations, bytes and seconds of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.hardware import Hardware, RowHardware, rows_hardware
from megatron_lattice.planner.layer_time import (
    Product,
    attention_products,
    dense_products,
    expert_products,
)
from megatron_lattice.planner.operators import OperatorCosts
from megatron_lattice.planner.workload import FloatArray, Workloads


@dataclass(frozen=True, kw_only=True)
class OperatorPoint:
    """One operator on one rank, for one micro batch."""

    name: str
    flops: float
    num_bytes: float
    """Operands and result once through memory."""
    seconds: float


@dataclass(frozen=True)
class Roofline:
    """Peaks of the GPU, and the operators of the model.

    Attributes:
        peak_flops: peak of products in the precision of the run.
        bytes_per_s: bandwidth of the memory.
    """

    points: list[OperatorPoint]
    peak_flops: float
    bytes_per_s: float


def roofline_of(row: Workloads, hardware: Hardware) -> Roofline:
    """Return the operators of a table of one row."""
    rows = rows_hardware(row, hardware)
    operators = OperatorCosts(row, rows, hardware)
    products = dict(zip(("query, key, value", "projection"), attention_products(row), strict=True))
    if row.is_moe[0]:
        experts = expert_products(row)
        products |= dict(zip(("expert up", "expert down"), experts, strict=True))
    else:
        dense = dense_products(row)
        products |= dict(zip(("feed-forward up", "feed-forward down"), dense, strict=True))
    points = []
    for name, (m, n, k) in products.items():
        points.append(_products(f"{name}, forward", operators, rows, [(m, n, k)]))
        points.append(_products(f"{name}, backward", operators, rows, [(m, k, n), (k, n, m)]))
    tokens, width = row.microbatch_tokens, row.vocab_size / row.tensor_size
    logits = operators.gemm(tokens, width, row.hidden_size, sixteen_bit=True)
    points.append(
        OperatorPoint(
            name="logits",
            flops=float((2 * tokens * width * row.hidden_size)[0]),
            num_bytes=_moved(tokens, width, row.hidden_size, 2.0),
            seconds=float(logits[0]),
        )
    )
    points += _attention(row, operators)
    elementwise = operators.elementwise_forward()
    norms = operators.norms_forward()
    for name, seconds in (("norms", norms), ("norms, residuals, activations", elementwise)):
        moved = float(seconds[0]) * rows.memory_bytes_per_s[0]
        # These do about one operation per byte: their memory traffic determines their time.
        moved *= hardware.constant("memory_efficiency")
        points.append(
            OperatorPoint(name=name, flops=moved, num_bytes=moved, seconds=float(seconds[0]))
        )
    return Roofline(points, float(rows.peak_flops[0]), float(rows.memory_bytes_per_s[0]))


def _products(
    name: str, operators: OperatorCosts, rows: RowHardware, shapes: Sequence[Product]
) -> OperatorPoint:
    operand_bytes = 2.0 * float(rows.peak_16_bit_flops[0] / rows.peak_flops[0])
    return OperatorPoint(
        name=name,
        flops=sum(float((2 * m * n * k)[0]) for m, n, k in shapes),
        num_bytes=sum(_moved(*shape, operand_bytes) for shape in shapes),
        seconds=sum(float(operators.gemm(*shape)[0]) for shape in shapes),
    )


def _moved(m: FloatArray, n: FloatArray, k: FloatArray, operand_bytes: float) -> float:
    return float((operand_bytes * (m * k + k * n) + 2 * m * n)[0])


def _attention(row: Workloads, operators: OperatorCosts) -> list[OperatorPoint]:
    tokens = row.microbatch_tokens
    width, kv_width = row.query_width / row.tensor_size, row.kv_width / row.tensor_size
    flops = float((2 * tokens * row.seq_length * width)[0])  # causal
    # Queries, keys, values and the context; the backward reads these and their gradients.
    moved = float((2 * tokens * (2 * width + 2 * kv_width))[0])
    heads = row.num_attention_heads / row.tensor_size
    scores = float((10 * heads * row.seq_length * tokens)[0])
    is_flash = row.flash_attention[0] > 0
    again = np.where(is_flash, 2.5, 2.0)
    return [
        OperatorPoint(
            name="attention, forward",
            flops=flops,
            num_bytes=moved + (0.0 if is_flash else scores),
            seconds=float(operators.attention_forward()[0]),
        ),
        OperatorPoint(
            name="attention, backward",
            flops=flops * float(again),
            num_bytes=2 * moved + (0.0 if is_flash else 1.5 * scores),
            seconds=float(operators.attention_backward()[0]),
        ),
    ]
