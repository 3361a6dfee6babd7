"""Estimate of the memory of one rank, before anything is started.

States per parameter as in "ZeRO", section 3 (arXiv 1910.02054) with fp32 main gradients;
activations of one layer and micro batch as in "Reducing Activation Recomputation in Large
Transformer Models", section 4 (arXiv 2205.05198), without the score matrix where a flash kernel
is used; activations in flight from the simulated schedule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.training.metrics.model_size import ModelSize


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it, without the allocator's and the libraries' own use."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    def describe(self) -> str:
        """Return one line."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
        }
        detail = ", ".join(f"{name} {gibibytes(value)}" for name, value in parts.items())
        return f"{gibibytes(self.total)} ({detail})"


def gibibytes(num_bytes: float) -> str:
    """Format bytes as GiB, or MiB below a tenth of one."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{num_bytes / 2**20:.1f} MiB"


def layer_activation_bytes(settings: Mapping[str, Any], size: ModelSize) -> float:
    """Return what one layer keeps of one micro batch for its backward."""
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
    scores = 0.0
    if settings["attention_dropout"] > 0 and settings["recompute_granularity"] is None:
        # Dropout on the weights keeps the probabilities and their mask.
        scores = 2 * item * size.num_attention_heads * size.seq_length / (h * tp)
    return s * b * h * (outside + attention + mlp + scores)


def optimizer_bytes_per_parameter(settings: Mapping[str, Any]) -> float:
    """Return the bytes of moments and main weights on the device, before sharding."""
    item = {"fp32": 4.0, "bf16": 2.0, "fp16": 2 + 4 / 128, "fp8": 1 + 4 / 128}
    first, second = item[settings["exp_avg_dtype"]], item[settings["exp_avg_sq_dtype"]]
    main = 0.0
    if settings["bf16"] or settings["fp16"]:
        main = item[settings["main_params_dtype"]]
        if settings["use_precision_aware_optimizer"] and settings["bf16"] and main == 4.0:
            main = 2.0  # what the weights lack of fp32
    # The parameters of Muon that another rule updates are few.
    total = main + first + (second if settings["optimizer"] == "adam" else 0.0)
    if settings["optimizer_cpu_offload"] or settings["optimizer_offload_path"]:
        total *= 1.0 - settings["optimizer_offload_fraction"]
    return total


def estimate_memory(
    settings: Mapping[str, Any],
    size: ModelSize,
    *,
    chunks: list[tuple[int, bool, bool]],
    chunks_in_flight: int,
) -> MemoryEstimate:
    """Return the bytes of one rank.

    Args:
        chunks: (number of layers, has embedding, has loss) of each model chunk of the rank.
        chunks_in_flight: most (micro batch, chunk) pairs that wait for their backward at a time.
    """
    tp, dp = settings["tensor_model_parallel_size"], settings["data_parallel_size"]
    held = sum(size.stage_parameters(n, has_embedding=e, has_loss=last) for n, e, last in chunks)
    held /= tp
    is_half = settings["bf16"] or settings["fp16"]
    item = 2 if is_half else 4
    weight_bytes: float = item
    gradient_bytes: float = 4 if not is_half or settings["grad_reduce_in_fp32"] else 2
    moments = 8 if settings["optimizer"] == "adam" else 4  # those of Muon's other rule are few
    optimizer_bytes: float = moments + (4 if is_half else 0)
    num_shards = dp * settings["context_parallel_size"]
    num_shards /= settings["num_distributed_optimizer_instances"]
    rung = SHARDING_STRATEGIES.index(settings["data_parallel_sharding_strategy"])
    rung = 3 if settings["use_torch_fsdp2"] else rung
    if rung >= 1:
        optimizer_bytes /= num_shards
    if rung >= 2:
        gradient_bytes /= num_shards
    if rung >= 3:
        weight_bytes /= num_shards
    layers_per_chunk = sum(n for n, _, _ in chunks) / len(chunks)
    per_chunk = layers_per_chunk * layer_activation_bytes(settings, size)
    logits = 0.0
    if any(last for _, _, last in chunks):
        tokens = size.seq_length * settings["micro_batch_size"]
        tokens /= settings["context_parallel_size"]
        if not settings["cross_entropy_loss_fusion"]:
            logits = tokens * size.vocab_size / tp * (item + 4)
    return MemoryEstimate(
        weights=held * weight_bytes,
        gradients=held * gradient_bytes,
        optimizer=held * optimizer_bytes,
        activations=per_chunk * chunks_in_flight,
        logits=logits,
    )
