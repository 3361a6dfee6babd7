"""Tables of workloads: models, batches and layouts, with one array per column.

The planner computes with whole tables at once: a search over thousands of layouts is a few hundred
numpy operations, and so is one step of a calibration. A single run is a table of one row.

Letters of the arithmetic in this package: `s` sequence, `b` micro batch, `h` hidden, `n` heads, `g`
query groups, `d` head size, `f` ffn, `v` vocabulary, `e` experts, `t` = s*b/cp tokens of a micro
batch on a rank.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.foundation.errors import ConfigError

FloatArray = NDArray[np.float64]
TextArray = NDArray[np.str_]

UNKNOWN = math.nan
"""A number that the source of a row lacks; `autofill.autofill` replaces it."""

RECOMPUTE_KINDS = (
    "none", "selective", "layernorm", "mlp", "selective_op", "modules", "activations", "full",
)  # fmt: skip
"""Recomputed parts: nothing; the attention core; the norms; the feed-forward, with its experts;
every second matrix product; the small modules of published recipes; norms and the inputs of the
second products of experts; the whole layer."""


@dataclass(frozen=True, kw_only=True)
class Workloads:
    """Models, batches and layouts; all arrays have one entry per row."""

    num_layers: FloatArray
    hidden_size: FloatArray
    num_attention_heads: FloatArray
    num_query_groups: FloatArray
    kv_channels: FloatArray
    ffn_hidden_size: FloatArray
    """Width of the feed-forward of dense layers."""
    gated_linear_unit: FloatArray
    """1 where the first product of the feed-forward has two halves."""
    vocab_size: FloatArray
    num_experts: FloatArray
    """0 for a dense model."""
    moe_router_topk: FloatArray
    moe_ffn_hidden_size: FloatArray
    expert_hidden_size: FloatArray
    """Width of the inputs and outputs of routed experts: the hidden size, or the latent size."""
    mixer_scale: FloatArray
    """Weights beside the routed experts that process a token, over the weights of the projections
    of attention: latent attention has fewer, shared experts and dense layers are more."""
    dense_params: FloatArray
    """Weights of a layer without its routed experts, the mean of all layers."""
    expert_params: FloatArray
    """Weights of all routed experts of a layer, the mean of all layers."""
    attention_layers: FloatArray
    """Share of the layers that have attention; the next three likewise."""
    dense_layers: FloatArray
    expert_layers: FloatArray
    mamba_layers: FloatArray
    mamba_width: FloatArray
    """Heads times head size of a Mamba-2 mixer."""
    mamba_inputs: FloatArray
    """Width of the projection before it."""
    mamba_state_size: FloatArray
    attended_share: FloatArray
    """Share of the causal scores that windows leave, the mean of all layers; 1 without windows."""
    has_sinks: FloatArray
    """1 where a learned sink takes part in the softmax of attention."""
    trained_share: FloatArray
    """Share of the weights that the optimizer updates: 1, or the share of the adapters."""
    num_tables: FloatArray
    """Matrices of vocabulary size: 1 where the output layer is the embedding, else 2."""
    seq_length: FloatArray
    gpu: TextArray
    world_size: FloatArray
    tensor_size: FloatArray
    pipeline_size: FloatArray
    num_chunks: FloatArray
    """Model chunks on every pipeline rank; unknown where it was not published."""
    context_size: FloatArray
    expert_size: FloatArray
    expert_tensor_size: FloatArray
    """Number of ranks that split one expert."""
    data_size: FloatArray
    micro_batch_size: FloatArray
    global_batch_size: FloatArray
    sharding_stage: FloatArray
    """0: none, 1: optimizer state, 2: and gradients, 3: and parameters (ZeRO, FSDP)."""
    weight_bytes: FloatArray
    """Bytes per parameter in the precision of the computation, gathered parameters included."""
    gradient_bytes: FloatArray
    optimizer_bytes: FloatArray
    """Bytes per parameter of main weights and moments on the GPU."""
    recompute: TextArray
    """One of RECOMPUTE_KINDS; empty where it was not published."""
    recompute_share: FloatArray
    """Share of the layers that are recomputed."""
    precision: TextArray
    sequence_parallel: FloatArray
    may_interleave: FloatArray
    """1 where the schedule allows several chunks."""
    must_interleave: FloatArray
    software: TextArray
    """Kind of software; constants differ by kind. `unfused`: software of 2021. `deepspeed`: the
    same with a ZeRO stage; DeepSpeed's engine runs the pipeline. `megatron`: fused kernels.
    `fsdp`: fused kernels, with PyTorch's attention and overlap of sharded parameters."""
    graphs: TextArray
    """CUDA graphs: none, layer (of attention and the router), iteration (of the whole step); empty
    where it was not published."""
    grouped_products: FloatArray
    """1 where one kernel computes the products of all local experts."""
    flash_attention: FloatArray
    """1: fused attention and overlaps, from 2023 on; 0: scores in memory, nothing overlapped."""
    nvlink_domain: FloatArray
    """Number of GPUs in an NVLink domain."""
    nic_bytes_per_s: FloatArray
    """Bandwidth of one GPU in each direction between NVLink domains."""

    def __len__(self) -> int:
        return len(self.num_layers)

    def take(self, chosen: NDArray[Any]) -> Workloads:
        """Return the rows of a mask or of indices."""
        return Workloads(**{each.name: getattr(self, each.name)[chosen] for each in _FIELDS})

    def replace(self, **columns: NDArray[Any]) -> Workloads:
        """Return the table with other values in some columns."""
        return dataclasses.replace(self, **columns)

    @cached_property
    def kinds(self) -> dict[str, tuple[TextArray, NDArray[np.int_]]]:
        """Return the distinct words of a text column, and the number of each row's word."""
        return {
            name: np.unique(getattr(self, name), return_inverse=True)
            for name in ("gpu", "precision", "software")
        }

    @property
    def microbatch_tokens(self) -> FloatArray:
        """Return the tokens of a micro batch on one rank, t = s*b/cp."""
        return self.seq_length * self.micro_batch_size / self.context_size

    @property
    def num_microbatches(self) -> FloatArray:
        """Return the micro batches of a step; a batch that does not divide counts in part."""
        number = self.global_batch_size / (self.data_size * self.micro_batch_size)
        return np.maximum(number, 1.0)

    @property
    def query_width(self) -> FloatArray:
        """Return n*d."""
        return self.num_attention_heads * self.kv_channels

    @property
    def kv_width(self) -> FloatArray:
        """Return g*d."""
        return self.num_query_groups * self.kv_channels

    @property
    def is_moe(self) -> NDArray[np.bool_]:
        """Return which rows have experts."""
        return self.num_experts > 0

    @property
    def expert_ranks(self) -> FloatArray:
        """Return the ranks that share the experts of a layer."""
        return self.expert_size * self.expert_tensor_size

    @property
    def replicas(self) -> FloatArray:
        """Return the ranks that hold the same weights outside of experts."""
        return self.data_size * self.context_size

    @property
    def expert_replicas(self) -> FloatArray:
        """Return the ranks that hold the same experts."""
        return np.maximum(self.replicas * self.tensor_size / self.expert_ranks, 1.0)

    @property
    def local_experts(self) -> FloatArray:
        """Return the experts of one rank."""
        return np.maximum(self.num_experts / self.expert_size, 1.0)


_FIELDS = dataclasses.fields(Workloads)


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
    for field in _FIELDS:
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
        "expert_size": number("EP", 1),
        # Many small experts are not split.
        "expert_tensor_size": tp if num_experts <= 16 else 1.0,
        "data_size": number("DP", world_size / (tp * pp * cp)),
        "micro_batch_size": number("MBS", UNKNOWN),
        "global_batch_size": number("GBS"),
        "sharding_stage": sharding_stage,
        "weight_bytes": 3.0 if has_copies else 2.0,
        # Fused software reduces 16-bit gradients; bf16 of 2022 accumulated them in fp32.
        "gradient_bytes": 6.0 if precision == "bf16" and not flash else 2.0,
        "optimizer_bytes": 12.0,
        "recompute": _recompute(row.get("recompute") or ""),
        "recompute_share": 1.0,
        "precision": precision,
        "sequence_parallel": number("sp", 0),
        "may_interleave": float(is_pipelined and schedule != "1f1b"),
        "must_interleave": float(is_pipelined and schedule == "interleaved"),
        "flash_attention": float(flash),
        "software": _software(row, gpu, sharding_stage, is_alone=tp * pp == 1, is_fused=flash),
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
    if named := _choice(row, "software", ("unfused", "deepspeed", "megatron", "fsdp")):
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


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Number of parameters of one rank before data parallelism shards them."""

    dense: FloatArray
    expert: FloatArray


def embedding_parameters(workloads: Workloads) -> FloatArray:
    """Return the weights of the embedding, or of the output layer."""
    return workloads.vocab_size * workloads.hidden_size


def parameters_of_layer(workloads: Workloads) -> FloatArray:
    """Return the weights of one layer on one tensor-parallel rank."""
    experts = workloads.expert_params / workloads.expert_ranks
    return workloads.dense_params / workloads.tensor_size + experts


def parameters_of_rank(workloads: Workloads) -> RankParameters:
    """Return the weights of a rank of the first stage: its layers and the embedding.

    Without a pipeline, the rank holds the output layer as well.
    """
    layers = workloads.num_layers / workloads.pipeline_size
    tables = np.where(workloads.pipeline_size == 1, workloads.num_tables, 1.0)
    tables = tables * embedding_parameters(workloads)
    return RankParameters(
        dense=(layers * workloads.dense_params + tables) / workloads.tensor_size,
        expert=layers * workloads.expert_params / workloads.expert_ranks,
    )
