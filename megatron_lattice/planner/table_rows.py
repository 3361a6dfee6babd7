"""Read rows of CSV files as a table of workloads."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.foundation.errors import ConfigError
from megatron_lattice.planner.workload import COLUMNS, Workloads

UNKNOWN = math.nan
"""A number that the source of a row lacks; `autofill.autofill` replaces it."""


def read_rows(path: str | Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with a line of titles.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        with open(path, newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}.",
            rule="the rows to plan for are a CSV file in UTF-8 with a line of titles",
            fix="give the path of such a file",
        ) from error


def from_rows(rows: Sequence[Mapping[str, str]]) -> Workloads:
    """Read the columns of model, batch and layout; measured columns are ignored.

    Raises:
        ConfigError: a column is missing, or a value is not a number.
    """
    records = [_record(index, row) for index, row in enumerate(rows)]
    columns: dict[str, Any] = {}
    for field in COLUMNS:
        is_text = field.name in ("gpu", "recompute", "precision", "software", "graphs")
        values = [record[field.name] for record in records]
        columns[field.name] = np.array(values, dtype=str if is_text else np.float64)
    return Workloads(**columns)


def number_of(
    row: Mapping[str, str], index: int, column: str, default: float | None = None
) -> float:
    """Return the number in a column of a row.

    Args:
        default: value of an empty column; None if the column must not be empty.
    Raises:
        ConfigError: the column has no number.
    """
    text = (row.get(column) or "").strip()
    if not text and default is not None:
        return default
    try:
        return float(text)
    except ValueError:
        name = row.get("id") or f"row {index + 1}"
        raise ConfigError(
            f"{name}: column {column!r} has {text!r}.",
            rule="this column must be a number: the prediction, or its comparison, needs it",
            fix=f"fill in {column}, or leave the row out",
        ) from None


def _record(index: int, row: Mapping[str, str]) -> dict[str, Any]:
    number = partial(number_of, row, index)
    heads, hidden = number("heads"), number("hidden")
    schedule = (row.get("schedule") or "").strip()
    is_pipelined = number("PP", 1) > 1
    num_chunks = number("VPP", UNKNOWN if is_pipelined and schedule != "1f1b" else 1)
    gpu = (row.get("gpu") or "").strip()
    # Blanks get the most frequent value on the GPU: 123 of 140 published steps on A100.
    usual = "unfused" if gpu.startswith("A100") else "flash"
    flash = (row.get("attention") or usual).strip() != "unfused"
    world_size, tp, pp, cp = (number(name, 1) for name in ("n_gpus", "TP", "PP", "CP"))
    groups, head_dim = number("kv_heads", heads), number("head_dim", hidden / heads)
    halves, num_experts = 1 + number("glu", 0), number("experts", 0)
    layers, seq_length = number("layers"), number("seq")
    with_experts = number("expert_layers", layers * (num_experts > 0)) / layers
    with_mamba = number("mamba_layers", 0) / layers
    with_attention = number("attention_layers", layers) / layers
    with_mlp = number("dense_layers", layers * (1 - with_experts)) / layers
    mamba_heads, state = number("mamba_heads", 0), number("mamba_state", 0)
    mamba_width = mamba_heads * number("mamba_head_dim", 0)
    mamba_inputs = 2 * (mamba_width + number("mamba_groups", 1) * state) + mamba_heads
    attention = 2 * hidden * (heads + groups) * head_dim
    expert = hidden * number("moe_ffn", 0) * (1 + halves)
    scale = mixer_scale(
        number("active_B", 0) * 1e9 / layers - with_experts * number("topk", 0) * expert,
        hidden * number("vocab") / layers,
        with_attention * attention,
    )
    # In a layer with experts, only the router is dense.
    dense_params = (
        with_attention * attention * scale
        + with_experts * hidden * num_experts
        + with_mlp * hidden * number("ffn", 4 * hidden) * (1 + halves)
        + with_mamba * hidden * (mamba_inputs + mamba_width)
    )
    expert_params = expert * num_experts * with_experts
    # Two matrices of rank r beside each of the four of a layer, with its widths.
    adapters = number("lora_rank", 0) * (4 * hidden + 2 * (heads + groups) * head_dim)
    window = min(number("window", seq_length), seq_length) / seq_length
    windowed = number("window_layers", layers if window < 1 else 0) / layers
    # Without the scaling recipe: fp8-cs is fp8.
    precision = re.split("[-_]", (row.get("precision") or "bf16").strip().lower())[0]
    stages = [float(letter) for letter in row.get("zero") or "" if letter in "0123"]
    sharding_stage = min(stages, default=float(flash))
    # Block-scaled weights are stored in both orientations in addition to the 16-bit weights.
    has_copies = precision in ("mxfp8", "nvfp4") and sharding_stage < 3
    software = _software(row, gpu, sharding_stage, is_alone=tp * pp == 1, is_fused=flash)
    # Fused software reduces 16-bit gradients; bf16 of 2022 accumulated them in fp32 in addition, as
    # this project does in place of them.
    gradient_bytes = 4.0 if software == "lattice" else 2.0
    if precision == "bf16" and not flash:
        gradient_bytes = 6.0
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "ffn_hidden_size": number("ffn", 4 * hidden),
        "gated_linear_unit": halves - 1,
        "vocab_size": number("vocab"),
        "num_experts": num_experts,
        "moe_router_topk": number("topk", 0),
        "moe_ffn_hidden_size": number("moe_ffn", 0),
        "expert_hidden_size": hidden,
        "mixer_scale": scale,
        "dense_params": dense_params,
        "expert_params": expert_params,
        "attention_layers": with_attention,
        "dense_layers": with_mlp,
        "expert_layers": with_experts,
        "mamba_layers": with_mamba,
        "mamba_width": mamba_width,
        "mamba_inputs": mamba_inputs,
        "mamba_state_size": state,
        "attended_share": 1 - windowed * (1 - window * (2 - window)),
        "has_sinks": float(_choice(row, "sinks", ("no", "yes")) == "yes"),
        "trained_share": adapters / (dense_params + expert_params) if adapters else 1.0,
        # Software of 2024 has a separate output layer.
        "num_tables": halves,
        "seq_length": seq_length,
        "gpu": gpu,
        "world_size": world_size,
        "tensor_size": tp,
        "pipeline_size": pp,
        "num_chunks": num_chunks,
        "context_size": cp,
        "exchanges_heads": 0.0,
        "expert_size": number("EP", 1),
        # Many small experts are not split.
        "expert_tensor_size": tp if num_experts <= 16 else 1.0,
        "data_size": number("DP", world_size / (tp * pp * cp)),
        "micro_batch_size": number("MBS", UNKNOWN),
        "global_batch_size": number("GBS"),
        "sharding_stage": sharding_stage,
        "weight_bytes": 3.0 if has_copies else 2.0,
        "gradient_bytes": gradient_bytes,
        "optimizer_bytes": 12.0,
        "recompute": _recompute(row.get("recompute") or ""),
        "recompute_share": 1.0,
        "precision": precision,
        "sequence_parallel": number("sp", 0),
        "may_interleave": float(is_pipelined and schedule != "1f1b"),
        "must_interleave": float(is_pipelined and schedule == "interleaved"),
        "flash_attention": float(flash),
        "software": software,
        "graphs": _choice(row, "graphs", ("none", "layer", "iteration")),
        "grouped_products": float(_choice(row, "grouped", ("no", "yes")) == "yes"),
        "nvlink_domain": number("nvlink_domain", 8),
        "nic_bytes_per_s": number("inter_node_GBps_per_gpu", 50) * 1e9,
    }


def mixer_scale(others: float, table: float, attention: float) -> float:
    """Return the weights beside the routed experts over the weights of attention by its columns.

    All are weights of a layer; `others` contains 0 to 2 tables of the vocabulary, or is negative.
    """
    if others <= 0 or not attention:
        return 1.0
    # Publications count the tables of the vocabulary or not: the count closest to the columns.
    ratios = [max((others - number * table) / attention, 0.4) for number in (0, 1, 2)]
    return min(min(ratios, key=lambda ratio: abs(math.log(ratio))), 3.0)


def _software(
    row: Mapping[str, str], gpu: str, sharding_stage: float, *, is_alone: bool, is_fused: bool
) -> str:
    """Return the kind of software; without the column, the usual kind for the other columns.

    Sharded parameters: PyTorch's FSDP up to Hopper, and Megatron's on Blackwell.
    """
    kinds = ("unfused", "deepspeed", "megatron", "fsdp", "lattice")
    if named := _choice(row, "software", kinds):
        return named
    if not is_fused:
        return "deepspeed" if sharding_stage >= 1 else "unfused"
    is_torch = gpu.startswith(("A", "H")) and (
        sharding_stage >= 3 or sharding_stage >= 2 and is_alone
    )
    return "fsdp" if is_torch else "megatron"


def _choice(row: Mapping[str, str], column: str, known: Sequence[str]) -> str:
    """Return the word in a column, or an empty text.

    Raises:
        ConfigError: another word.
    """
    word = (row.get(column) or "").strip().lower()
    if word and word not in known:
        raise ConfigError(
            f"{row.get('id') or 'a row'}: column {column!r} has {word!r}.",
            rule=f"the column has one of {', '.join(known)}, or nothing",
            fix=f"write one of them in {column}, or leave it empty",
        )
    return word


def _recompute(text: str) -> str:
    kind = text.strip().lower().replace("-", "_")
    if kind.startswith("selective_op"):
        return "selective_op"
    for known in ("full", "selective", "none"):
        if kind.startswith(known):
            return known
    return "selective" if kind else ""
