"""Scalars of every step for TensorBoard, Weights & Biases and a file of JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from megatron.core.foundation import device
from megatron.core.transport import torch_collectives
from megatron.core.transport.object_collectives import union_across_ranks
from megatron.training.hooks.base import Hook
from megatron.training.hooks.times import MeasureTimes
from megatron.training.launch.printing import is_last_rank
from megatron.training.metrics.expert_load import collect_loads, load_scalars
from megatron.training.metrics.indexer_loss import indexer_loss
from megatron.training.metrics.log_line import perplexity
from megatron.training.run.context import TrainingContext
from megatron.training.run.state import StepResult, StopReason, TakenStep, TrainState


class ScalarSink(Protocol):
    """Destination of scalars."""

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Write the scalars of a step."""

    def close(self) -> None:
        """Flush buffered scalars."""


class ScalarWriter(Protocol):
    """The used methods of a `SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Add a scalar of a step."""

    def close(self) -> object:
        """Flush and close the event file."""


class WandbRun(Protocol):
    """The used methods of an open run of Weights & Biases."""

    def log(self, data: dict[str, float], step: int) -> object:
        """Add the scalars of a step."""

    def finish(self) -> object:
        """Upload buffered scalars."""


class TensorBoardSink:
    """Writes scalars to a `SummaryWriter`."""

    def __init__(self, writer: ScalarWriter) -> None:
        self.writer = writer

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Add each scalar of this step."""
        for name, value in scalars.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close the event file."""
        self.writer.close()


class WandbSink:
    """Logs scalars to an open run of Weights & Biases."""

    def __init__(self, wandb: WandbRun) -> None:
        self.wandb = wandb

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Log all scalars of this step."""
        self.wandb.log(scalars, step)

    def close(self) -> None:
        """Finish the run."""
        self.wandb.finish()


class JsonLinesSink:
    """Appends one JSON object per step, with the time of writing (`time`, seconds since 1970).

    Numbers have all their digits, so runs can be compared to the bit.
    """

    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  open for the whole run

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Append one line."""
        line = {"iteration": step, "time": round(time.time(), 3), **scalars}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def write_by_rank(self, seconds: Mapping[str, Sequence[float]], step: int) -> None:
        """Append one line with name -> list of one number per rank."""
        self._file.write(json.dumps({"iteration": step, **seconds}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Scalars(Hook):
    """Writes the scalars of a step to all sinks, which exist on the last rank only.

    Scalars have Megatron's names, so TensorBoard dashboards carry over.
    """

    def __init__(
        self,
        context: TrainingContext,
        times: MeasureTimes,
        sinks: list[ScalarSink],
        interval: int,
    ) -> None:
        self.context = context
        self.times = times
        self.sinks = sinks
        self.interval = interval
        self._started_at = time.perf_counter()
        self._written_shares: dict[str, float] = {}

    def before_step(self, state: TrainState) -> None:
        """Start the clock."""
        self._started_at = time.perf_counter()

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Write the scalars of this step if the interval ends."""
        seconds = time.perf_counter() - self._started_at
        if state.iteration % self.interval:
            return state
        run = self.context.run
        if run.logging.log_timers_to_tensorboard:
            # A collective, so ranks without sinks call it too.
            names = union_across_ranks(self.context.timers.names, torch_collectives.world())
            timers = self.context.timers.seconds_of_all_ranks(names, reset=False)
        loads = (
            collect_loads(self.context.model, self.context.groups)
            if run.experts.num_moe_experts
            else []
        )
        within = indexer_loss(self.context)
        if not self.sinks:
            return state
        scalars = self._of_step(state, result.read(), seconds)
        if run.logging.log_timers_to_tensorboard:
            scalars |= {f"{name}-time": max(values) for name, values in timers.items()}
        self.write(scalars | load_scalars(loads) | within, state.iteration)
        return state

    def _of_step(self, state: TrainState, result: StepResult, seconds: float) -> dict[str, float]:
        run = self.context.run
        scalars: dict[str, float] = dict(result.losses)
        if run.logging.log_learning_rate_to_tensorboard:
            scalars["learning-rate"] = result.learning_rate
            if result.decoupled_learning_rate is not None:
                scalars["decoupled-learning-rate"] = result.decoupled_learning_rate
        if run.logging.log_loss_scale_to_tensorboard:
            scalars["loss-scale"] = result.loss_scale
        scalars["batch-size"] = result.num_samples
        scalars["consumed-samples"] = state.consumed_train_samples
        if result.grad_norm is not None:
            scalars["grad-norm"] = result.grad_norm
        if result.num_zeros is not None:
            scalars["num-zeros"] = result.num_zeros
        if result.max_attention_logit is not None:
            scalars["max-attention-logit"] = result.max_attention_logit
        scalars["iteration-time"] = seconds
        scalars["tokens-per-second-per-device"] = result.num_tokens / (
            seconds * run.topology.world_size
        )
        if run.logging.log_throughput:
            scalars["throughput"] = result.flops / (seconds * run.topology.world_size) / 1e12
        if run.logging.log_memory_to_tensorboard:
            scalars["mem-max-allocated-bytes"] = device.peak_memory_bytes()
        if self.times.shares is not self._written_shares:
            self._written_shares = self.times.shares
            scalars |= {
                f"{part.replace(' ', '-')}-share": share
                for part, share in self.times.shares.items()
            }
        return scalars

    def write(self, scalars: dict[str, float], step: int) -> None:
        """Write scalars from other sources than a step, such as an evaluation."""
        for sink in self.sinks:
            sink.write(scalars, step)

    def write_by_rank(self, seconds: Mapping[str, Sequence[float]], step: int) -> None:
        """Write name -> list of one number per rank to the file of --metrics-jsonl."""
        for sink in self.sinks:
            if isinstance(sink, JsonLinesSink):
                sink.write_by_rank(seconds, step)

    def write_evaluation(self, kind: str, losses: dict[str, float], step: int) -> None:
        """Write the losses of an evaluation under Megatron's names."""
        scalars = {f"{name} {kind}": value for name, value in losses.items()}
        if self.context.run.logging.log_validation_ppl_to_tensorboard:
            scalars |= {f"{name} {kind} ppl": perplexity(v) for name, v in losses.items()}
        self.write(scalars, step)

    def close(self) -> None:
        """Close all sinks."""
        for sink in self.sinks:
            sink.close()


class ProgressBar(Hook):
    """A progress bar on the terminal of the last rank, below the log lines."""

    def __init__(self, tqdm: Any, train_iters: int) -> None:
        self._tqdm = tqdm
        self._total = train_iters
        self._bar: Any = None

    def before_training(self, state: TrainState) -> TrainState:
        """Draw the bar at the current iteration."""
        self._bar = self._tqdm(
            total=self._total, initial=state.iteration, unit="step", dynamic_ncols=True
        )
        return state

    def after_step(self, state: TrainState, result: TakenStep) -> TrainState:
        """Advance the bar, and show the losses."""
        self._bar.update(1)
        if result.is_read and (losses := result.read().losses):
            self._bar.set_postfix(
                {name: f"{value:.4f}" for name, value in losses.items()}, refresh=False
            )
        return state

    def after_roll_back(self, state: TrainState) -> None:
        """Move the bar back."""
        self._bar.n = state.iteration
        self._bar.refresh()

    def print(self, text: str) -> None:
        """Print above the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._tqdm.write(text)

    def after_training(self, state: TrainState, stop: StopReason) -> TrainState:
        """Stop updating the bar."""
        self.close()
        return state

    def close(self) -> None:
        """Stop updating the bar, also after a failure."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def local_sinks(
    tensorboard: ScalarWriter | None, wandb: WandbRun | None, jsonl_path: str | None
) -> list[ScalarSink]:
    """Return the sinks of this rank: all on the last rank, none on the others."""
    sinks: list[ScalarSink] = []
    if tensorboard is not None:
        sinks.append(TensorBoardSink(tensorboard))
    if wandb is not None:
        sinks.append(WandbSink(wandb))
    if jsonl_path is not None and is_last_rank():
        sinks.append(JsonLinesSink(jsonl_path))
    return sinks
