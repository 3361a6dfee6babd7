"""Memory of the ranks of a run, traced from the training code.

`trace_rank` runs the training step of one rank with fake tensors, so it counts the weights,
gradients, optimizer state, activations, temporaries and communication buffers of the actual code,
in the order of the pipeline schedule. `memory_of_stages` traces as few ranks as possible. For 1F1B
it traces stages with the same contents once, with one micro batch: on stage r of p, p - r micro
batches are in flight, and each keeps the same bytes. For other schedules it traces every stage,
with at most twice as many micro batches as stages.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.pipeline_parallel.instructions import Op
from megatron.core.pipeline_parallel.layout import PipelineLayout, pipeline_layout
from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.memory_timeline import Kind, MemoryTimeline
from megatron.training.metrics.prediction import gibibytes
from megatron.training.setup.fake_device import fake_rank
from megatron.training.setup.stages import first_rank_of_stages
from megatron.training.setup.traced_rank import ModelScript, RankTrace, RankUnderTest

GIB = 2.0**30
_TITLES = ("peak", *(kind.value for kind in Kind))


class UntraceableStepError(ConfigError):
    """An operation of the step reads values, which fake tensors do not have."""


def routed_share(run: ResolvedRun) -> float:
    """Return the share of (token, expert) pairs that a router chooses."""
    experts = run.experts
    return experts.moe_router_topk / experts.num_moe_experts if experts.num_moe_experts else 0.0


def trace_rank(
    run: ResolvedRun,
    script: ModelScript,
    rank: int,
    *,
    backend: str = "gloo",
    num_microbatches: int | None = None,
) -> RankTrace:
    """Return the memory of one rank over a step.

    Args:
        run: resolved, with its vocabulary.
        rank: global rank; all replicas of a rank have the same memory.
        backend: "gloo" or "nccl", which selects the code paths of communication.
        num_microbatches: replaces the number in the settings.
    Raises:
        TopologyError: this process is a rank of a run.
        UntraceableStepError: for example torch's FSDP2.
    """
    found = RankTrace(rank)
    with (
        fake_rank(rank, run.topology.world_size, backend=backend, routed_share=routed_share(run)),
        MemoryTimeline() as timeline,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            RankUnderTest(run, script, timeline).step(found, num_microbatches)
        except MegatronError:
            raise
        except Exception as error:  # torch raises exceptions of several types
            text = str(error).partition("\n")[0]
            raise UntraceableStepError(
                f"{type(error).__name__}: {text}",
                rule="the operations of a traced step read no values",
                fix="measure the peak memory of a short run",
            ) from error
    return found


@dataclass(frozen=True)
class StageMemory:
    """The peak of one rank of a pipeline stage.

    Attributes:
        contents: letters of the layers of each chunk, see `pipeline_parallel.layout`.
        peak_bytes: maximum number of bytes.
        kinds: bytes of each kind at the peak.
        place: time of the peak within the step.
        in_flight: maximum number of micro batches that wait for their backward pass.
    """

    stage: int
    contents: str
    peak_bytes: int
    kinds: Mapping[Kind, int]
    place: str
    in_flight: int

    def describe(self) -> str:
        """Return one line."""
        parts = ", ".join(f"{kind.value} {gibibytes(n)}" for kind, n in self.kinds.items())
        return f"stage {self.stage}: {gibibytes(self.peak_bytes)} ({parts}), at {self.place}"


def memory_of_stages(
    run: ResolvedRun, script: ModelScript, *, all_stages: bool = True
) -> list[StageMemory]:
    """Return the memory of the first rank of each pipeline stage, with NCCL.

    Args:
        run: resolved, with its vocabulary.
        all_stages: if False and each stage needs a trace of its own, only the first stage and the
            last stage are traced.
    Raises:
        TopologyError: this process is a rank of a run.
    """
    layout = pipeline_layout(run.transformer_config)
    ranks, traces = first_rank_of_stages(run), dict[Hashable, RankTrace]()
    num_microbatches = _num_microbatches(run)
    is_replayed = run.transformer_config.pipeline_schedule == "1f1b" and layout.num_chunks == 1
    found = []
    for stage, rank in enumerate(ranks):
        if not (is_replayed or all_stages or stage in (0, len(ranks) - 1)):
            continue
        # In other schedules all stages differ, and each is traced with its whole program.
        key = contents_of_rank(run, layout, stage) if is_replayed else stage
        if key not in traces:
            traces[key] = trace_rank(
                run, script, rank, backend="nccl",
                num_microbatches=1 if is_replayed else min(num_microbatches, 2 * len(ranks)),
            )  # fmt: skip
        contents = " ".join(layout.stages[layout.stage(stage, c)] for c in range(layout.num_chunks))
        if is_replayed:
            waiting = min(len(ranks) - stage, num_microbatches)
            message = _message_bytes(run) if stage and num_microbatches > 1 else 0
            message *= layout.num_stacked_hidden_states(stage)
            found.append(_with_waiting(traces[key], stage, contents, waiting, message))
        else:
            found.append(_as_traced(traces[key], stage, contents))
    return found


def _num_microbatches(run: ResolvedRun) -> int:
    sizes = run.parallelism
    model = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size
    data = run.topology.world_size // (model * sizes.context_parallel_size)
    return run.schedule.global_batch_size // (data * run.schedule.micro_batch_size)


def _message_bytes(run: ResolvedRun) -> int:
    """Return the bytes of a tensor [s/cp, b, h] or [s/cp/tp, b, h] sent between stages."""
    config, sizes = run.transformer_config, run.parallelism
    tokens = run.model.seq_length // sizes.context_parallel_size * run.schedule.micro_batch_size
    split = sizes.tensor_model_parallel_size if config.sequence_parallel else 1
    dtype = config.pipeline_dtype or config.params_dtype
    return tokens // split * config.num_residual_streams * config.hidden_size * dtype.itemsize


def contents_of_rank(run: ResolvedRun, layout: PipelineLayout, pp_rank: int) -> Hashable:
    """Return a key that determines the memory of a stage: its parts and the kind of each layer."""
    config = run.transformer_config
    kinds, skips = config.layer_kinds(), config.no_rope_freq
    chunks = []
    for chunk in range(layout.num_chunks):
        layers = tuple(
            (
                kinds[layer],
                config.is_local(layer + 1),
                bool(skips and skips[layer]),
                str(config.block(layer + 1)),
            )
            for layer in layout.layers(pp_rank, chunk)
        )
        chunks.append((layout.stages[layout.stage(pp_rank, chunk)], layers))
    return tuple(chunks)


def _as_traced(trace: RankTrace, stage: int, contents: str) -> StageMemory:
    peak = trace.peak
    kinds = {kind: peak.kinds.get(kind, 0) for kind in Kind}
    return StageMemory(
        stage, contents, peak.num_bytes, kinds, trace.peak_place, trace.most_in_flight
    )


def _with_waiting(
    trace: RankTrace, stage: int, contents: str, waiting: int, message: int
) -> StageMemory:
    """Extrapolate a trace of one micro batch to `waiting` micro batches in flight.

    Args:
        message: bytes of a message from the previous stage; 0 on the first stage.
    """
    forward = next(step for step in trace.steps if step.step.op is Op.FORWARD)
    backward = next(step for step in trace.steps if step.step.op is not Op.FORWARD)
    # Position tables of the first forward pass stay allocated. At the end of a backward pass, its
    # input and the input's gradient are still allocated, to be freed and to be sent.
    kept = (waiting - 1) * (forward.end - backward.end + 2 * message)
    # Meanwhile the next input is received, and an output and another input's gradient are sent.
    kept += 3 * message
    candidates = [
        (step.peak.num_bytes + kept, kept, step.peak, name)
        for name, step in (("forward", forward), ("backward", backward))
    ]
    candidates += [
        (trace.reduction.num_bytes, 0, trace.reduction, "reduction of gradients"),
        (trace.update.num_bytes, 0, trace.update, "update of weights"),
    ]
    num_bytes, more, peak, place = max(candidates, key=lambda each: each[0])
    kinds = {kind: peak.kinds.get(kind, 0) for kind in Kind}
    messages = min((waiting + 2) * message, more)
    kinds[Kind.COMMUNICATION] += messages
    kinds[Kind.ACTIVATIONS] += more - messages
    return StageMemory(stage, contents, num_bytes, kinds, place, waiting)


def memory_table(stages: list[StageMemory]) -> str:
    """Return a table with one line for each stage, in GiB."""
    lines = [f"{'stage':>5}" + "".join(f"{title:>14}" for title in _TITLES) + "  at its peak"]
    for each in stages:
        values = (each.peak_bytes, *(each.kinds[kind] for kind in Kind))
        numbers = "".join(f"{value / GIB:>14.2f}" for value in values)
        lines.append(
            f"{each.stage:>5}{numbers}  {each.place}, micro batches in flight: {each.in_flight}"
            f" ({each.contents})"
        )
    most = max(stages, key=lambda each: each.peak_bytes)
    lines += [
        "",
        f"most: stage {most.stage}, {most.peak_bytes / GIB:.2f} GiB of the allocator, in addition"
        " to the runtime's context, workspaces of kernels and fragmentation",
    ]
    return "\n".join(lines)
