"""The interface by which training loops run a pipeline: `get_forward_backward_func`.

The returned function keeps Megatron's keywords. Behind it there is one path for all schedules, no
pipeline included: a plan (`step_plan.py`), stages (`stage.py`), channels (`p2p_communication.py`)
and one executor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.foundation.errors import ConfigError
from megatron.core.pipeline_parallel.executor import PipelineExecutor
from megatron.core.pipeline_parallel.grad_sync import GradSync, of_chunk
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
        pp_size: pipeline size, checked when the step runs; None takes it from the groups.
        vp_size: model chunks per rank, checked likewise; None takes it from the model list.
        schedule_pg_collection: groups to use when the step is given none; None means the current
            collection at that time.
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
        num_microbatches: m, the same on all ranks of the pipeline.
        seq_length, micro_batch_size: s and b of the tensors between stages. `decoder_seq_length`
            takes the place of `seq_length` for models whose stages exchange decoder states, and is
            added to it where `config.sends_both_stacks`.
        collect_non_loss_data: collect `loss_func(output, non_loss_data=True)` instead of losses.
        first_val_step: in evaluation, whether cached (for example fp8) weights must be renewed.
        adjust_tensor_shapes_fn: (receive shapes, send shapes) -> the real ones; not with several
            chunks per rank.
        p2p_communicator: channels to use instead of new ones on `pg_collection.pp`.
        pg_collection: groups of this rank.
        force_all_reduce: passed on to `config.finalize_model_grads_func` if set.
        recorder: measures the compute steps of this rank.
        tokens_per_microbatch: see `LossSettings`.
    Returns:
        on the last stage what the loss function reported, one entry per micro batch; [] elsewhere.
    Communication:
        activations and gradients between neighbouring stages, after a comparison of their plans
        (`P2PCommunicator.begin_step`); then whatever `finalize_model_grads_func` does.
    Raises:
        ConfigError, ScheduleError: the step cannot be run as asked.
        TopologyError: ranks were asked to run different steps, or a neighbour was lost.
    """
    groups = resolve_groups(pg_collection or fallback_pg_collection)
    chunks = as_list(model)
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    if data_iterator is None:
        iterators = [None] * len(chunks)
    config = get_model_config(chunks[0])
    channels = p2p_communicator or P2PCommunicator(groups.pp, config)
    rank = channels.rank
    plan = StepPlan(
        schedule=config.pipeline_schedule,
        pipeline_size=channels.size,
        num_chunks=len(chunks),
        num_microbatches=num_microbatches,
        group_size=config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else None,
        forward_only=forward_only,
        prefetch=int(config.overlap_p2p_comm and not config.variable_seq_lengths),
        durations=tuple(config.pipeline_step_durations),
        overlap_f_b=config.overlap_moe_expert_parallel_comm,
    )
    _check_sizes(plan, len(iterators), expected_pp_size, expected_vp_size)
    if not forward_only and not torch.is_grad_enabled():
        raise ConfigError(
            "a training step was started inside torch.no_grad().",
            rule="backward needs the graph of forward",
            fix="pass forward_only=True, or leave no_grad",
        )
    orders = validated_orders(plan)
    placement = orders.placement
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
    numbers = [placement.stage(rank, chunk) for chunk in range(len(chunks))]
    receive_shapes = [_shapes_into(number, shapes, config) for number in numbers]
    send_shapes = [_shapes_into(number + 1, shapes, config) for number in numbers]
    if adjust_tensor_shapes_fn is not None:
        pairs = zip(receive_shapes, send_shapes, strict=True)
        adjusted = [adjust_tensor_shapes_fn(*pair) for pair in pairs]
        receive_shapes, send_shapes = ([pair[i] for pair in adjusted] for i in (0, 1))

    reported = StepReport()
    loss = LossSettings(
        num_microbatches=num_microbatches,
        cp_group=groups.cp,
        per_token=config.calculate_per_token_loss,
        tokens_per_microbatch=tokens_per_microbatch,
        collect_non_loss_data=collect_non_loss_data,
        scale=config.grad_scale_func,
    )
    stages: list[PipelineStage] = [
        Stage(
            part,
            forward_step_func,
            iterator,
            is_last=placement.next(rank, chunk) is None,
            loss=loss,
            reported=reported,
            trains=not forward_only,
            renews_weight_cache=not forward_only or first_val_step is not False,
            keep_outputs=not config.deallocate_pipeline_outputs,
            autocast_dtype=config.autocast_dtype if config.enable_autocast else None,
        )
        for chunk, (part, iterator) in enumerate(zip(chunks, iterators, strict=True))
    ]
    if recorder is not None:
        recorder.begin(placement, rank, num_microbatches)
    if recorder is not None or config.timers is not None:
        stages = [MeasuredStage(s, c, recorder, config.timers) for c, s in enumerate(stages)]

    # With `grad_sync_func` all ranks of a pipeline start reducing at the same moment; the first
    # rank of a plain pipeline is last to finish, so it alone overlaps them with its backward.
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
            stack.close()  # reductions still to come must not be held back
            _finalize(config, chunks, reported, groups, force_all_reduce)
    return reported.entries


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    config: Any,
    tp_group: Group | None = None,
    cp_group: Group | None = None,
) -> list[Shape]:
    """Return the shapes of what crosses a stage boundary: one tensor [s/cp, b, h], or [s/cp/tp,
    b, h] with sequence parallelism. Where stages send both stacks, s are the rows of both."""
    length = seq_length if decoder_seq_length is None else decoder_seq_length
    if config.sends_both_stacks and decoder_seq_length is not None:
        length += seq_length
    length //= resolve_group(cp_group, "cp").size()
    if config.sequence_parallel:
        length //= resolve_group(tp_group, "tp").size()
    return [(length, micro_batch_size, config.hidden_size)]


def _shapes_into(stage: int, shapes: list[Shape], config: Any) -> list[Shape]:
    """Return the shapes of what enters a stage: with gradients more rows after one that predicts
    later tokens, those of each of them."""
    layout = explicit_layout(config)
    if layout is None or not torch.is_grad_enabled():
        return shapes
    parts = layout.num_parts_received(stage)
    return [(parts * rows, *others) for rows, *others in shapes]


def _check_sizes(
    plan: StepPlan, num_iterators: int, pp_size: int | None, vp_size: int | None
) -> None:
    """Raise if the arguments of a step contradict each other."""
    if pp_size is not None and pp_size != plan.pipeline_size:
        raise ConfigError(
            f"the schedule was made for pipeline size {pp_size}, the pipeline group has "
            f"{plan.pipeline_size} ranks.",
            rule="both are the same number",
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


def _finalize(
    config: Any,
    chunks: Sequence[Any],
    reported: StepReport,
    groups: ProcessGroupCollection,
    force_all_reduce: bool | None,
) -> None:
    """Complete the gradients of all chunks; token counts are known on the last stage only."""
    num_tokens: Tensor | None = None
    if config.calculate_per_token_loss:
        num_tokens = reported.num_tokens
        if num_tokens is None:
            num_tokens = torch.zeros((), dtype=torch.int, device=device.current_device())
    options = {"force_all_reduce": True} if force_all_reduce else {}
    config.finalize_model_grads_func(list(chunks), num_tokens, pg_collection=groups, **options)
