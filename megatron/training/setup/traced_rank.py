"""Build one rank of a run and train a step, while a `MemoryTimeline` counts the memory.

This module calls the functions of a normal run: `build_model`, `build_optimizer`, the pipeline
schedule and the optimizer's update. It works with real and fake tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation import device
from megatron.core.optimizer.state_declarations import initialize_state
from megatron.core.pipeline_parallel.instructions import Op, Placement, Step
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.recorder import PipelineRecorder
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.pipeline_parallel.simulate import Span
from megatron.core.timers import Timers
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training import global_vars
from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.memory_timeline import Kind, MemoryTimeline, Peak
from megatron.training.metrics.model_size import ModelSize
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import BatchPlan, TrainState
from megatron.training.run.step import forward_backward
from megatron.training.run.update import DeviceDecision
from megatron.training.setup.distributed import create_groups, seed_everything
from megatron.training.setup.initialize import configure_num_microbatches
from megatron.training.setup.model import build_model, install_callbacks
from megatron.training.setup.optimizer import build_optimizer, build_scheduler


@dataclass(frozen=True)
class ModelScript:
    """The functions of a training script that build a chunk and run a micro batch."""

    model_provider: Callable[..., nn.Module]
    forward_step: Callable[..., Any]


@dataclass(frozen=True)
class StepMemory:
    """Memory during one compute step of a rank's program and the communication before it."""

    step: Step
    begin: int
    """Live bytes at the end of the previous compute step."""
    peak: Peak
    end: int


@dataclass
class RankTrace:
    """Memory of one rank over one training step."""

    rank: int
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    steps: list[StepMemory] = field(default_factory=list)
    kept_at_peak: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    """(micro batch, chunk) in flight -> layer -> bytes that are saved for the backward pass, when
    the sum of saved bytes is largest."""
    reduction: Peak = field(default_factory=Peak)
    """Peak of the gradient reduction."""
    update: Peak = field(default_factory=Peak)
    """Peak of the optimizer's update."""
    idle: int = 0
    """Live bytes between steps."""

    @property
    def peak(self) -> Peak:
        """Peak of the whole step."""
        peaks = [*(step.peak for step in self.steps), self.reduction, self.update]
        return max(peaks, key=lambda peak: peak.num_bytes)

    @property
    def most_in_flight(self) -> int:
        """Number of forward passes that wait for their backward pass, when most bytes are saved."""
        return len(self.kept_at_peak)

    @property
    def peak_place(self) -> str:
        """Time of the peak within the step, in words."""
        most = self.peak
        for found in self.steps:
            if found.peak is most:
                name = found.step.op.name.lower().replace("_", " ")
                return f"{name} of micro batch {found.step.microbatch}, chunk {found.step.chunk}"
        return "reduction of gradients" if self.reduction is most else "update of weights"


class TimelineRecorder(PipelineRecorder):
    """Records the timeline after each compute step of the program."""

    def __init__(self, timeline: MemoryTimeline, trace: RankTrace) -> None:
        super().__init__()
        self._timeline, self._trace = timeline, trace
        self._begin = 0
        self._kept: dict[tuple[int, int], Counter[str]] = {}

    def begin(self, placement: Placement, rank: int, num_microbatches: int) -> None:
        """Start a step."""
        super().begin(placement, rank, num_microbatches)
        self.spans = _Noted(self._note)
        self._timeline.restart()
        self._begin = self._timeline.num_bytes

    def _note(self, span: Span) -> None:
        timeline, step = self._timeline, span.step
        if step.op is Op.FORWARD:
            timeline.reclassify_all(Kind.TEMPORARY, Kind.ACTIVATIONS)
            kept = timeline.of_kind(Kind.ACTIVATIONS)
            for before in self._kept.values():
                kept.subtract(before)
            self._kept[step.microbatch, step.chunk] = +kept
            most = sum(map(Counter.total, map(Counter, self._trace.kept_at_peak.values())))
            if sum(map(Counter.total, self._kept.values())) > most:
                self._trace.kept_at_peak = dict(self._kept)
        elif step.op is not Op.INPUT_GRAD:
            self._kept.pop((step.microbatch, step.chunk), None)
        self._trace.steps.append(StepMemory(step, self._begin, timeline.peak, timeline.num_bytes))
        timeline.restart()
        self._begin = timeline.num_bytes


class _Noted(list[Span]):
    def __init__(self, note: Callable[[Span], None]) -> None:
        super().__init__()
        self._note = note

    def append(self, span: Span) -> None:
        self._note(span)


class SyntheticBatches:
    """An infinite iterator of micro batches [b, s] of random tokens."""

    def __init__(self, run: ResolvedRun, vocab_size: int) -> None:
        self._shape = (run.schedule.micro_batch_size, run.model.seq_length)
        self._vocab_size = vocab_size

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        tokens = torch.randint(self._vocab_size, self._shape)
        return {
            "tokens": tokens,
            "labels": tokens.clone(),
            "loss_mask": torch.ones(self._shape),
            "position_ids": torch.arange(self._shape[1]).expand(self._shape).contiguous(),
        }


class RankUnderTest:
    """One rank of a run with its model, optimizer and data."""

    def __init__(
        self, run: ResolvedRun, script: ModelScript, timeline: MemoryTimeline | None
    ) -> None:
        """
        Args:
            run: resolved, with its vocabulary; torch.distributed is initialized.
            timeline: an entered timeline; None disables counting.
        """
        self._timeline = timeline or MemoryTimeline()
        self._publish(run)
        groups = create_groups(run)
        seed_everything(run.schedule.seed)
        model = build_model(run, script.model_provider, groups)
        self._mark_weights(model)
        optimizer: Any = build_optimizer(run, model, groups)
        initialize_state(optimizer.optimizer)
        self._timeline.reclassify_all(Kind.TEMPORARY, Kind.OPTIMIZER)
        scheduler = build_scheduler(run, optimizer)
        timers = global_vars.get_timers()
        self.context = TrainingContext(
            run=run,
            groups=groups,
            model=model,
            config=install_callbacks(run, model, optimizer, groups, timers),
            optimizer=optimizer,
            scheduler=scheduler,
            forward_step=script.forward_step,
            forward_backward=get_forward_backward_func(),
            timers=timers,
        )
        self.context.data.train = self._data(run, groups.pp.rank(), len(model))
        if timeline is not None:
            self._watch_layers(model)

    @staticmethod
    def _publish(run: ResolvedRun) -> None:
        global_vars.publish(args=run.namespace(), timers=Timers(0, "max"))
        configure_num_microbatches(run)

    def _mark_weights(self, model: Sequence[Any]) -> None:
        for chunk in model:
            weights = [p.data for p in chunk.parameters()]
            if hasattr(chunk, "sharded_values"):
                weights += [shard for own in chunk.sharded_values().values() for shard in own]
            self._timeline.classify(weights, Kind.WEIGHTS)
        # All other storages of the data-parallel wrapper are gradient buffers.
        self._timeline.reclassify_all(Kind.TEMPORARY, Kind.GRADIENTS)

    @staticmethod
    def _data(run: ResolvedRun, pp_rank: int, num_chunks: int) -> Any:
        """Return micro batches for the chunks that read tokens or compute losses."""
        layout = pipeline_layout(run.transformer_config)
        vocab_size = ModelSize.from_settings(run).vocab_size
        found = []
        for chunk in range(num_chunks):
            place = (pp_rank, chunk if num_chunks > 1 else None)
            is_hashed = run.transformer_config.moe_n_hash_layers > 0
            reads = is_hashed or layout.reads_tokens(*place)
            found.append(SyntheticBatches(run, vocab_size) if reads else None)
        return found if num_chunks > 1 else found[0]

    def _watch_layers(self, model: Sequence[nn.Module]) -> None:
        for module in (m for chunk in model for m in chunk.modules()):
            if isinstance(module, TransformerLayer):
                module.register_forward_pre_hook(self._layer_begins)
                module.register_forward_hook(self._layer_ended)

    def _layer_begins(self, module: nn.Module, _: object) -> None:
        self._timeline.layer = f"layer {module.layer_number}"

    def _layer_ended(self, _module: nn.Module, _inputs: object, _output: object) -> None:
        self._timeline.reclassify_all(Kind.TEMPORARY, Kind.ACTIVATIONS)
        self._timeline.layer = ""

    def step(self, trace: RankTrace | None, num_microbatches: int | None = None) -> None:
        """Train on one global batch.

        Args:
            trace: receives the counts of the timeline.
            num_microbatches: replaces the number in the settings.
        """
        context, timeline = self.context, self._timeline
        plan = context.plan_step(0)
        if num_microbatches is not None:
            plan = BatchPlan(num_microbatches, plan.micro_batch_size, plan.global_batch_size)
        recorder = TimelineRecorder(timeline, trace or RankTrace(0))
        for chunk in context.model:
            chunk.zero_grad_buffer()  # type: ignore[operator]  # a DistributedDataParallel
        context.optimizer.zero_grad()
        options: dict[str, Any] = {} if trace is None else {"recorder": recorder}
        if device.is_fake():
            options["p2p_communicator"] = _Unheard(context.groups.pp, context.config)
        reports = forward_backward(context, context.data.train, 0, plan, **options)
        if trace is not None:
            trace.reduction = timeline.peak
        timeline.restart()
        if context.optimizer.decides_on_device:
            DeviceDecision.of(context.run).finish(context, TrainState(), plan, reports)
        else:
            context.optimizer.step()
        del reports
        if trace is not None:
            trace.update = timeline.peak
            trace.idle = timeline.num_bytes
            trace.weights = timeline.kinds[Kind.WEIGHTS]
            trace.gradients = timeline.kinds[Kind.GRADIENTS]
            trace.optimizer = timeline.kinds[Kind.OPTIMIZER]


class _Unheard(P2PCommunicator):
    """Communicator to ranks that do not exist; it skips the agreement of stages."""

    def begin_step(self, settings: dict[str, Any], neighbours: Any) -> None:
        """Do nothing."""

    def end_step(self) -> None:
        """Do nothing."""
