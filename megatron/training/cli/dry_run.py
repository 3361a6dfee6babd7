"""Report settings, ranks, stages, schedule, size, memory and FLOPs of a run without starting it."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

from megatron.core.foundation.errors import MegatronError, MissingInputError, raise_together
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.schedule_definitions import schedule_named
from megatron.core.pipeline_parallel.step_plan import plan_report
from megatron.core.timers import Timers
from megatron.core.tokenizers.null_and_byte import NullTokenizer
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.resilience.status import RunStatus
from megatron.training.cli.parser import ParsedCommand
from megatron.training.cli.pretrain_call import PretrainCall
from megatron.training.config.resolved import ResolvedRun, resolve_vocabulary
from megatron.training.config.run import RunConfig, all_flags, plain
from megatron.training.datasets.iterators import build_data
from megatron.training.launch import rank_info
from megatron.training.metrics.flops import (
    training_flops,
    training_flops_per_token,
)
from megatron.training.metrics.model_size import ModelSize
from megatron.training.rules import notes, resolve_and_check
from megatron.training.run.state import TrainState
from megatron.training.setup.assemble import assemble
from megatron.training.setup.distributed import create_groups
from megatron.training.setup.initialize import Session, publish
from megatron.training.setup.model import kernels_of_run
from megatron.training.setup.stages import first_rank_of_stages

_IDS_OF: Mapping[str, tuple[int, str]] = {
    "GPT2BPETokenizer": (50257, "the size of GPT-2"),
    "Llama2Tokenizer": (32000, "the size of Llama 2"),
}
"""Type of tokenizer -> number of ids, and its explanation."""
_USUAL_IDS = 128256
_WITHOUT_FILES: Mapping[str, object] = {
    "sample_order": "native",
    "data_audit_path": None,
    "param_offload_path": None,
    "optimizer_offload_path": None,
}
"""Changed settings, so that building a run writes no files: Megatron's order has index files."""


def describe_run(read: Callable[[], ParsedCommand], call: PretrainCall | None = None) -> str:
    """Return the report of `--dry-run`.

    Corpora, tokenizers and checkpoints need not be on this machine.

    Args:
        call: the script. Its model is built with fake tensors for each kind of pipeline stage, and
            its datasets are opened if they are on this machine. None builds nothing.
    Raises:
        ConfigError: the settings are invalid; the error lists all problems.
        MegatronError: building fails with one error, which the run would raise too.
    """
    absent: list[MegatronError] = []
    run = resolve_and_check(read, planned_world_size, absent=absent)
    problems: dict[str, MegatronError] = {}
    tokenizer = _tokenizer(run, absent, problems)
    run = resolve_vocabulary(run, tokenizer.vocab_size)
    if call is not None:
        _build(run, tokenizer, call, problems, has_data=not (absent or problems))
    if len(problems) == 1:
        raise next(iter(problems.values()))
    raise_together(problems.values(), summary="the settings of this run")
    size, config = ModelSize.from_settings(run), run.transformer_config
    layout = pipeline_layout(config)
    sections = [
        ("settings that differ from their defaults", _settings(run)),
        ("derived", [str(derivation) for derivation in run.derivations]),
        ("flags without effect here", [*notes(run.config), *run.notes]),
        ("not on this machine, and needed by the run", [each.found for each in absent]),
        ("ranks", _ranks(run)),
        ("pipeline stages", layout.describe().split("\n")),
        ("schedule", _schedule(run)),
        ("model", _model(run, size)),
        ("kernels of a training step on CPU", _kernels(run, config, "cpu")),
        (f"and on a GPU, with {run.model.transformer_impl} layers", _kernels(run, config, "cuda")),
        ("memory of one rank at its peak", _memory(run, call)),
    ]
    return "\n".join(
        line
        for title, lines in sections
        if lines
        for line in ("", f"{title}:", *(f"  {text}" for text in lines))
    )


def _tokenizer(
    run: ResolvedRun, absent: list[MegatronError], problems: dict[str, MegatronError]
) -> Any:
    """Return the tokenizer, or one of a guessed size with the reason in `absent` or `problems`."""
    kind = run.tokenizer.tokenizer_type or ""
    size, why = _IDS_OF.get(kind, (_USUAL_IDS, "a guess, the size of Llama 3"))
    try:
        return build_tokenizer(run.namespace())
    except MissingInputError:
        if run.tokenizer.vocab_size is None:
            absent.append(
                MissingInputError(
                    f"{kind}: planned with {size} ids, {why}; --vocab-size sets another number"
                )
            )
    except MegatronError as error:
        problems[str(error)] = error
    return NullTokenizer(run.tokenizer.vocab_size or size)


def _build(
    run: ResolvedRun,
    tokenizer: Any,
    call: PretrainCall,
    problems: dict[str, MegatronError],
    *,
    has_data: bool,
) -> None:
    """Build all parts of a run before its first step, once for each kind of pipeline stage.

    Args:
        problems: receives message -> error.
        has_data: whether the inputs of the run are on this machine; if so, datasets are opened.
    """
    # Fake tensors take seconds to import, and only a dry run needs them.
    from megatron.training.setup.fake_device import fake_place, fake_rank
    from megatron.training.setup.traced_memory import contents_of_rank

    run = run.overlaid(_WITHOUT_FILES)

    def attempt(place: Callable[..., Any], rank: int, build: Callable[[Session], object]) -> None:
        with contextlib.redirect_stdout(io.StringIO()), place(rank, run.topology.world_size):
            try:
                groups = create_groups(
                    run, get_embedding_ranks=call.options.get("get_embedding_ranks")
                )
                session = Session(run, groups, Timers(0, "max"), tokenizer, RunStatus())
                publish(session)
                build(session)
            except MegatronError as error:
                problems.setdefault(str(error), error)

    def build_parts(session: Session) -> None:
        assemble(session, call.model_provider, call.forward_step)

    def open_data(session: Session) -> None:
        build_data(run, call.dataset_provider, session.groups, TrainState()).close()

    layout = pipeline_layout(run.transformer_config)
    built: set[Hashable] = set()
    for stage, rank in enumerate(first_rank_of_stages(run)):
        contents = contents_of_rank(run, layout, stage)
        if contents not in built or run.model.spec:
            attempt(fake_rank, rank, build_parts)
        built.add(contents)
    if has_data:
        attempt(fake_place, 0, open_data)


def planned_world_size(config: RunConfig) -> int:
    """Return the number of ranks to plan: --dry-run-world-size, launched ranks or the minimum."""
    if config.launch.dry_run_world_size is not None:
        return config.launch.dry_run_world_size
    info = rank_info.read_rank_info()
    if info.is_launched:
        return info.world_size
    sizes = config.parallelism
    tp, pp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size
    expert_tp = sizes.expert_tensor_parallel_size or tp
    dense = max(tp * sizes.context_parallel_size, 1)
    return pp * math.lcm(dense, max(expert_tp * sizes.expert_model_parallel_size, 1))


def _settings(run: ResolvedRun) -> list[str]:
    table = all_flags()
    return [
        table[name].flag + ("" if table[name].is_switch else f" {_words(value)}")
        for name, value in run.config.changed().items()
        if name not in ("dry_run", "dry_run_world_size")
    ]


def _words(value: object) -> str:
    shown = plain(value)
    return " ".join(map(str, shown)) if isinstance(shown, list) else str(shown)


def _ranks(run: ResolvedRun) -> list[str]:
    parallel, schedule, topology = run.parallelism, run.schedule, run.topology
    sizes = (
        f"tensor {parallel.tensor_model_parallel_size}"
        f" x pipeline {parallel.pipeline_model_parallel_size}"
        f" x context {parallel.context_parallel_size} x data {topology.data_parallel_size}"
    )
    experts = []
    if run.experts.num_moe_experts:
        shards = (
            parallel.expert_tensor_parallel_size or 1,
            parallel.expert_model_parallel_size,
        )
        stages = parallel.pipeline_model_parallel_size
        replicas = topology.world_size // (shards[0] * shards[1] * stages)
        experts.append(
            f"the same ranks for experts: tensor {shards[0]} x expert {shards[1]} x pipeline"
            f" {stages} x data {replicas}"
        )
    steps = schedule.global_batch_size // (schedule.micro_batch_size * topology.data_parallel_size)
    return [
        f"{topology.world_size} = {sizes}, in the order {topology.rank_order}"
        " (first varies fastest)",
        *experts,
        f"global batch {schedule.global_batch_size} = {steps} micro batches"
        f" x {schedule.micro_batch_size}"
        f" samples x {topology.data_parallel_size} replicas",
    ]


def _plan(run: ResolvedRun) -> StepPlan:
    parallel = run.parallelism
    chunks = parallel.virtual_pipeline_model_parallel_size or 1
    forward, input_grad, weight_grad = parallel.pipeline_step_durations
    return StepPlan(
        schedule=parallel.pipeline_schedule,
        pipeline_size=parallel.pipeline_model_parallel_size,
        num_chunks=chunks,
        num_microbatches=run.schedule.global_batch_size
        // (run.schedule.micro_batch_size * run.topology.data_parallel_size),
        group_size=parallel.microbatch_group_size_per_vp_stage if chunks > 1 else None,
        durations=(forward, input_grad, weight_grad),
        overlap_f_b=parallel.overlap_moe_expert_parallel_comm,
    )


def _schedule(run: ResolvedRun) -> list[str]:
    plan = _plan(run)
    if plan.pipeline_size == 1:
        return ["one stage: no pipeline, no bubble"]
    found = plan_report(plan)
    name = schedule_named(plan.schedule).name_with(plan.num_chunks)
    return [
        f"{name}, {plan.num_microbatches} micro batches on {plan.pipeline_size} ranks with"
        f" {plan.num_chunks} chunk(s) each",
        f"simulated bubble {100 * found.bubble:.1f}% (backward = 2 x forward, equal stages)",
        f"most activations in flight, by rank: {found.peak_live_activations}",
    ]


def _kernels(run: ResolvedRun, config: TransformerConfig, device: str) -> list[str]:
    lines = kernels_of_run(run, config, device)
    return [str(line) for line in lines]


def _model(run: ResolvedRun, size: ModelSize) -> list[str]:
    lines = [f"{size.total_parameters:,} parameters (vocabulary padded to {size.vocab_size})"]
    if size.config.num_moe_experts:
        lines.append(f"{size.active_parameters:,} of them active for one token")
    per_token = training_flops_per_token(size)
    per_step = training_flops(size, run.schedule.global_batch_size)
    lines.append(f"{per_token:.4g} FLOP per token, {per_step:.4g} per step (causal)")
    return lines


def _memory(run: ResolvedRun, call: PretrainCall | None) -> list[str]:
    """Return one line for each pipeline stage, from the traced step of its first rank."""
    if call is None:
        return []
    if run.encoders.architecture != "gpt":
        return ["not traced: a traced step has the synthetic samples of pretrain_gpt.py only"]
    # Fake tensors take seconds to import, and only a dry run needs them.
    from megatron.training.setup.traced_memory import UntraceableStepError, memory_of_stages
    from megatron.training.setup.traced_rank import ModelScript

    script = ModelScript(call.model_provider, call.forward_step)
    try:
        stages = memory_of_stages(run.overlaid(_WITHOUT_FILES), script, all_stages=False)
    except UntraceableStepError as error:
        return [f"not traced: {error.found}"]
    lines = [stage.describe() for stage in stages]
    if len(stages) <= (last := run.parallelism.pipeline_model_parallel_size - 1):
        lines.append(f"stages 1 to {last - 1}: tools/memory_report.py with these flags traces them")
    return lines
