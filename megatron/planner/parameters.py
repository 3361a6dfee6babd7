"""Parameters of a model, of a layer and of the rank that holds most of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.planner.workload import FloatArray, Workloads


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters that one rank computes with, before sharding over data parallelism."""

    dense: FloatArray
    expert: FloatArray


def attention_parameters(workloads: Workloads) -> FloatArray:
    """Return the weights of the attention of one layer."""
    return 2 * workloads.hidden_size * (workloads.query_width + workloads.kv_width)


def feed_forward_parameters(workloads: Workloads) -> FloatArray:
    """Return the weights of the dense feed-forward of one layer; 0 where it has experts."""
    halves = 2 + workloads.gated_linear_unit
    dense = halves * workloads.hidden_size * workloads.ffn_hidden_size
    return np.where(workloads.is_moe, workloads.hidden_size * workloads.num_experts, dense)


def expert_parameters(workloads: Workloads) -> FloatArray:
    """Return the weights of all routed experts of one layer."""
    one = (2 + workloads.gated_linear_unit) * workloads.hidden_size * workloads.moe_ffn_hidden_size
    return one * workloads.num_experts


def embedding_parameters(workloads: Workloads) -> FloatArray:
    """Return the weights of the embedding, or of the output layer."""
    return workloads.vocab_size * workloads.hidden_size


def parameters_of_layer(workloads: Workloads) -> FloatArray:
    """Return the weights of one layer on one tensor-parallel rank."""
    dense = attention_parameters(workloads) + feed_forward_parameters(workloads)
    expert = expert_parameters(workloads) / workloads.expert_size
    return dense / workloads.tensor_size + expert / workloads.experts_tensor_size


def parameters_of_rank(workloads: Workloads) -> RankParameters:
    """Return the weights of a rank of the first stage: its layers and the embedding.

    Without a pipeline the rank has the output layer as well, in software of 2024 untied.
    """
    layers = workloads.num_layers / workloads.pipeline_size
    dense = attention_parameters(workloads) + feed_forward_parameters(workloads)
    tables = np.where((workloads.pipeline_size == 1) & (workloads.gated_linear_unit > 0), 2.0, 1.0)
    tables = tables * embedding_parameters(workloads)
    expert = expert_parameters(workloads) / (workloads.expert_size * workloads.experts_tensor_size)
    return RankParameters(
        dense=(layers * dense + tables) / workloads.tensor_size,
        expert=layers * expert,
    )
