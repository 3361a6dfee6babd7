"""Tables of workloads: models, batches and layouts, with one array per column.

The planner computes with whole tables at once: a search over thousands of layouts is a few hundred
numpy operations, and so is one step of a calibration. A single run is a table of one row.

Letters of the arithmetic in this package: `s` sequence, `b` micro batch, `h` hidden, `n` heads, `g`
query groups, `d` head size, `f` ffn, `v` vocabulary, `e` experts, `t` = s*b/cp tokens of a micro
batch on a rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
TextArray = NDArray[np.str_]

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
    exchanges_heads: FloatArray
    """1 where ranks that share a sequence exchange its shards for shards of the heads, so that each
    attends to the whole sequence; 0 where keys and values travel round a ring."""
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
    `fsdp`: fused kernels, with PyTorch's attention and overlap of sharded parameters. `lattice`:
    this project."""
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
        return Workloads(**{each.name: getattr(self, each.name)[chosen] for each in COLUMNS})

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
    def is_latent(self) -> NDArray[np.bool_]:
        """Return which rows probably have latent attention: as many key as query heads."""
        return self.is_moe & (self.num_query_groups == self.num_attention_heads)

    @property
    def is_lattice(self) -> NDArray[np.bool_]:
        """Return which rows are runs of this project."""
        return self.software == "lattice"

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


COLUMNS = dataclasses.fields(Workloads)


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
