"""The parallel layout of a model, and the precision of its arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together
from megatron.core.settings.field_types import check_types
from megatron.core.settings.flags import flag, no_flag
from megatron.core.settings.inert_flags import (
    refused_settings,
    warn_of_unused_settings,
    with_inert_fields,
)
from megatron.core.utils import divide

NoSync = Callable[[], AbstractContextManager[None]]


@dataclass
class HalfPrecision:
    """Precision of the model, shared by model and optimizer."""

    fp16: bool = False
    """Compute in fp16 with loss scaling and fp32 main weights."""
    bf16: bool = False
    """Compute in bf16 with fp32 main weights."""
    params_dtype: torch.dtype = no_flag(torch.float32, is_arg=True)
    """Dtype of the model's weights."""

    def check_precision(self) -> Iterator[ConfigError]:
        """Yield the problem of two half precisions."""
        if self.fp16 and self.bf16:
            yield ConfigError(
                "fp16 and bf16 are both on.",
                rule="a model computes in one half precision",
                flags=["--fp16", "--bf16"],
                fix="keep --bf16",
            )


@dataclass
class ParallelFlags:
    """Parallel sizes, schedule, overlap choices."""

    tensor_model_parallel_size: int = 1
    """Number of ranks that split each weight matrix (Megatron-LM, section 3, arXiv 1909.08053)."""
    pipeline_model_parallel_size: int = 1
    """Number of ranks that split the layers into stages."""
    virtual_pipeline_model_parallel_size: int | None = no_flag(None, is_arg=True)
    """Model chunks per pipeline rank (interleaved schedule, arXiv 2104.04473, section 2.2)."""
    sequence_parallel: bool = False
    """Split norms, dropouts and residuals along the sequence over the tensor-parallel ranks (arXiv
    2205.05198, section 4.2)."""
    context_parallel_size: int = 1
    """Number of ranks that split the sequence in all layers, also in attention (arXiv
    2310.01889)."""
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None, nargs="+", part_of="context_parallel_size"
    )
    """Sizes of the two levels of a2a+p2p: neighbouring ranks that exchange heads, then the ring."""
    cp_comm_type: str | list[str] | None = flag(
        None, cli_default=["p2p"], nargs="+", part_of="context_parallel_size"
    )
    """Exchange of keys between ranks that share a sequence: "p2p", "all_gather", "a2a" or
    "a2a+p2p", or one of them per layer. None means "p2p"."""
    hybrid_context_parallel: bool = flag(False, part_of="context_parallel_size")
    """Dynamic context parallelism: split each sequence over as few neighbouring data- and
    context-parallel ranks as it needs, so that ranks have equal work although lengths differ."""
    max_seqlen_per_dp_cp_rank: int | None = flag(None, part_of="context_parallel_size")
    """Dynamic context parallelism: tokens of a sequence that one rank holds, about --seq-length /
    --context-parallel-size."""
    expert_model_parallel_size: int = 1
    """Number of ranks that share the routed experts."""
    expert_tensor_parallel_size: int | None = flag(None, part_of="num_experts")
    """Tensor-parallel size inside experts; None means equal to the dense one."""

    perform_initialization: bool = flag(
        True,
        "--no-initialization",
        help="Do not initialise weights, for runs that load a checkpoint.",
    )
    """Initialise weights when layers are built; not needed if a checkpoint is loaded."""
    use_cpu_initialization: bool = False
    """Create and fill weights in host memory first."""

    gradient_accumulation_fusion: bool = flag(
        True,
        "--no-gradient-accumulation-fusion",
        help="Compute a weight gradient as a separate tensor and add it, instead of accumulating in"
        " the GEMM.",
    )
    """Make weight-gradient GEMMs write into the main gradient buffer if the data-parallel wrapper
    provides one, so no separate gradient tensor is allocated."""
    async_tensor_model_parallel_allreduce: bool = flag(
        True, help="Compute the weight gradient only after the reduction of the input gradient."
    )
    """Reduce the input gradient of a column-parallel layer while its weight gradient is
    computed."""
    deterministic_mode: bool = False
    """Use only algorithms that give the same bits in every run."""
    layout_invariant_mode: bool = False
    """Compute the same bits in every layout: the order of a sum depends on the model and the batch
    alone."""
    layout_invariant_tensor_units: int = flag(8, part_of="layout_invariant_mode")
    """Number of units that each weight matrix is cut into. A rank computes the products of its
    units, and the units' sums are added in a fixed tree: the tensor-parallel size must divide this
    power of two."""
    layout_invariant_sequence_units: int = flag(1, part_of="layout_invariant_mode")
    """Number of units that each sequence is cut into. A rank computes the products and the
    attention of its units one by one: with context parallelism it is a multiple of 2 * cp."""
    batch_invariant_mode: bool = False
    """Compute the same bits for a token whichever sequences share its batch, with or without a
    cache. Switches layout_invariant_mode on, so that trainer and generator agree to the bit."""

    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        part_of="num_experts",
        per_micro_batch="micro batches that are computed at once are split over the same ranks",
    )
    """Compute one micro batch's backward while tokens of another micro batch's forward are sent to
    their experts, and vice versa. Keeps more micro batches in memory."""
    pipeline_schedule: str = "1f1b"
    """Order of the pipeline's steps: "1f1b" (interleaved when there are virtual stages), "gpipe",
    "zb-h1", "zb-v" or "dualpipe-v"; the last two hold the model in a V of two chunks per rank."""
    pipeline_step_durations: tuple[int, int, int] | list[int] = flag(
        (1, 1, 1), cli_default=[1, 1, 1], nargs=3
    )
    """Relative times of a forward, an input gradient and a weight gradient; the order of "zb-v"
    follows from them."""
    overlap_p2p_comm: bool = flag(
        True,
        "--no-overlap-p2p-communication",
        help="Finish sends and receives between stages before the computation continues.",
    )
    """Post receives early, and complete sends in the background."""
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "--microbatch-group-size-per-virtual-pipeline-stage"
    )
    """Number of micro batches that a chunk computes before the next chunk runs; None means the
    pipeline size."""

    calculate_per_token_loss: bool = False
    """Normalise gradients by the number of tokens of the global batch instead of per micro
    batch."""

    @property
    def tensor_units(self) -> int:
        """Number of units that all ranks cut a matrix into; 1 without `layout_invariant_mode`."""
        return self.layout_invariant_tensor_units if self.layout_invariant_mode else 1

    @property
    def sequence_units(self) -> int:
        """Number of units that all ranks cut a sequence into; 1 without `layout_invariant_mode`."""
        return self.layout_invariant_sequence_units if self.layout_invariant_mode else 1

    @property
    def sequence_units_of_rank(self) -> int:
        """Number of units of a sequence on each context-parallel rank, in `layout_invariant_mode`.

        Raises:
            ConfigError: the ranks cannot have equally many units.
        """
        return divide(self.sequence_units, self.context_parallel_size)


@dataclass
@with_inert_fields("parallel")
class ModelParallelConfig(ParallelFlags, HalfPrecision):
    """Parallel layout of the model, dtypes, and the callbacks that the training loop sets."""

    enable_autocast: bool = False
    """Run the forward pass under torch.autocast."""
    autocast_dtype: torch.dtype | None = None
    """Dtype of autocast; params_dtype if None."""
    pipeline_dtype: torch.dtype | None = None
    """Dtype of activations sent between stages; params_dtype if None."""
    variable_seq_lengths: bool = False
    """Sequence length changes between micro batches: shapes are exchanged before tensors."""
    batch_p2p_comm: bool = False
    """Pass sends and receives to the backend in one batch (excludes overlap_p2p_comm)."""
    deallocate_pipeline_outputs: bool = True
    """Free the data of a stage's output once it was sent; autograd needs only its graph."""
    timers: Any = None
    """`megatron.core.timers.Timers` of the run, or None."""
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Scales the loss before backward (fp16)."""
    no_sync_func: NoSync | list[NoSync] | None = None
    """Returns a context that accumulates a chunk's gradients without data-parallel reduction."""
    grad_sync_func: Callable[..., Any] | list[Callable[..., Any]] | None = None
    """Starts the data-parallel reduction of a chunk's gradients."""
    param_sync_func: Callable[..., Any] | list[Callable[..., Any]] | None = None
    """Starts the gather of a chunk's sharded parameters."""
    finalize_model_grads_func: Callable[..., None] | None = None
    """Completes gradients after the last backward: reductions over dp, tp, tied embeddings."""

    @property
    def sends_both_stacks(self) -> bool:
        """Whether messages between stages contain the tokens of an encoder and of a decoder."""
        return False

    @property
    def num_residual_streams(self) -> int:
        """Number of residual streams that stages exchange."""
        return 1

    def __post_init__(self) -> None:
        """Derive dtypes and raise all problems of the parallel settings together."""
        check_types(self)
        self._derive_parallel()
        raise_together(
            [*self.check_parallel(), *refused_settings(self)], summary=type(self).__name__
        )
        warn_of_unused_settings(self)

    def _derive_parallel(self) -> None:
        self.layout_invariant_mode |= self.batch_invariant_mode
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.autocast_dtype is None:
            self.autocast_dtype = self.params_dtype
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size

    def check_parallel(self) -> Iterator[MegatronError]:
        """Yield the problems of the parallel settings."""
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            yield ConfigError(
                "sequence_parallel is on with tensor_model_parallel_size=1.",
                rule="sequence parallelism splits over the tensor-parallel ranks",
                flags=["--sequence-parallel", "--tensor-model-parallel-size"],
                fix="drop --sequence-parallel or use a tensor-parallel size above 1",
            )
        vp = self.virtual_pipeline_model_parallel_size
        if vp is not None and vp > 1 and self.pipeline_model_parallel_size == 1:
            yield ConfigError(
                f"{vp} virtual stages per rank with pipeline_model_parallel_size=1.",
                rule="virtual stages divide the work of pipeline ranks",
                flags=[
                    "--num-virtual-stages-per-pipeline-rank",
                    "--pipeline-model-parallel-size",
                ],
                fix="use a pipeline size above 1 or drop the virtual stages",
            )
        if self.overlap_p2p_comm and self.batch_p2p_comm:
            yield ConfigError(
                "overlap_p2p_comm and batch_p2p_comm are both on.",
                rule="a batch of sends and receives is one blocking call",
                flags=["--no-overlap-p2p-communication"],
                fix="switch one of them off",
            )
        yield from self.check_precision()
