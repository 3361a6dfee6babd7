"""Memory of the ranks of a run, read from the program that would run.

`trace_rank` runs the training step of one rank on tensors without memory, so weights, gradients,
optimizer state, activations, temporaries and communication buffers are those of the code, in the
order of the pipeline's own program. `memory_of_stages` traces as few ranks as possible: stages with
the same contents once, and with one micro batch where the schedule is 1F1B, because p - r micro
batches wait on stage r, each of which keeps what one keeps. Ranks of other schedules are traced
each, with at most twice as many micro batches as stages.
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
    """An operation of the step reads values, which tensors without memory do not have."""


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
    """Return what the memory of one rank does in a step.

    Args:
        run: resolved, with its vocabulary.
        rank: among all ranks of the run; one at its place in the grid speaks for its replicas.
        backend: whose ways of moving tensors are taken, "gloo" or "nccl".
        num_microbatches: in place of those of the settings.
    Raises:
        TopologyError: this process is a rank of a run.
        UntraceableStepError: for example torch's FSDP2, or the linear cross entropy.
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
        contents: letters of its layers, see `pipeline_parallel.layout`; chunks apart.
        peak_bytes: the most at a time.
        kinds: what they are for.
        place: when that is.
        in_flight: micro batches that wait for their backward, at most.
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
    """Return the memory of the first rank of each pipeline stage, with NCCL's ways of sending.

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
        # Of other schedules all ranks differ, and are traced with their whole program.
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
    """Return the bytes of what crosses a stage boundary, [s/cp, b, h] or [s/cp/tp, b, h]."""
    config, sizes = run.transformer_config, run.parallelism
    tokens = run.model.seq_length // sizes.context_parallel_size * run.schedule.micro_batch_size
    split = sizes.tensor_model_parallel_size if config.sequence_parallel else 1
    dtype = config.pipeline_dtype or config.params_dtype
    return tokens // split * config.hidden_size * dtype.itemsize


def contents_of_rank(run: ResolvedRun, layout: PipelineLayout, pp_rank: int) -> Hashable:
    """Return what decides the memory of a stage: its parts, and the kind of each layer."""
    config = run.transformer_config
    kinds, skips = config.layer_kinds(), config.no_rope_freq
    chunks = []
    for chunk in range(layout.num_chunks):
        layers = tuple(
            (kinds[layer], config.window_of(layer + 1), bool(skips and skips[layer]))
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
    """Return a trace as it is with `waiting` micro batches in flight in place of one.

    Args:
        message: bytes of a message from the stage before; 0 if there is none.
    """
    forward = next(step for step in trace.steps if step.step.op is Op.FORWARD)
    backward = next(step for step in trace.steps if step.step.op is not Op.FORWARD)
    # Tables of positions, which the first forward has made, stay. A backward ends with its input
    # and the gradient of that, the one to be freed and the other to be sent.
    kept = (waiting - 1) * (forward.end - backward.end + 2 * message)
    # Meanwhile the next input arrives, and an output and the gradient of another input leave.
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
    """Return one line for each stage, in GiB."""
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
        f"most: stage {most.stage}, {most.peak_bytes / GIB:.2f} GiB of the allocator; the runtime's"
        " context, workspaces of kernels and fragmentation come to that",
    ]
    return "\n".join(lines)
