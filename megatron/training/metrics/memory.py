"""Estimate of the memory of one rank, before anything is started.

States per parameter as in "ZeRO", section 3 (arXiv 1910.02054) with fp32 main gradients;
activations of one layer and micro batch as in "Reducing Activation Recomputation in Large
Transformer Models", section 4 (arXiv 2205.05198), without the score matrix where a flash kernel
is used; activations in flight from the simulated schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.distributed.zero.stage2 import Zero2Buffer
from megatron.core.foundation.device import device_type
from megatron.core.model_parallel_config import HalfPrecision
from megatron.core.optimizer.definitions import OPTIMIZERS
from megatron.core.optimizer.optimizer_config import OptimizerFlags
from megatron.core.transformer.config.layer_kinds import LayerKind
from megatron.training.config.resolved import ResolvedRun
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

    kinds: Sequence[LayerKind]
    """Of its layers."""
    has_embedding: bool
    has_loss: bool
    predicts: bool | None = None
    """Whether it ends with the final norm and predicts later tokens; None: if it has the loss."""

    def parameters(self, size: ModelSize) -> tuple[int, int]:
        """Return how many parameters it has beside routed experts, and in these."""
        predicts = self.has_loss if self.predicts is None else self.predicts
        ends = {
            "has_embedding": self.has_embedding,
            "has_loss": self.has_loss,
            "predicts": predicts,
        }
        count = size.stage_parameters(self.kinds, **ends)
        routed = size.stage_routed_parameters(self.kinds, predicts=predicts)
        return count - routed, routed


def gibibytes(num_bytes: float) -> str:
    """Format bytes as GiB, or MiB below a tenth of one."""
    gib = num_bytes / 2**30
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{num_bytes / 2**20:.1f} MiB"


def tokens_of_rank(run: ResolvedRun, size: ModelSize) -> float:
    """Return how many tokens of a sample, or of a row that is shared as needed, a rank holds."""
    parallel = run.parallelism
    if parallel.hybrid_context_parallel and parallel.max_seqlen_per_dp_cp_rank:
        return float(parallel.max_seqlen_per_dp_cp_rank)
    return size.seq_length / parallel.context_parallel_size


def layer_activation_bytes(run: ResolvedRun, size: ModelSize, kind: LayerKind) -> float:
    """Return what one layer keeps of one micro batch for its backward, with an even load."""
    s, b, h = tokens_of_rank(run, size), run.schedule.micro_batch_size, size.hidden_size
    tp = run.parallelism.tensor_model_parallel_size
    item = 4 if not (run.precision.bf16 or run.precision.fp16) else 2
    shard = tp if run.parallelism.sequence_parallel else 1
    if run.precision.recompute_granularity == "full":
        return s * b * h * item / shard
    kept_masks = 2 * (run.model.hidden_dropout > 0)
    # Inputs of norm and block of each part, outside the tensor-parallel regions.
    num_parts = bool(kind.mixer) + bool(kind.mlp)
    outside = num_parts * (2 * item + kept_masks / 2 * item) / shard
    attention = (size.qkv_width + size.attention_width) / h * item / tp
    # Of the gate its sigmoid is kept, in fp32; what it multiplies is in the gate's own place.
    attention += size.has_output_gate * size.attention_width / h * 4 / tp
    mlp = (3 if size.is_gated else 2) * size.ffn_hidden_size / h * item / tp
    if kind.has_experts and size.experts is not None:
        sizes, kept = size.experts, 3 if size.is_gated else 2
        # Each assignment keeps its token beside the activations of the expert; latents that come
        # back are kept for the projection up.
        routed = sizes.topk * ((sizes.latent or h) + kept * sizes.width) / h * item / tp
        routed += sizes.latent / h * item / tp
        mlp = routed + kept * sizes.shared_width / h * item / tp
        if run.experts.moe_layer_recompute:
            mlp = 0.0
    scores = 0.0
    if run.model.attention_dropout > 0 and run.precision.recompute_granularity is None:
        # Dropout on the weights keeps the probabilities and their mask.
        scores = 2 * item * size.num_attention_heads * size.seq_length / (h * tp)
    if kind.is_recurrent:
        recomputes = run.transformer_config.recomputes("core_attn")
        mixer = size.mixers[kind.mixer]
        attention = mixer.activation_bytes(item, recomputes_core=recomputes) / (h * tp)
    elif not kind.mixer:
        attention = 0.0
    elif kind.is_sparse and size.indexer is not None:
        # Every tensor-parallel rank holds what the indexer made of all its rows.
        attention += size.indexer.heads * (size.indexer.width + 1) / h * item
        scores = 0.0
    if not kind.attends:
        scores = 0.0
    return s * b * h * (outside + attention + bool(kind.mlp) * mlp + scores)


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter on the device, before sharding divides them."""

    weight: float
    gradient: float
    main: float
    moments: float


def state_bytes(
    optimizer: OptimizerFlags, precision: HalfPrecision, *, grads_in_fp32: bool
) -> StateBytes:
    """Return what a parameter costs between steps."""
    item = {torch.float32: 4.0, torch.bfloat16: 2.0, torch.float16: 2 + 4 / 128,
            torch.uint8: 1 + 4 / 128}  # fmt: skip
    is_half = precision.bf16 or precision.fp16
    first, second = item[optimizer.exp_avg_dtype], item[optimizer.exp_avg_sq_dtype]
    main = item[optimizer.main_params_dtype] if is_half else 0.0
    if optimizer.use_precision_aware_optimizer and precision.bf16 and main == 4.0:
        main = 2.0  # what the weights lack of fp32
    # The parameters of Muon that another rule updates are few.
    names = OPTIMIZERS[optimizer.optimizer].state_names
    moments = sum(second if name == "exp_avg_sq" else first for name in names)
    kept = 1.0
    if optimizer.optimizer_cpu_offload or optimizer.optimizer_offload_path:
        kept -= optimizer.optimizer_offload_fraction
    gradient = 4.0 if not is_half or grads_in_fp32 else 2.0
    return StateBytes(2.0 if is_half else 4.0, gradient, main * kept, moments * kept)


def _state_bytes(run: ResolvedRun) -> StateBytes:
    fp32 = run.ddp.grad_reduce_in_fp32
    return state_bytes(run.optimizer, run.precision, grads_in_fp32=fp32)


def num_shards(run: ResolvedRun) -> int:
    """Return the ranks that share a sharded state."""
    replicas = run.topology.data_parallel_size * run.parallelism.context_parallel_size
    return int(replicas // run.ddp.num_distributed_optimizer_instances)


def expert_ranks(run: ResolvedRun) -> int:
    """Return the ranks of a stage that hold all routed experts once."""
    return (
        run.parallelism.expert_tensor_parallel_size or 1
    ) * run.parallelism.expert_model_parallel_size


def zero_stage_of(run: ResolvedRun) -> int:
    """Return the ZeRO stage: 0 to 3."""
    if run.ddp.use_torch_fsdp2:
        return 3
    return SHARDING_STRATEGIES.index(run.ddp.data_parallel_sharding_strategy)


def _offloads_parameters(run: ResolvedRun) -> bool:
    """Whether the own shards of parameters take no memory of the device."""
    ddp = run.ddp
    if ddp.data_parallel_sharding_strategy != "optim_grads_params":
        return False
    is_on_host = ddp.param_cpu_offload and device_type() != "cpu"
    return is_on_host or ddp.param_offload_path is not None


def _offloads_gradients(run: ResolvedRun) -> bool:
    """Whether the sums of the own shards of gradients take no memory of the device."""
    optimizer = run.optimizer
    return (
        run.ddp.overlap_cpu_optimizer_d2h_h2d
        and optimizer.optimizer_cpu_offload
        and optimizer.optimizer_offload_fraction == 1.0
        and run.ddp.data_parallel_sharding_strategy in SHARDING_STRATEGIES[2:]
        and device_type() != "cpu"
    )


def buffer_bytes(run: ResolvedRun, size: ModelSize, chunks: Sequence[ChunkSize]) -> float:
    """Return the most that is whole at a time although only shards are kept.

    Stage 2: the buckets of gradients that are filled, reduced or copied to the host. Stage 3: two
    units of parameters, the next one on its way, and the gradients of one that is filled and one
    that is reduced. A unit is a layer, or a table of the vocabulary.
    """
    zero_stage, shards, on_host = zero_stage_of(run), num_shards(run), _offloads_gradients(run)
    if zero_stage < 2 or (shards == 1 and not on_host):
        return 0.0
    per, tp = _state_bytes(run), run.parallelism.tensor_model_parallel_size
    if zero_stage == 2:
        bucket = run.ddp.bucket_size or max(40_000_000, 1_000_000 * shards)
        num_buckets = Zero2Buffer.max_in_flight + 1 + on_host * Zero2Buffer.copies_in_flight
        return min(sum(_held(run, size, chunks)), num_buckets * bucket) * per.gradient
    routed = size.routed_parameters / expert_ranks(run)
    units = [
        size.layer_parameters(kind) / tp + kind.has_experts * routed
        for chunk in chunks
        for kind in chunk.kinds
    ]
    table = size.vocab_size * size.hidden_size / tp
    units += [table for chunk in chunks if chunk.has_embedding]
    units += [table for chunk in chunks if chunk.has_loss and not size.is_tied]
    largest = sorted(units)[-2:]
    return sum(largest) * (per.weight + per.gradient)


def _held(run: ResolvedRun, size: ModelSize, chunks: Sequence[ChunkSize]) -> tuple[float, float]:
    """Return how many parameters one rank holds beside routed experts, and in these."""
    counts = [chunk.parameters(size) for chunk in chunks]
    dense = sum(count for count, _ in counts) / run.parallelism.tensor_model_parallel_size
    return dense, sum(count for _, count in counts) / expert_ranks(run)


def estimate_memory(
    run: ResolvedRun,
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
    tp, per = run.parallelism.tensor_model_parallel_size, _state_bytes(run)
    dense, routed = _held(run, size, chunks)
    shards, zero_stage = num_shards(run), zero_stage_of(run)
    # The expert grid arranges the same ranks of a stage another way.
    sharded = dense / shards + routed / max(shards * tp / expert_ranks(run), 1.0)
    # Each stage shards one thing more: moments and main weights, gradients, weights.
    optimizer, gradients, weights = (
        sharded if zero_stage >= first else dense + routed for first in (1, 2, 3)
    )
    kinds = Counter(kind for chunk in chunks for kind in chunk.kinds)
    layers = sum(n * layer_activation_bytes(run, size, kind) for kind, n in kinds.items())
    per_chunk = layers / len(chunks)
    logits = 0.0
    if any(chunk.has_loss for chunk in chunks):
        tokens = tokens_of_rank(run, size) * run.schedule.micro_batch_size
        if not run.precision.cross_entropy_loss_fusion:
            logits = tokens * size.vocab_size / tp * (per.weight + 4)
    return MemoryEstimate(
        weights=0.0 if _offloads_parameters(run) else weights * per.weight,
        gradients=0.0 if _offloads_gradients(run) else gradients * per.gradient,
        main_weights=optimizer * per.main,
        optimizer=optimizer * per.moments,
        activations=per_chunk * chunks_in_flight,
        logits=logits,
        buffers=buffer_bytes(run, size, chunks),
    )
