"""Seconds of one transformer layer, and of the output layer, for one micro batch on one rank."""

from __future__ import annotations

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


def active_scale(loads: Workloads) -> FloatArray:
    """Return the published active parameters over the active parameters of the columns.

    Shared experts, latent attention and a few dense layers have no columns; their products are
    assumed to run at the speed of the other products. 1 for dense models.
    """
    layer = 2 * loads.hidden_size * (loads.query_width + loads.kv_width)
    layer = layer + 3 * loads.expert_hidden_size * loads.moe_ffn_hidden_size * loads.moe_router_topk
    embeddings = 2 * loads.hidden_size * loads.vocab_size
    known = loads.num_layers * layer
    published = loads.active_params - embeddings
    scale = np.where(known > 0, published / np.maximum(known, 1.0), 1.0)
    return np.where(loads.is_moe & (loads.active_params > 0), np.clip(scale, 0.8, 1.6), 1.0)


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
    scale = active_scale(loads)
    of_attention, of_feed_forward = attention_products(loads), dense_products(loads)
    forward_gemm = sum(operators.linear_forward(*shape) for shape in of_attention)
    backward_gemm = sum(operators.linear_backward(*shape) for shape in of_attention)
    dense_forward = sum(operators.linear_forward(*shape) for shape in of_feed_forward)
    dense_backward = sum(operators.linear_backward(*shape) for shape in of_feed_forward)
    expert_forward, expert_backward = _experts(operators)
    feed_forward = scale * np.where(loads.is_moe, expert_forward, dense_forward)
    forward_gemm = scale * forward_gemm + feed_forward
    backward_gemm = scale * (
        backward_gemm + np.where(loads.is_moe, expert_backward, dense_backward)
    )
    attention = operators.attention_forward()
    elementwise = operators.elementwise_forward()
    forward_gpu = forward_gemm + attention + elementwise
    backward_gpu = backward_gemm + operators.attention_backward() + 1.6 * elementwise

    again = np.select(
        [loads.recompute == kind for kind in RECOMPUTE_KINDS[1:]],
        [
            attention,
            operators.norms_forward(),
            feed_forward,
            0.5 * forward_gemm + elementwise,
            elementwise,
            forward_gpu,
        ],
        0.0,
    )
    again = again * loads.recompute_share
    layers_again = np.where(loads.recompute == "full", loads.recompute_share, 0.0)
    # Each micro batch adds its gradient of the weights to the sum.
    # In fp32 a bf16 gradient is read, cast and added; the fused kernel adds in one pass.
    is_cast = (loads.precision == "bf16") & (loads.flash_attention == 0)
    accumulation = operators.memory(np.where(is_cast, 16.0, 6.0) * parameters_of_layer(loads))
    backward_gpu = backward_gpu + accumulation * hardware.constant("accumulation_traffic")
    launch = operators.launch()
    gap = hardware.per_software("layer_s", loads)
    forward_gpu = operators.beside_launches(forward_gpu, launch) + gap
    backward_gpu = operators.beside_launches(backward_gpu + again, launch * (2 + layers_again))
    backward_gpu = backward_gpu + gap * (2 + layers_again)

    tensor = tensor_communication(collectives)
    expert = expert_communication(collectives)
    context = context_communication(collectives)
    hidden_share = hardware.per_software("tensor_exposed", loads)
    per_pass = tensor * hidden_share + context * hardware.constant("context_exposed")
    per_pass = per_pass + expert * hardware.constant("expert_exposed")
    exposed_forward = per_pass
    exposed_backward = per_pass * (1 + layers_again)
    # Experts that are recomputed alone receive their tokens once more.
    routed_again = np.where(loads.recompute == "mlp", loads.recompute_share, 0.0)
    exposed_backward += routed_again * expert * hardware.constant("expert_exposed")
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


def _experts(operators: OperatorCosts) -> tuple[FloatArray, FloatArray]:
    """Return the seconds of the routed experts of a rank, with one product per expert."""
    shapes = expert_products(operators.workloads)
    slower = operators.workloads.local_experts / operators.hardware.constant("grouped_gemm")
    forward = sum(operators.linear_forward(*shape) for shape in shapes)
    backward = sum(operators.linear_backward(*shape) for shape in shapes)
    return forward * slower, backward * slower


def tensor_communication(collectives: CollectiveCosts) -> FloatArray:
    """Return the two all-reduces of a pass of a layer; with sequence parallelism the same bytes."""
    loads = collectives.workloads
    whole = 2 * loads.microbatch_tokens * loads.hidden_size
    one = np.ones_like(whole)
    return 2 * collectives.all_reduce(whole, loads.tensor_size, one)


def expert_communication(collectives: CollectiveCosts) -> FloatArray:
    """Return the two all-to-alls of a pass of a layer: tokens to their experts and back."""
    loads = collectives.workloads
    bytes_of_copy = 2 * loads.microbatch_tokens / loads.tensor_size * loads.expert_hidden_size
    return 2 * collectives.expert_exchange(bytes_of_copy, loads.moe_router_topk)


def context_communication(collectives: CollectiveCosts) -> FloatArray:
    """Return the exchange of keys and values of a pass of a layer around the ring."""
    loads = collectives.workloads
    whole = 2 * 2 * loads.microbatch_tokens * loads.context_size * loads.kv_width
    whole = whole / loads.tensor_size
    return 1.5 * collectives.all_gather(whole, loads.context_size, loads.tensor_size)


def output_layer_time(operators: OperatorCosts) -> PassTime:
    """Return the time of logits and loss of one micro batch: 16 bits, never recomputed."""
    loads = operators.workloads
    tokens, width = loads.microbatch_tokens, loads.vocab_size / loads.tensor_size
    hidden = loads.hidden_size
    # Logits in 16 bits, their fp32 copy, exponentials and the gradient, each read and written.
    traffic = operators.memory(12 * tokens * width)
    forward = operators.gemm(tokens, width, hidden, sixteen_bit=True) + traffic
    backward = operators.gemm(tokens, hidden, width, sixteen_bit=True)
    backward = backward + operators.gemm(hidden, width, tokens, sixteen_bit=True) + traffic
    return PassTime(forward=forward, backward=backward, exposed=np.zeros_like(forward))
