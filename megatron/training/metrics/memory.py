"""Estimate of the memory of one rank, before anything is started.

States per parameter as in "ZeRO", section 3 (arXiv 1910.02054) with fp32 main gradients;
activations of one layer and micro batch as in "Reducing Activation Recomputation in Large
Transformer Models", section 4 (arXiv 2205.05198), without the score matrix where a flash kernel
is used; activations in flight from the simulated schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.distributed.grad_reducer import MAX_IN_FLIGHT
from megatron.training.metrics.model_size import ModelSize


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank."""

    weights: float
    gradients: float
    main_weights: float
    """fp32 copies of half-precision weights, or what stands for them."""
    optimizer: float
    """Moments."""
    activations: float
    logits: float
    buffers: float
    """Parameters and gradients that are whole for a time because their shards are kept."""

    @property
    def parts(self) -> dict[str, float]:
        """Return the bytes of each part by its name."""
        return {field.name.replace("_", " "): getattr(self, field.name) for field in fields(self)}

    @property
    def states(self) -> float:
        """What is held between steps."""
        return self.weights + self.gradients + self.main_weights + self.optimizer

    @property
    def total(self) -> float:
        """All of it, without the allocator's and the libraries' own use."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """Return one line."""
        detail = ", ".join(f"{name} {gibibytes(value)}" for name, value in self.parts.items())
        return f"{gibibytes(self.total)} ({detail})"


@dataclass(frozen=True)
class ChunkSize:
    """What one model chunk holds."""

    num_layers: int
    has_embedding: bool
    has_loss: bool
    num_expert_layers: int = 0

    def parameters(self, size: ModelSize) -> tuple[int, int]:
        """Return how many parameters it has beside routed experts, and in these."""
        ends = {"has_embedding": self.has_embedding, "has_loss": self.has_loss}
        count = size.stage_parameters(self.num_layers, self.num_expert_layers, **ends)
        routed = size.stage_routed_parameters(self.num_expert_layers, has_loss=self.has_loss)
        return count - routed, routed


def gibibytes(num_bytes: float) -> str:
    """Format bytes as GiB, or MiB below a tenth of one."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{num_bytes / 2**20:.1f} MiB"


def layer_activation_bytes(
    settings: Mapping[str, Any], size: ModelSize, *, has_experts: bool = False
) -> float:
    """Return what one layer keeps of one micro batch for its backward, with an even load."""
    cp = settings["context_parallel_size"]
    s, b, h = size.seq_length / cp, settings["micro_batch_size"], size.hidden_size
    tp = settings["tensor_model_parallel_size"]
    item = 4 if not (settings["bf16"] or settings["fp16"]) else 2
    shard = tp if settings["sequence_parallel"] else 1
    if settings["recompute_granularity"] == "full":
        return s * b * h * item / shard
    kept_masks = 2 * (settings["hidden_dropout"] > 0)
    # Inputs of both norms and of both blocks, outside the tensor-parallel regions.
    outside = (4 * item + kept_masks * item) / shard
    attention = (size.qkv_width + size.attention_width) / h * item / tp
    mlp = (3 if size.is_gated else 2) * size.ffn_hidden_size / h * item / tp
    if has_experts and size.experts is not None:
        sizes, kept = size.experts, 3 if size.is_gated else 2
        # Each visit keeps its token beside the activations of the expert.
        visits = sizes.topk * (h + kept * sizes.width) / h * item / tp
        mlp = visits + kept * sizes.shared_width / h * item / tp
        if settings["moe_layer_recompute"]:
            mlp = 0.0
    scores = 0.0
    if settings["attention_dropout"] > 0 and settings["recompute_granularity"] is None:
        # Dropout on the weights keeps the probabilities and their mask.
        scores = 2 * item * size.num_attention_heads * size.seq_length / (h * tp)
    return s * b * h * (outside + attention + mlp + scores)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on the device, before sharding divides them."""

    weight: float
    gradient: float
    main: float
    moments: float


def state_bytes(settings: Mapping[str, Any]) -> StateBytes:
    """Return what a parameter costs between steps."""
    item = {"fp32": 4.0, "bf16": 2.0, "fp16": 2 + 4 / 128, "fp8": 1 + 4 / 128}
    is_half = settings["bf16"] or settings["fp16"]
    first, second = item[settings["exp_avg_dtype"]], item[settings["exp_avg_sq_dtype"]]
    main = item[settings["main_params_dtype"]] if is_half else 0.0
    if settings["use_precision_aware_optimizer"] and settings["bf16"] and main == 4.0:
        main = 2.0  # what the weights lack of fp32
    # The parameters of Muon that another rule updates are few.
    moments = first + (second if settings["optimizer"] == "adam" else 0.0)
    kept = 1.0
    if settings["optimizer_cpu_offload"] or settings["optimizer_offload_path"]:
        kept -= settings["optimizer_offload_fraction"]
    gradient = 4.0 if not is_half or settings["grad_reduce_in_fp32"] else 2.0
    return StateBytes(2.0 if is_half else 4.0, gradient, main * kept, moments * kept)


def optimizer_bytes_per_parameter(settings: Mapping[str, Any]) -> float:
    """Return the bytes of moments and main weights on the device, before sharding."""
    found = state_bytes({"grad_reduce_in_fp32": True, **settings})
    return found.main + found.moments


def num_shards(settings: Mapping[str, Any]) -> int:
    """Return the ranks that share a sharded state."""
    replicas = settings["data_parallel_size"] * settings["context_parallel_size"]
    return int(replicas // settings["num_distributed_optimizer_instances"])


def expert_ranks(settings: Mapping[str, Any]) -> int:
    """Return the ranks of a stage that hold all routed experts once."""
    return settings["expert_tensor_parallel_size"] * settings["expert_model_parallel_size"]


def zero_stage_of(settings: Mapping[str, Any]) -> int:
    """Return the ZeRO stage: 0 to 3."""
    if settings["use_torch_fsdp2"]:
        return 3
    return SHARDING_STRATEGIES.index(settings["data_parallel_sharding_strategy"])


def buffer_bytes(
    settings: Mapping[str, Any], size: ModelSize, chunks: Sequence[ChunkSize]
) -> float:
    """Return the most that is whole at a time although only shards are kept.

    Stage 2: the buckets of gradients that are filled or reduced. Stage 3: two units of parameters,
    the next one on its way, and the gradients of one that is filled and one that is reduced. A unit
    is a layer, or a table of the vocabulary.
    """
    zero_stage, shards = zero_stage_of(settings), num_shards(settings)
    if zero_stage < 2 or shards == 1:
        return 0.0
    per, tp = state_bytes(settings), settings["tensor_model_parallel_size"]
    if zero_stage == 2:
        bucket = settings["ddp_bucket_size"] or max(40_000_000, 1_000_000 * shards)
        return min(sum(_held(settings, size, chunks)), (MAX_IN_FLIGHT + 1) * bucket) * per.gradient
    with_experts = sum(chunk.num_expert_layers for chunk in chunks)
    dense_layers = sum(chunk.num_layers for chunk in chunks) - with_experts
    units = [size.layer_parameters / tp] * dense_layers
    if with_experts:
        routed = size.routed_parameters / expert_ranks(settings)
        units += [size.expert_layer_parameters / tp + routed] * with_experts
    table = size.vocab_size * size.hidden_size / tp
    units += [table for chunk in chunks if chunk.has_embedding]
    units += [table for chunk in chunks if chunk.has_loss and not size.is_tied]
    largest = sorted(units)[-2:]
    return sum(largest) * (per.weight + per.gradient)


def _held(
    settings: Mapping[str, Any], size: ModelSize, chunks: Sequence[ChunkSize]
) -> tuple[float, float]:
    """Return how many parameters one rank holds beside routed experts, and in these."""
    counts = [chunk.parameters(size) for chunk in chunks]
    dense = sum(count for count, _ in counts) / settings["tensor_model_parallel_size"]
    return dense, sum(count for _, count in counts) / expert_ranks(settings)


def estimate_memory(
    settings: Mapping[str, Any],
    size: ModelSize,
    *,
    chunks: Sequence[ChunkSize],
    chunks_in_flight: int,
) -> MemoryEstimate:
    """Return the bytes of one rank.

    Args:
        chunks: what each model chunk of the rank holds.
        chunks_in_flight: most (micro batch, chunk) pairs that wait for their backward at a time.
    """
    tp, per = settings["tensor_model_parallel_size"], state_bytes(settings)
    dense, routed = _held(settings, size, chunks)
    shards, zero_stage = num_shards(settings), zero_stage_of(settings)
    # The expert grid arranges the same ranks of a stage another way.
    sharded = dense / shards + routed / max(shards * tp / expert_ranks(settings), 1.0)
    # Each ZeRO stage shards one thing more: moments and main weights, gradients, weights.
    optimizer, gradients, weights = (
        sharded if zero_stage >= first else dense + routed for first in (1, 2, 3)
    )
    layers = sum(
        (chunk.num_layers - chunk.num_expert_layers) * layer_activation_bytes(settings, size)
        + chunk.num_expert_layers * layer_activation_bytes(settings, size, has_experts=True)
        for chunk in chunks
    )
    per_chunk = layers / len(chunks)
    logits = 0.0
    if any(chunk.has_loss for chunk in chunks):
        tokens = size.seq_length * settings["micro_batch_size"]
        tokens /= settings["context_parallel_size"]
        if not settings["cross_entropy_loss_fusion"]:
            logits = tokens * size.vocab_size / tp * (per.weight + 4)
    return MemoryEstimate(
        weights=0.0
        if zero_stage == 3 and settings.get("param_offload_path")
        else weights * per.weight,
        gradients=gradients * per.gradient,
        main_weights=optimizer * per.main,
        optimizer=optimizer * per.moments,
        activations=per_chunk * chunks_in_flight,
        logits=logits,
        buffers=buffer_bytes(settings, size, chunks),
    )
