"""Seconds of the operators of a step on one GPU: products, attention, memory traffic, launches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron.core.kernels.blockwise_attention import MAX_TILE_ELEMENTS, MIN_TILE_KEYS
from megatron_lattice.planner.hardware import Hardware, RowHardware
from megatron_lattice.planner.workload import FloatArray, Workloads

_TILES = ((128, 256), (256, 128), (128, 128))
"""Output tiles of one thread block that libraries choose from (rows, columns)."""
_TILE_CALLS = (23, 20)
"""Calls of PyTorch for one tile of the blockwise kernel, in forward and in backward."""
_TILE_ROWS = 16
"""Least number of query positions of a tile."""
_CHUNK = 256
"""Tokens of a chunk of a Mamba-2 layer."""


def wave_efficiency(
    m: FloatArray, n: FloatArray, num_multiprocessors: FloatArray, count: FloatArray | float = 1.0
) -> FloatArray:
    """Return the share of the multiprocessors that the tiles of `count` [m, n] results keep busy.

    Tile and wave quantisation: results are cut into whole tiles and tiles run in whole waves.
    """
    best = np.zeros_like(m * n)
    for rows, columns in _TILES:
        tiles = count * np.ceil(m / rows) * np.ceil(n / columns)
        waves = np.ceil(tiles / num_multiprocessors)
        covered = count * (m / rows) * (n / columns)
        best = np.maximum(best, covered / (waves * num_multiprocessors))
    return best


@dataclass(frozen=True)
class OperatorCosts:
    """Costs on the GPUs of a table, with the constants looked up once."""

    workloads: Workloads
    rows: RowHardware
    hardware: Hardware

    def gemm(
        self,
        m: FloatArray,
        n: FloatArray,
        k: FloatArray,
        count: FloatArray | float = 1.0,
        *,
        sixteen_bit: bool = False,
    ) -> FloatArray:
        """Return the time of `count` [m, k] x [k, n] products side by side.

        The arithmetic at the sustained rate, plus the operands and the result once through memory:
        a sum, because the loads of a product's last tiles overlap with no other tile's arithmetic.
        """
        rows, hardware = self.rows, self.hardware
        if sixteen_bit:
            efficiency = rows.gemm_16_bit_efficiency
            peak, power = rows.peak_16_bit_flops, rows.power
        else:
            efficiency, peak, power = rows.gemm_efficiency, rows.peak_flops, rows.gemm_power
        operand_bytes = 2.0 * rows.peak_16_bit_flops / peak
        quantised = wave_efficiency(m, n, rows.num_multiprocessors, count)
        quantised = quantised ** hardware.constant("wave_exponent")
        arithmetic = count * 2 * m * n * k / (peak * efficiency * power * quantised)
        moved = count * (operand_bytes * (m * k + k * n) + 2 * m * n)
        return arithmetic + self.memory(moved * hardware.constant("gemm_traffic"))

    def linear_forward(
        self, m: FloatArray, n: FloatArray, k: FloatArray, count: FloatArray | float = 1.0
    ) -> FloatArray:
        """Return the time of a linear layer's product, with the casts that its precision needs."""
        return self.gemm(m, n, k, count) + self.cast(count * m * k)

    def linear_backward(
        self, m: FloatArray, n: FloatArray, k: FloatArray, count: FloatArray | float = 1.0
    ) -> FloatArray:
        """Return the time of its two gradients, [m, k] of the input and [k, n] of the weight.

        Frozen weights have no gradient.
        """
        is_frozen = self.workloads.trained_share < 1
        of_weight = np.where(is_frozen, 0.0, self.gemm(k, n, m, count))
        return self.gemm(m, k, n, count) + of_weight + self.cast(count * m * n)

    def cast(self, elements: FloatArray) -> FloatArray:
        """Return the time of quantising a tensor: read 16 bits, write it and its transpose."""
        is_quantised = self.rows.peak_flops > self.rows.peak_16_bit_flops
        bytes_moved = np.where(is_quantised, 4.0 * elements, 0.0)
        return self.memory(bytes_moved * self.hardware.constant("cast_traffic"))

    def memory(self, bytes_moved: FloatArray) -> FloatArray:
        """Return the time of moving bytes through the GPU's memory."""
        rate = self.rows.memory_bytes_per_s * self.hardware.constant("memory_efficiency")
        return bytes_moved / rate

    def attention_forward(self) -> FloatArray:
        """Return the time of softmax(QK)V of one layer and micro batch."""
        return self._attention(products=1.0, passes=1.0, calls=_TILE_CALLS[0])

    def attention_backward(self) -> FloatArray:
        """Return the time of its backward; a flash kernel computes the scores again."""
        flash = self.workloads.flash_attention > 0
        products = np.where(flash, 2.5, 2.0)
        return self._attention(products=products, passes=1.5, calls=_TILE_CALLS[1])

    def _attention(self, products: FloatArray | float, passes: float, calls: int) -> FloatArray:
        """Return the time of `products` times the two products; only causal kernels skip half."""
        loads, hardware, rows = self.workloads, self.hardware, self.rows
        width = loads.query_width / loads.tensor_size * loads.attention_layers
        score_flops = 4 * loads.microbatch_tokens * loads.seq_length * width
        score_flops = score_flops * loads.attended_share
        # PyTorch's context parallelism cuts the sequence into consecutive shards: the last rank's
        # queries attend to 2 - 1/cp times the mean number of keys. Others pair early with late
        # shards.
        is_uneven = loads.software == "fsdp"
        uneven = np.where(is_uneven, 2 - 1 / loads.context_size, 1.0)
        # Short heads have as many exponentials for fewer products.
        short = np.minimum(loads.kv_channels / 128, 1.0) ** hardware.constant("head_exponent")
        sinks = np.where(loads.has_sinks > 0, hardware.constant("sink_attention"), 1.0)
        flash = uneven * score_flops / 2 / (rows.attention_rate * short * sinks)
        heads = loads.num_attention_heads / loads.tensor_size
        scores = heads * loads.seq_length * loads.microbatch_tokens * loads.attention_layers
        score_bytes = 10.0 * scores * hardware.constant("unfused.score_traffic")
        is_aligned = loads.kv_channels % 8 == 0
        misaligned = np.where(is_aligned, 1.0, hardware.constant("unfused.misaligned_head"))
        peak = rows.peak_16_bit_flops * hardware.constant("unfused.attention")
        unfused = misaligned * score_flops * products / peak + passes * self.memory(score_bytes)
        # The blockwise kernel of this project, which attends to keys that arrive in a ring, is
        # PyTorch's: each call of a tile is shorter on the GPU than its launch.
        in_ring = loads.is_lattice & (loads.context_size > 1) & (loads.exchanges_heads == 0)
        least = heads * loads.micro_batch_size * _TILE_ROWS * MIN_TILE_KEYS
        tiles = loads.attended_share * scores / 2 / np.maximum(least, MAX_TILE_ELEMENTS)
        tiled = tiles * calls * hardware.constant("call_s")
        fused = np.where(in_ring, np.maximum(tiled, flash * products), flash * products)
        return np.where(loads.flash_attention > 0, fused, unfused)

    def scan_forward(self) -> FloatArray:
        """Return the time of the state-space part of Mamba-2 layers, in chunks of tokens.

        "Transformers are SSMs", section 6, arXiv 2405.21060: products within a chunk as of
        attention, and the chunk's state, read and written.
        """
        loads = self.workloads
        per_token = (
            2 * loads.mamba_width / loads.tensor_size * (_CHUNK + 2 * loads.mamba_state_size)
        )
        flops = loads.mamba_layers * loads.microbatch_tokens * per_token
        return flops / self.rows.attention_rate

    def elementwise_forward(self) -> FloatArray:
        """Return the time of norms, residuals, dropout, activation and casts of one layer.

        Without sequence parallelism the residual stream is whole on every tensor-parallel rank.
        """
        loads = self.workloads
        residual_split = np.where(loads.sequence_parallel > 0, loads.tensor_size, 1.0)
        per_token = 20 * loads.hidden_size / residual_split
        mixed = loads.attention_layers * (loads.query_width + loads.kv_width)
        mixed = mixed + loads.mamba_layers * 2 * (loads.mamba_inputs + loads.mamba_width)
        per_token = per_token + 4 * mixed / loads.tensor_size
        # Each step of a ring adds its context, in 16 bits, to a sum in fp32; three quarters of the
        # rows of a step see its keys.
        steps = np.where(loads.exchanges_heads > 0, 0.0, loads.context_size - 1)
        merged = loads.attention_layers * loads.query_width * 0.75 * steps
        per_token = per_token + 10 * merged / loads.tensor_size
        return self._traffic(per_token) + self.activation_forward() + self.routing_forward()

    def activation_forward(self) -> FloatArray:
        """Return the time of the activation function between the products of a feed-forward."""
        loads = self.workloads
        width = loads.expert_layers * loads.moe_ffn_hidden_size * loads.moe_router_topk
        width = (width + loads.dense_layers * loads.ffn_hidden_size) / loads.tensor_size
        return self._traffic((4 + 2 * loads.gated_linear_unit) * width)

    def routing_forward(self) -> FloatArray:
        """Return the time of sorting tokens by expert and of restoring their order.

        Ranks that split an expert sort all tokens; ranks that split tokens sort their own.
        """
        loads = self.workloads
        copies = loads.moe_router_topk * loads.expert_tensor_size / loads.tensor_size
        routed = 12 * copies * loads.expert_hidden_size * loads.expert_layers
        return self._traffic(routed * self.hardware.constant("routing_traffic"))

    def norms_forward(self) -> FloatArray:
        """Return the time of both norms of a layer alone: 16 bits read and written."""
        loads = self.workloads
        split = np.where(loads.sequence_parallel > 0, loads.tensor_size, 1.0)
        return self._traffic(8 * loads.hidden_size / split)

    def _traffic(self, bytes_per_token: FloatArray) -> FloatArray:
        """Return the time of operators that only move bytes through memory."""
        scale = self.hardware.per_software("elementwise_traffic", self.workloads)
        return self.memory(bytes_per_token * self.workloads.microbatch_tokens * scale)

    def launch(self) -> FloatArray:
        """Return the host's time to launch the forward of one layer."""
        loads = self.workloads
        outside = np.where(loads.graphs == "layer", 0.0, 1.0)
        kernels = outside * (25 + np.where(loads.tensor_size > 1, 5.0, 0.0))
        kernels = kernels + loads.expert_layers * (20 + 20 * outside)
        return kernels * self.hardware.per_software("launch_s", loads) * self.without_graph()

    def expert_launch(self) -> FloatArray:
        """Return the time that the GPU waits for the launches of a layer's local experts.

        The host reads how many tokens reach each expert before it launches their products, so
        these launches run beside no work of the GPU.
        """
        loads, constant = self.workloads, self.hardware.constant
        separate = np.where(loads.grouped_products > 0, 1.0, loads.local_experts)
        waiting = constant("expert_sync_s") + separate * constant("expert_launch_s")
        return loads.expert_layers * waiting * self.without_graph()

    def without_graph(self) -> FloatArray:
        """Return the share of the host's work that a graph of the whole step leaves: 0 or 1."""
        return np.where(self.workloads.graphs == "iteration", 0.0, 1.0)

    def beside_launches(self, on_gpu: FloatArray, launches: FloatArray) -> FloatArray:
        """Return the time of GPU work that the host launches at the same time.

        A power mean approximates the maximum: either can be the longer where they are about equal.
        """
        larger = np.maximum(on_gpu, launches)
        smaller = np.minimum(on_gpu, launches)
        return larger * (1 + (smaller / larger) ** 4) ** 0.25
