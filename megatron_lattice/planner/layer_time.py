"""Seconds of one transformer layer, and of the output layer, for one micro batch on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lattice.planner.collectives import CollectiveCosts
from megatron_lattice.planner.operators import OperatorCosts
from megatron_lattice.planner.workload import (
    RECOMPUTE_KINDS,
    FloatArray,
    Workloads,
    parameters_of_layer,
)

Product = tuple[FloatArray, FloatArray, FloatArray]


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """Forward and backward seconds, each with its exposed communication."""

    forward: FloatArray
    backward: FloatArray
    exposed: FloatArray
    """Exposed communication, forward and backward together."""


def attention_products(loads: Workloads) -> list[Product]:
    """Return (m, n, k) of the projections before and after attention, on one rank."""
    tokens, hidden, tp = loads.microbatch_tokens, loads.hidden_size, loads.tensor_size
    return [
        (tokens, (loads.query_width + 2 * loads.kv_width) / tp, hidden),
        (tokens, hidden, loads.query_width / tp),
    ]


def dense_products(loads: Workloads) -> list[Product]:
    """Return (m, n, k) of both products of a feed-forward without experts, on one rank."""
    tokens, hidden, tp = loads.microbatch_tokens, loads.hidden_size, loads.tensor_size
    halves = 1 + loads.gated_linear_unit
    return [
        (tokens, loads.ffn_hidden_size * halves / tp, hidden),
        (tokens, hidden, loads.ffn_hidden_size / tp),
    ]


def layer_time(operators: OperatorCosts, collectives: CollectiveCosts) -> PassTime:
    """Return the time of one layer; the backward contains the recomputation."""
    loads, hardware = operators.workloads, operators.hardware
    share = loads.attention_layers * loads.mixer_scale
    mixers = _linear(operators, attention_products(loads), share)
    mixers += _linear(operators, mamba_products(loads), loads.mamba_layers)
    mlp = _linear(operators, dense_products(loads), loads.dense_layers)
    mlp += _experts(operators)
    feed_forward = mlp[0]
    forward_gemm, backward_gemm = mixers + mlp
    attention = operators.attention_forward()
    scan = operators.scan_forward()
    elementwise = operators.elementwise_forward()
    forward_gpu = forward_gemm + attention + scan + elementwise
    backward_gpu = backward_gemm + operators.attention_backward() + 2.5 * scan + 1.6 * elementwise

    norms, activation = operators.norms_forward(), operators.activation_forward()
    # Latent attention has about a quarter of its weights between latents and queries, keys, values.
    latents = np.where(loads.is_latent, 0.25 * mixers[0], 0.0)
    again = np.select(
        [loads.recompute == kind for kind in RECOMPUTE_KINDS[1:]],
        [
            attention,
            norms,
            feed_forward + activation + operators.routing_forward(),
            0.5 * forward_gemm + elementwise,
            norms + activation + latents,
            norms + activation,
            forward_gpu,
        ],
        0.0,
    )
    again = again * loads.recompute_share
    layers_again = np.where(loads.recompute == "full", loads.recompute_share, 0.0)
    # Each micro batch adds its gradient of the weights to the sum.
    # In fp32 a bf16 gradient is read, cast and added; the fused kernel adds in one pass.
    is_cast = (loads.precision == "bf16") & (loads.flash_attention == 0)
    summed = parameters_of_layer(loads) * loads.trained_share
    accumulation = operators.memory(np.where(is_cast, 16.0, 6.0) * summed)
    backward_gpu = backward_gpu + accumulation * hardware.constant("accumulation_traffic")
    launch = operators.launch()
    # Experts that are recomputed alone are launched, and receive their tokens, once more.
    experts_again = np.where(loads.recompute == "mlp", loads.recompute_share, 0.0)
    expert_gap = operators.expert_launch()
    gap = hardware.per_software("layer_s", loads) * operators.without_graph() + expert_gap
    forward_gpu = operators.beside_launches(forward_gpu, launch) + gap
    backward_gpu = operators.beside_launches(backward_gpu + again, launch * (2 + layers_again))
    backward_gpu = backward_gpu + gap * (2 + layers_again) + expert_gap * experts_again

    tensor = tensor_communication(collectives)
    expert = expert_communication(collectives)
    context = exposed_context(collectives)
    hidden_share = hardware.per_software("tensor_exposed", loads)
    per_pass = tensor * hidden_share + context
    per_pass = per_pass + expert * hardware.constant("expert_exposed")
    exposed_forward = per_pass
    exposed_backward = per_pass * (1 + layers_again)
    exposed_backward += experts_again * expert * hardware.constant("expert_exposed")
    return PassTime(
        forward=forward_gpu + exposed_forward,
        backward=backward_gpu + exposed_backward,
        exposed=exposed_forward + exposed_backward,
    )


def expert_products(loads: Workloads) -> list[Product]:
    """Return (m, n, k) of both products of one routed expert with the tokens that reach it."""
    local = loads.local_experts
    rows = loads.microbatch_tokens * np.maximum(loads.moe_router_topk, 1.0) / local
    split = loads.expert_tensor_size
    # Unless experts are split, a tensor-parallel rank sends its tokens to whole experts.
    rows = np.maximum(rows * split / loads.tensor_size, 1.0)
    width = np.maximum(loads.moe_ffn_hidden_size, 1.0) / split
    return [
        (rows, width * (1 + loads.gated_linear_unit), loads.expert_hidden_size),
        (rows, loads.expert_hidden_size, width),
    ]


def mamba_products(loads: Workloads) -> list[Product]:
    """Return (m, n, k) of the projections before and after a Mamba-2 mixer, on one rank."""
    tokens, hidden, tp = loads.microbatch_tokens, loads.hidden_size, loads.tensor_size
    return [(tokens, loads.mamba_inputs / tp, hidden), (tokens, hidden, loads.mamba_width / tp)]


def _linear(
    operators: OperatorCosts,
    shapes: Sequence[Product],
    share: FloatArray,
    count: FloatArray | float = 1.0,
) -> FloatArray:
    """Return the seconds of products, forward and backward, [2, rows], in a share of the layers."""
    is_there = share > 0
    # Where no layer has them, their sizes may be 0.
    safe = [[np.where(is_there, size, 1.0) for size in shape] for shape in shapes]
    forward = sum(operators.linear_forward(m, n, k, count) for m, n, k in safe)
    backward = sum(operators.linear_backward(m, n, k, count) for m, n, k in safe)
    return share * np.stack([forward, backward])


def _experts(operators: OperatorCosts) -> FloatArray:
    """Return the seconds of the routed experts of a rank, as `_linear`.

    The products of local experts run side by side, in one kernel or in several streams.
    """
    loads = operators.workloads
    found = _linear(operators, expert_products(loads), loads.expert_layers, loads.local_experts)
    return found / operators.hardware.constant("grouped_gemm")


def tensor_communication(collectives: CollectiveCosts) -> FloatArray:
    """Return the two all-reduces of a pass of a layer; with sequence parallelism the same bytes."""
    loads = collectives.workloads
    whole = 2 * loads.microbatch_tokens * loads.hidden_size
    one = np.ones_like(whole)
    parts = loads.attention_layers + loads.mamba_layers + loads.dense_layers + loads.expert_layers
    return parts * collectives.all_reduce(whole, loads.tensor_size, one)


def expert_communication(collectives: CollectiveCosts) -> FloatArray:
    """Return the two all-to-alls of a pass of a layer: tokens to their experts and back."""
    loads = collectives.workloads
    bytes_of_copy = 2 * loads.microbatch_tokens / loads.tensor_size * loads.expert_hidden_size
    exchange = collectives.expert_exchange(bytes_of_copy, loads.moe_router_topk)
    return 2 * loads.expert_layers * exchange


def exposed_context(collectives: CollectiveCosts) -> FloatArray:
    """Return the exposed exchange of a pass of a layer between ranks that share a sequence.

    Keys and values travel round the ring beside attention. An exchange of heads sends queries,
    keys, values and the context before and after attention; each rank gets whole key heads.
    """
    loads = collectives.workloads
    whole = 2 * 2 * loads.microbatch_tokens * loads.context_size * loads.kv_width
    whole = whole / loads.tensor_size
    gathered = collectives.all_gather(whole, loads.context_size, loads.tensor_size)
    ring = 1.5 * gathered * collectives.hardware.constant("context_exposed")
    copies = np.maximum(loads.context_size * loads.tensor_size / loads.num_query_groups, 1.0)
    width = 2 * (loads.query_width + loads.kv_width * copies) / loads.tensor_size
    sent = 2 * loads.microbatch_tokens * width
    heads = collectives.all_gather(sent, loads.context_size, loads.tensor_size)
    return loads.attention_layers * np.where(loads.exchanges_heads > 0, heads, ring)


def output_layer_time(operators: OperatorCosts) -> PassTime:
    """Return the time of logits and loss of one micro batch: 16 bits, never recomputed."""
    loads = operators.workloads
    tokens, width = loads.microbatch_tokens, loads.vocab_size / loads.tensor_size
    hidden = loads.hidden_size
    # Logits in 16 bits, their fp32 copy, exponentials and the gradient, each read and written. The
    # loss of this project reads the logits in each pass and writes the gradient in their place.
    per_logit = np.where(loads.is_lattice, 3.0, 12.0)
    traffic = operators.memory(per_logit * tokens * width)
    forward = operators.gemm(tokens, width, hidden, sixteen_bit=True) + traffic
    backward = operators.gemm(tokens, hidden, width, sixteen_bit=True)
    backward = backward + operators.gemm(hidden, width, tokens, sixteen_bit=True) + traffic
    return PassTime(forward=forward, backward=backward, exposed=np.zeros_like(forward))
