"""Parameters of a model, of a layer and of the rank that holds most of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.workload import FloatArray, Workloads


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters that one rank computes with, before sharding over data parallelism."""

    dense: FloatArray
    expert: FloatArray


def embedding_parameters(workloads: Workloads) -> FloatArray:
    """Return the weights of the embedding, or of the output layer."""
    return workloads.vocab_size * workloads.hidden_size


def parameters_of_layer(workloads: Workloads) -> FloatArray:
    """Return the weights of one layer on one tensor-parallel rank."""
    expert_ranks = workloads.expert_size * workloads.expert_tensor_size
    return workloads.dense_params / workloads.tensor_size + workloads.expert_params / expert_ranks


def parameters_of_rank(workloads: Workloads) -> RankParameters:
    """Return the weights of a rank of the first stage: its layers and the embedding.

    Without a pipeline the rank has the output layer as well.
    """
    layers = workloads.num_layers / workloads.pipeline_size
    tables = np.where(workloads.pipeline_size == 1, workloads.num_tables, 1.0)
    tables = tables * embedding_parameters(workloads)
    expert_ranks = workloads.expert_size * workloads.expert_tensor_size
    return RankParameters(
        dense=(layers * workloads.dense_params + tables) / workloads.tensor_size,
        expert=layers * workloads.expert_params / expert_ranks,
    )
