"""Bytes of the rank that needs the most memory, in closed form.

A search compares tens of thousands of layouts, and tracing one layout takes about a second
(`megatron.training.setup.traced_memory`, used by all reports). Only the search uses this closed
form.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
arXiv 2205.05198, section 4; Rajbhandari et al., "ZeRO", arXiv 1910.02054. The sum contains states,
activations of the micro batches in flight, logits, and the overhead of the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.hardware import Hardware
from megatron_lattice.planner.workload import (
    RECOMPUTE_KINDS,
    FloatArray,
    Workloads,
    embedding_parameters,
    parameters_of_layer,
    parameters_of_rank,
)

GIB = 2.0**30


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of each row."""

    states: FloatArray
    """Weights, gradients, optimizer state, gathered layers."""
    activations: FloatArray
    logits: FloatArray
    """Logits and their gradient, or the recomputed layer if that is larger."""
    overhead: FloatArray
    """Context of the device, communication buffers, and fragmentation of the allocator."""

    @property
    def total(self) -> FloatArray:
        """Return the bytes that the device must have."""
        return self.states + self.activations + self.logits + self.overhead


def predict_memory(workloads: Workloads, hardware: Hardware) -> Memory:
    """Predict the peak of each row; rows must have no blanks."""
    states = model_states(workloads)
    layers = layers_in_flight(workloads)
    share = workloads.recompute_share
    everything = layer_activations(workloads, np.full(len(workloads), "none"))
    per_layer = layer_activations(workloads, workloads.recompute)
    per_layer = share * per_layer + (1 - share) * everything
    activations = layers * per_layer
    full = workloads.recompute == "full"
    # Under full recomputation, one layer at a time holds all of its activations again.
    on_last = np.where(workloads.pipeline_size == 1, 1.0, 0.0)
    # Logits in 16 bits, in fp32, and the gradient in one of them or both. The loss of this project
    # reads logits in 16 bits and writes their gradient in place.
    per_logit = np.where(workloads.is_lattice, 2.0, 10.0)
    logits = per_logit * workloads.microbatch_tokens * workloads.vocab_size / workloads.tensor_size
    # The last stage holds fewer micro batches than the first, which leaves space for its logits.
    logits = logits * on_last
    # The backward reaches a recomputed layer after the logits are freed, so the two peaks are
    # not added.
    logits = np.maximum(logits, np.where(full, everything, 0.0))
    factor = hardware.per_software("allocator_factor", workloads)
    fixed = hardware.per_software("runtime_gib", workloads) * GIB
    overhead = fixed + (factor - 1) * (activations + logits)
    return Memory(states=states, activations=activations, logits=logits, overhead=overhead)


def model_states(workloads: Workloads) -> FloatArray:
    """Return weights, gradients and optimizer state of a rank.

    Mixed precision Adam: 2 bytes of weights, 2 of 16-bit or 4 of fp32 gradients, 12 of fp32 main
    weights and moments. The ZeRO stage determines which of them data parallelism shards.
    """
    shares = parameters_of_rank(workloads)
    dense = _states(workloads, shares.dense, workloads.replicas)
    return dense + _states(workloads, shares.expert, workloads.expert_replicas)


def _states(workloads: Workloads, weights: FloatArray, size: FloatArray) -> FloatArray:
    # In a pipeline, FSDP gathers parameters once a step: gathered parameters and full gradients
    # stay in memory.
    is_kept = workloads.pipeline_size > 1
    stage = np.where(is_kept, np.minimum(workloads.sharding_stage, 1.0), workloads.sharding_stage)
    kept = workloads.weight_bytes * np.where(stage >= 3, 1 / size, 1.0)
    updated = workloads.gradient_bytes * np.where(stage >= 2, 1 / size, 1.0)
    updated = updated + workloads.optimizer_bytes * np.where(stage >= 1, 1 / size, 1.0)
    kept = kept + workloads.trained_share * updated
    gathered = np.where(
        stage >= 3, 2 * 2 * parameters_of_layer(workloads) + 2 * embedding_parameters(workloads), 0
    )
    return weights * kept + np.where(weights > 0, gathered, 0.0) / workloads.tensor_size


def layers_in_flight(workloads: Workloads) -> FloatArray:
    """Return the layers whose activations the first stage holds at its peak.

    1F1B holds p micro batches of L/p layers; v chunks hold 1 + (p-1)/(pv) of that.
    """
    p, v = workloads.pipeline_size, workloads.num_chunks
    microbatches = np.minimum(p, workloads.num_microbatches)
    more = np.where(v > 1, 1 + (p - 1) / (p * v), 1.0)
    return workloads.num_layers / p * np.minimum(microbatches * more, workloads.num_microbatches)


def layer_activations(workloads: Workloads, recompute: np.ndarray) -> FloatArray:
    """Return the bytes that one layer keeps of one micro batch for its backward."""
    loads, tp = workloads, workloads.tensor_size
    tokens, hidden = loads.microbatch_tokens, loads.hidden_size
    flash = loads.flash_attention > 0
    split = np.where(loads.sequence_parallel > 0, tp, 1.0)
    eight_bit = ~np.isin(loads.precision, ("fp16", "bf16"))
    operand = np.where(eight_bit, 1.0, 2.0)
    # Inputs of both norms in 16 bits, their outputs as operands of the products; dropout masks.
    residual = hidden * (4 + 2 * operand + np.where(flash, 0.0, 2.0)) / split
    # Queries, keys, values and the context; fused kernels keep rotated queries as well.
    queries = np.where(flash, 6 * loads.query_width, 4 * loads.query_width)
    attention = loads.attention_layers * (queries + 4 * loads.kv_width) / tp
    attention = attention + loads.mamba_layers * 2 * (loads.mamba_inputs + loads.mamba_width) / tp
    scores = np.where(flash, 0.0, 5 * loads.num_attention_heads * loads.seq_length) / tp
    # Latent attention computes queries, keys and values again from their latents.
    latents = np.where(loads.is_latent, 4 * loads.query_width + 4 * loads.kv_width, 0.0) / tp
    halves = 1 + loads.gated_linear_unit
    # Whether tensor-parallel ranks split an expert or the tokens, each has 1/tp of the products.
    routed_width = loads.moe_ffn_hidden_size * loads.moe_router_topk
    ffn = loads.expert_layers * routed_width + loads.dense_layers * loads.ffn_hidden_size
    ffn = ffn / tp
    feed_forward = ffn * (2 * halves + operand)
    routed = loads.expert_layers * loads.moe_router_topk * loads.expert_hidden_size / split
    routed = routed * (2 + operand)
    everything = residual + attention + scores + feed_forward + routed
    kept = np.select(
        [recompute == kind for kind in RECOMPUTE_KINDS[1:]],
        [
            everything - scores,
            everything - 2 * operand * hidden / split,
            everything - feed_forward - routed,
            2 * hidden / split + 0.5 * (attention + feed_forward),
            everything - 2 * operand * hidden / split - ffn * operand - routed / 2 - latents,
            everything - 2 * operand * hidden / split - ffn * operand,
            2 * hidden / split,
        ],
        everything,
    )
    return tokens * kept
