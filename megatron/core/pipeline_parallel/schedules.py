"""Run a training or evaluation step of a pipeline: `get_forward_backward_func`.

The returned function has Megatron's keywords. All schedules, and models without a pipeline, run the
same code: a plan (`step_plan.py`), stages (`stage.py`), channels (`p2p_communication.py`) and one
executor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.grad_sync import GradSync, of_chunk
from megatron.core.pipeline_parallel.instructions import Placement
from megatron.core.pipeline_parallel.layout import explicit_layout
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, Shape
from megatron.core.pipeline_parallel.recorder import MeasuredStage, PipelineRecorder
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.stage import LossSettings, PipelineStage, Stage, StepReport
from megatron.core.pipeline_parallel.step_plan import rank_program, validated_orders
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    resolve_group,
    resolve_groups,
)
from megatron.core.topology.group import Group
from megatron.core.utils import as_list, get_model_config


def get_forward_backward_func(
    pp_size: int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: ProcessGroupCollection | None = None,
) -> Callable[..., list[Any]]:
    """Return the function that runs one training (or evaluation) step.

    Args:
        pp_size: expected pipeline size, checked when the step runs; None omits the check.
        vp_size: expected model chunks per rank, checked likewise.
        schedule_pg_collection: groups of a step that gets no `pg_collection`; None uses the current
            collection when the step runs.
    """
    return partial(
        forward_backward,
        expected_pp_size=pp_size,
        expected_vp_size=vp_size,
        fallback_pg_collection=schedule_pg_collection,
    )


def forward_backward(
    *,
    forward_step_func: Callable[..., object],
    data_iterator: object,
    model: object,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
    p2p_communicator: P2PCommunicator | None = None,
    pg_collection: ProcessGroupCollection | None = None,
    force_all_reduce: bool | None = False,
    recorder: PipelineRecorder | None = None,
    tokens_per_microbatch: Tensor | None = None,
    expected_pp_size: int | None = None,
    expected_vp_size: int | None = None,
    fallback_pg_collection: ProcessGroupCollection | None = None,
) -> list[Any]:
    """Run all micro batches forward, and backward unless `forward_only`.

    Args:
        forward_step_func: (data_iterator, model) -> (output, loss function).
        data_iterator, model: one each, or lists with one entry per model chunk of this rank.
        num_microbatches: m, equal on all ranks of the pipeline.
        seq_length, micro_batch_size: s and b of the tensors between stages. For models whose stages
            exchange decoder states, `decoder_seq_length` replaces `seq_length`; with
            `config.sends_both_stacks` the two lengths are added.
        collect_non_loss_data: collect `loss_func(output, non_loss_data=True)` instead of losses.
        first_val_step: in evaluation, whether cached (for example fp8) weights must be renewed.
        adjust_tensor_shapes_fn: (receive shapes, send shapes) -> the real shapes; cannot be used
            with several chunks per rank.
        p2p_communicator: channels to use instead of new ones on `pg_collection.pp`.
        pg_collection: groups of this rank.
        force_all_reduce: if set, passed on to `config.finalize_model_grads_func`.
        recorder: measures the compute steps of this rank.
        tokens_per_microbatch: see `LossSettings`.
    Returns:
        on the last stage the reports of the loss function, one entry per micro batch; [] elsewhere.
    Communication:
        neighbouring stages compare their plans (`P2PCommunicator.begin_step`), then exchange
        activations and gradients; then the collectives of `finalize_model_grads_func`.
    Raises:
        ConfigError, ScheduleError: the arguments or the schedule do not allow this step.
        TopologyError: ranks have different plans, or the connection with a neighbour failed.
    """
    groups = resolve_groups(pg_collection or fallback_pg_collection)
    chunks = as_list(model)
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if data_iterator is None:
        iterators = [None] * len(chunks)
    config = get_model_config(chunks[0])
    channels = p2p_communicator or P2PCommunicator(groups.pp, config)
    rank = channels.rank
    plan = _plan(config, channels.size, len(chunks), num_microbatches, forward_only)
    _check_call(plan, len(iterators), expected_pp_size, expected_vp_size)
    placement = validated_orders(plan).placement
    channels.begin_step(
        {**plan._asdict(), "seq_length": seq_length, "micro_batch_size": micro_batch_size},
        placement.neighbours(rank),
    )
    shapes: list[Shape] = []
    if placement.num_stages > 1:
        shapes = get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=groups.tp,
            cp_group=groups.cp,
        )
    receive_shapes, send_shapes = _shapes(config, placement, rank, shapes, adjust_tensor_shapes_fn)
    reported = StepReport()
    batches = num_microbatches * (groups.dp_cp.size() // groups.cp.size())
    exact = ExactScale.of(config, batches, seq_length * micro_batch_size)
    loss = LossSettings(
        num_microbatches=num_microbatches,
        cp_group=groups.cp,
        per_token=config.calculate_per_token_loss,
        tokens_per_microbatch=tokens_per_microbatch,
        collect_non_loss_data=collect_non_loss_data,
        scale=config.grad_scale_func,
        exact_scale=None if exact is None else exact.of_losses,
    )
    make_stage = partial(
        Stage,
        forward_step=forward_step_func,
        loss=loss,
        reported=reported,
        trains=not forward_only,
        renews_weight_cache=not forward_only or first_val_step is not False,
    )
    if recorder is not None:
        recorder.begin(placement, rank, num_microbatches)
    stages = _stages(config, placement, rank, chunks, iterators, make_stage, recorder)

    # With `grad_sync_func` all ranks of a pipeline start their reductions at the same moment. The
    # first rank of a plain pipeline finishes last: it alone overlaps reductions with its backward.
    delayed = config.grad_sync_func is not None and (len(chunks) > 1 or rank > 0)
    with _timed(config.timers), contextlib.ExitStack() as stack:
        grad_sync = None
        if not forward_only:
            grad_sync = GradSync(chunks, config.no_sync_func, config.grad_sync_func)
            stack.enter_context(grad_sync)
        PipelineExecutor(
            rank_program(plan, rank, delayed),
            placement,
            stages,
            channels,
            receive_shapes=receive_shapes,
            send_shapes=send_shapes,
            grad_sync=grad_sync,
            param_sync=_param_sync(config, chunks),
            trains=not forward_only,
        ).run()
        channels.end_step()
        if not forward_only and config.finalize_model_grads_func is not None:
            stack.close()  # leave `no_sync`: the remaining reductions must start
            _finalize(config, chunks, reported, groups, force_all_reduce, exact)
    return reported.entries


def _plan(
    config: Any, pipeline_size: int, num_chunks: int, num_microbatches: int, forward_only: bool
) -> StepPlan:
    """Return the numbers that determine the program of this step."""
    return StepPlan(
        schedule=config.pipeline_schedule,
        pipeline_size=pipeline_size,
        num_chunks=num_chunks,
        num_microbatches=num_microbatches,
        group_size=config.microbatch_group_size_per_vp_stage if num_chunks > 1 else None,
        forward_only=forward_only,
        prefetch=int(config.overlap_p2p_comm and not config.variable_seq_lengths),
        durations=tuple(config.pipeline_step_durations),
        overlap_f_b=config.overlap_moe_expert_parallel_comm,
    )


def _shapes(
    config: Any,
    placement: Placement,
    rank: int,
    shapes: list[Shape],
    adjust: Callable[..., Any] | None,
) -> tuple[list[list[Shape]], list[list[Shape]]]:
    """Return the shapes of the tensors that enter and leave each chunk of this rank.

    Args:
        shapes: of the tensors that cross a boundary without multi-token prediction. In training,
            the stages after the MTP stage also receive the hidden states of each MTP depth.
        adjust: `adjust_tensor_shapes_fn`.
    """
    layout = explicit_layout(config) if torch.is_grad_enabled() else None

    def into(stage: int) -> list[Shape]:
        if layout is None:
            return shapes
        stacked = layout.num_stacked_hidden_states(stage)
        return [(stacked * length, *others) for length, *others in shapes]

    numbers = [placement.stage(rank, chunk) for chunk in range(placement.num_chunks)]
    pairs = [(into(number), into(number + 1)) for number in numbers]
    if adjust is not None:
        pairs = [adjust(*pair) for pair in pairs]
    return [received for received, _ in pairs], [sent for _, sent in pairs]


def _stages(
    config: Any,
    placement: Placement,
    rank: int,
    chunks: Sequence[Any],
    iterators: Sequence[Any],
    make_stage: Callable[..., Stage],
    recorder: PipelineRecorder | None,
) -> list[PipelineStage]:
    """Return the stages of this rank, measured if there is a recorder or there are timers."""
    is_measured = recorder is not None or config.timers is not None
    stages: list[PipelineStage] = []
    for chunk, (part, iterator) in enumerate(zip(chunks, iterators, strict=True)):
        stage = make_stage(
            part,
            data_iterator=iterator,
            is_last=placement.next(rank, chunk) is None,
            keep_outputs=not config.deallocate_pipeline_outputs,
            autocast_dtype=config.autocast_dtype if config.enable_autocast else None,
        )
        stages.append(
            MeasuredStage(stage, chunk, recorder, config.timers) if is_measured else stage
        )
    return stages


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    config: Any,
    tp_group: Group | None = None,
    cp_group: Group | None = None,
) -> list[Shape]:
    """Return the shapes of the tensors that cross a stage boundary.

    There is one tensor, [s/cp, b, h], or [s/cp/tp, b, h] with sequence parallelism. Where stages
    send both stacks of a model, s is the sum of their lengths; with hyper-connections h is the
    width of all residual streams.
    """
    length = seq_length if decoder_seq_length is None else decoder_seq_length
    if config.sends_both_stacks and decoder_seq_length is not None:
        length += seq_length
    length //= resolve_group(cp_group, "cp").size()
    if config.sequence_parallel:
        length //= resolve_group(tp_group, "tp").size()
    return [(length, micro_batch_size, config.num_residual_streams * config.hidden_size)]


def _check_call(
    plan: StepPlan, num_iterators: int, pp_size: int | None, vp_size: int | None
) -> None:
    """Raise if the arguments of a step contradict each other, or it trains without autograd."""
    if pp_size is not None and pp_size != plan.pipeline_size:
        raise ConfigError(
            f"the schedule was made for pipeline size {pp_size}, the pipeline group has "
            f"{plan.pipeline_size} ranks.",
            rule="the two sizes are equal",
            flags=["--pipeline-model-parallel-size"],
            fix="call get_forward_backward_func() without pp_size",
        )
    if vp_size is not None and vp_size != plan.num_chunks:
        raise ConfigError(
            f"the schedule was made for {vp_size} model chunks per rank, and got "
            f"{plan.num_chunks}.",
            rule="with virtual stages, `model` is the list of this rank's chunks",
            flags=["--num-virtual-stages-per-pipeline-rank"],
            fix=f"pass {vp_size} chunks",
        )
    if num_iterators != plan.num_chunks:
        raise ConfigError(
            f"{num_iterators} data iterators for {plan.num_chunks} model chunks.",
            rule="with virtual stages there is one data iterator per chunk",
            flags=["--num-virtual-stages-per-pipeline-rank"],
            fix="pass a list of as many iterators as chunks",
        )
    if not plan.forward_only and not torch.is_grad_enabled():
        raise ConfigError(
            "a training step was started inside torch.no_grad().",
            rule="backward needs the graph of forward",
            fix="pass forward_only=True, or leave no_grad",
        )


@contextlib.contextmanager
def _timed(timers: Any) -> Iterator[None]:
    if timers is None:
        yield
        return
    timers("forward-backward", log_level=1).start()
    yield
    timers("forward-backward", log_level=1).stop()


def _param_sync(config: Any, chunks: Sequence[Any]) -> Callable[[int], None] | None:
    if config.param_sync_func is None:
        return None

    def gather(chunk: int) -> None:
        callback = of_chunk(config.param_sync_func, chunk)
        assert callback is not None
        callback(chunks[chunk].parameters())

    return gather


@dataclass(frozen=True)
class ExactScale:
    """Factors of `layout_invariant_mode`, which depend on the global batch alone."""

    of_losses: float
    """A power of two, which rounds nothing: sums of gradients stay in range."""
    of_gradients: float
    """Makes sums of gradients means over micro batches (or sums over tokens)."""

    @staticmethod
    def of(config: Any, num_microbatches: int, tokens: int) -> ExactScale | None:
        """Return the factors of a step, or None without the mode.

        Args:
            num_microbatches: of all replicas.
            tokens: of a micro batch.
        """
        if not getattr(config, "layout_invariant_mode", False):
            return None
        if config.calculate_per_token_loss:
            bits = (num_microbatches * tokens - 1).bit_length()
            return ExactScale(2.0**-bits, 2.0**bits)
        bits = (num_microbatches - 1).bit_length()
        return ExactScale(2.0**-bits, 2.0**bits / num_microbatches)


def _finalize(
    config: Any,
    chunks: Sequence[Any],
    reported: StepReport,
    groups: ProcessGroupCollection,
    force_all_reduce: bool | None,
    exact: ExactScale | None,
) -> None:
    """Complete the gradients of all chunks; only the last stage has counted tokens."""
    num_tokens: Tensor | None = None
    if config.calculate_per_token_loss:
        num_tokens = reported.num_tokens
        if num_tokens is None:
            num_tokens = torch.zeros((), dtype=torch.int, device=device.current_device())
    options: dict[str, Any] = {"force_all_reduce": True} if force_all_reduce else {}
    if exact is not None:
        options["exact_factor"] = exact.of_gradients
    config.finalize_model_grads_func(list(chunks), num_tokens, pg_collection=groups, **options)
