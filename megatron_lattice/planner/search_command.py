"""Search the fastest layout for a command line, and return the command line that trains with it.

`tools/plan.py search` and `pretrain_gpt.py --auto-parallel` call this module. Model, batch and
precision are read from the resolved settings. The preferred layouts are resolved, and checked by
all rules of a run, before the report shows them.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import FlagSpec
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.cli.parser import ParsedCommand, parse_command_line
from megatron.training.config.resolved import ResolvedRun, resolve_vocabulary
from megatron.training.config.run import (
    RunConfig,
    all_flags,
    flags_by_spelling,
    opposites_by_spelling,
    plain,
)
from megatron.training.metrics.flops import training_flops
from megatron.training.metrics.model_size import ModelSize
from megatron.training.rules import resolve_and_check
from megatron_lattice import read_deepspeed_config
from megatron_lattice.planner.cluster_calibration import calibrate_to_runs
from megatron_lattice.planner.correction import ALIKE
from megatron_lattice.planner.hardware import Gpu, Hardware, gpu_named
from megatron_lattice.planner.layout_search import (
    CORRECTED,
    EQUALLY_GOOD,
    SearchResult,
    search_layouts,
)
from megatron_lattice.planner.measured_run import measured_runs
from megatron_lattice.planner.predictor import Predictor, load_predictor
from megatron_lattice.planner.run_workload import (
    FREE_LAYOUT,
    STAGES,
    choices_of,
    settings_of_layout,
    workload_of_run,
)
from megatron_lattice.planner.search_report import Chosen, refusal, report
from megatron_lattice.planner.workload import Workloads

WITHOUT_A_RUN: Mapping[str, Any] = {"train_iters": 1000, "lr": 3e-4}
"""Settings that a run requires and a search does not, with placeholders."""
NUM_SHOWN = 5
MOST_CHECKED = 64
"""Maximum number of layouts that are checked by the rules of a run."""
_NOT_OF_A_RUN = ("auto_parallel", "dry_run", "dry_run_world_size", "calibrate_planner")


@dataclass(frozen=True)
class Cluster:
    """The GPUs to search for, with their usual network or another one."""

    gpu: str
    world_size: int
    nvlink_domain: int | None = None
    nic_gbytes_per_s: float | None = None
    calibration: Sequence[Path] = ()
    """Directories of runs that were measured on the cluster."""

    def build(self, hardware: Hardware) -> Gpu:
        """Return the GPU with its network.

        Raises:
            ConfigError: the planner has no constants for it.
        """
        gpu = gpu_named(self.gpu, hardware)
        if self.world_size < 1:
            raise ConfigError(
                f"{self.world_size} GPUs.",
                rule="a search needs the number of GPUs",
                flags=["--num-gpus", "--dry-run-world-size"],
                fix="give the number of GPUs",
            )
        domain, nic = self.nvlink_domain, self.nic_gbytes_per_s
        return Gpu(
            **vars(gpu)
            | {
                "nvlink_domain": domain or gpu.nvlink_domain,
                "nic_bytes_per_s": nic * 1e9 if nic else gpu.nic_bytes_per_s,
            }
        )


@dataclass(frozen=True)
class Searched:
    """A search with its report.

    Attributes:
        chosen: rows of `found` that are shown, the best first.
    """

    text: str
    found: SearchResult
    chosen: Sequence[int]


def search_command(
    words: Sequence[str],
    cluster: Cluster,
    *,
    script: str,
    has_free_layout: bool = False,
    has_details: bool = False,
) -> Searched:
    """Search and return the report.

    Args:
        words: flags of `pretrain_gpt.py`; if they name parallel sizes, micro batch, sharding or
            recomputation, the search keeps these values.
        script: start of the command line in the report.
        has_free_layout: search the sizes that a file sets, too.
        has_details: report the parts of the step and the reasons against other layouts, too.
    Raises:
        ConfigError: the settings cannot be used, or nothing fits.
    """
    command = parse_command_line(
        list(words), args_defaults=WITHOUT_A_RUN, deepspeed_reader=read_deepspeed_config
    )
    predictor = load_predictor()
    gpu = cluster.build(predictor.hardware)
    predictor = calibrate_to_runs(predictor, measured_runs(cluster.calibration), gpu)
    of_file = sorted(command.given & FREE_LAYOUT.keys() - _names_of(words))
    if has_free_layout:
        # No flag undoes the recomputation of a file: it stays.
        of_file = [name for name in of_file if not name.startswith("recompute")]
        command = dataclasses.replace(command, given=command.given - set(of_file))
    run, model = model_of_command(command, gpu, cluster.world_size)
    choices = choices_of(command.config, command.given)
    found = search_layouts(model, choices, predictor)
    fixed = ", ".join(_fixed_text(command, name) for name in of_file)
    if not len(found.order):
        raise _with_fixed(refusal(found, model, choices, predictor), fixed, has_free_layout)
    order = surest_first(found, predictor)
    chosen, broken = _allowed(found, order, command, run, cluster.world_size, of_file)
    if not chosen:
        raise _with_fixed(broken[0], fixed, has_free_layout)
    settings = chosen[0].settings
    overrides = of_file if has_free_layout else ()
    flops = training_flops(ModelSize.from_settings(run), int(model.global_batch_size[0]))
    line = command_line(words, command, settings, cluster.world_size, gpu, script, overrides)
    text = report(
        found, chosen, predictor, flops=flops, refused=len(broken), has_details=has_details
    )
    notes = []
    if of_file:
        notes.append(
            f"searched in place of the file's: {fixed}"
            if has_free_layout
            else f"fixed by the file: {fixed} (--free-layout searches these)"
        )
    if missing := [all_flags()[name].flag for name in _without_length(command)]:
        notes.append(f"{' and '.join(missing)} were not given: the last line has placeholders")
    text = "\n".join([text, *notes, "", line])
    return Searched(text, found, [each.index for each in chosen])


def _with_fixed(error: MegatronError, fixed: str, has_free_layout: bool) -> MegatronError:
    """Return the error, with the settings of a file that the search could not change."""
    if not fixed or has_free_layout:
        return error
    rule = f"{error.rule}; fixed by the file: {fixed}"
    fix = f"--free-layout searches these; or {error.fix}"
    return ConfigError(error.found, rule=rule, flags=error.flags, fix=fix)


def _fixed_text(command: ParsedCommand, name: str) -> str:
    return f"{all_flags()[name].flag} {plain(command.config.value_of(name))}"


def _names_of(words: Sequence[str]) -> set[str]:
    """Return the settings that a command line names."""
    found = [_spec_of(word) for word in words if word.startswith("--")]
    return {spec.name for spec in found if spec is not None}


def _spec_of(word: str) -> FlagSpec | None:
    spelling = word.partition("=")[0].replace("_", "-")
    return flags_by_spelling().get(spelling) or opposites_by_spelling().get(spelling)


def run_of_words(words: Sequence[str], world_size: int) -> ResolvedRun:
    """Resolve and check the flags of `pretrain_gpt.py` for so many ranks.

    Raises:
        MegatronError: a rule of a run is broken.
    """
    return resolved_for(
        parse_command_line(
            list(words), args_defaults=WITHOUT_A_RUN, deepspeed_reader=read_deepspeed_config
        ),
        {},
        world_size,
    )


def model_of_command(
    command: ParsedCommand, gpu: Gpu, world_size: int
) -> tuple[ResolvedRun, Workloads]:
    """Resolve the settings for one process, and read model and batch from them.

    Raises:
        ConfigError: no global batch, or a precision that the planner has no constants for.
    """
    batch = command.config.schedule.global_batch_size
    if not batch:
        raise ConfigError(
            "--global-batch-size is not given.",
            rule="layouts are compared at the global batch of the training",
            flags=["--global-batch-size"],
            fix="add it, for example --global-batch-size 1024",
        )
    alone = {**FREE_LAYOUT, "global_batch_size": 1, "rampup_batch_size": None}
    run = resolved_for(command, alone, 1)
    model = workload_of_run(run, gpu, world_size)
    columns = {"global_batch_size": np.array([float(batch)])}
    if "cp_comm_type" not in command.given:
        columns["exchanges_heads"] = np.ones(1)  # where the heads divide
    return run, model.replace(**columns)


def resolved_for(
    command: ParsedCommand, settings: Mapping[str, Any], world_size: int
) -> ResolvedRun:
    """Resolve and check a command with other settings for so many ranks.

    Raises:
        MegatronError: a rule of a run is broken.
    """
    values = {**command.config.flat(), **settings}
    config = RunConfig.from_values({n: v for n, v in values.items() if n not in _NOT_OF_A_RUN})
    changed = ParsedCommand(config=config, given=command.given | frozenset(settings))
    run = resolve_and_check(lambda: changed, lambda _: world_size)
    return resolve_vocabulary(run, build_tokenizer(run.namespace()).vocab_size)


def _allowed(
    found: SearchResult,
    order: NDArray[np.int_],
    command: ParsedCommand,
    run: ResolvedRun,
    world_size: int,
    of_file: Sequence[str],
) -> tuple[list[Chosen], list[MegatronError]]:
    """Return the first layouts that the rules of a run allow, one for each split of ranks."""
    chosen: list[Chosen] = []
    broken: list[MegatronError] = []
    splits = set()
    for index in order[: 100 * MOST_CHECKED]:
        row = found.table.take(np.array([index]))
        split = tuple(
            float(getattr(row, name)[0])
            for name in ("tensor_size", "pipeline_size", "context_size", "expert_size")
        )
        if split in splits:
            continue
        settings = settings_of_layout(
            row,
            has_dispatcher="moe_token_dispatcher_type" in command.given,
            num_predicted=run.transformer_config.mtp_num_layers or 0,
            needs_layout="pipeline_model_parallel_layout" in of_file,
        )
        if command.given & set(STAGES):
            # The settings of the run determine the stages.
            kept = {*STAGES, "num_virtual_stages_per_pipeline_rank"} & FREE_LAYOUT.keys()
            settings = {name: value for name, value in settings.items() if name not in kept}
        try:
            resolved_for(command, settings, world_size)
        except MegatronError as error:
            broken.append(error)
        else:
            splits.add(split)
            chosen.append(Chosen(int(index), settings))
        if len(chosen) == NUM_SHOWN or len(chosen) + len(broken) == MOST_CHECKED:
            break
    return chosen, broken


def surest_first(found: SearchResult, predictor: Predictor) -> NDArray[np.int_]:
    """Return the layouts that fit, the fastest first, and the surest of about equal ones first.

    Among predictions within `EQUALLY_GOOD` of the fastest, compared with `caution`, a layout that
    is similar to measured runs is the better choice, then one that does not split the sequence,
    then one with a small micro batch. Below `ALIKE` no measured run is similar.
    """
    first = found.order[:CORRECTED]
    compared = found.compared[first]
    near = first[compared <= compared.min() * (1 + EQUALLY_GOOD)]
    table = found.table.take(near)
    like = predictor.correction.similarity(table, predictor.hardware)
    like = np.where(like < ALIKE, 0.0, np.round(like, 1))
    keys = (found.seconds[near], table.micro_batch_size, table.context_size, -like)
    return np.concatenate([near[np.lexsort(keys)], found.order[len(near) :]])


def command_line(
    words: Sequence[str],
    command: ParsedCommand,
    settings: Mapping[str, Any],
    world_size: int,
    gpu: Gpu,
    script: str,
    overrides: Sequence[str] = (),
) -> str:
    """Return the command line of a layout: the user's words, and the settings of the layout.

    Args:
        overrides: settings of a file, which need a flag even for the default.
    """
    per_node = min(8, world_size) if gpu.nvlink_domain >= 8 else int(gpu.nvlink_domain)
    launcher = f"torchrun --nproc-per-node {per_node}"
    if world_size > per_node:
        launcher += f" --nnodes {world_size // per_node} --rdzv-backend c10d --rdzv-endpoint $HOST"
    kept = _without(words, {*settings, *_NOT_OF_A_RUN})
    values = {**{name: WITHOUT_A_RUN[name] for name in _without_length(command)}, **settings}
    flags = [
        word
        for name, value in values.items()
        for word in words_of_flag(name, value, is_explicit=name in overrides)
    ]
    return f"{launcher} {script} {shlex.join([*kept, *flags])}"


def _without_length(command: ParsedCommand) -> list[str]:
    """Return the settings that a run requires and this command lacks."""
    has_samples = bool(command.config.schedule.train_samples)
    return [
        name
        for name in WITHOUT_A_RUN
        if name not in command.given and not (name == "train_iters" and has_samples)
    ]


def _without(words: Sequence[str], names: set[str]) -> list[str]:
    """Return a command line without some flags and their values."""
    kept: list[str] = []
    is_dropped = False
    for word in words:
        if word.startswith("--"):
            spec = _spec_of(word)
            is_dropped = spec is not None and spec.name in names
        if not is_dropped:
            kept.append(word)
    return kept


def words_of_flag(name: str, value: Any, *, is_explicit: bool = False) -> list[str]:
    """Return the words that set a flag; an empty list if the value is its default.

    Args:
        is_explicit: write the default, too.
    """
    spec = all_flags()[name]
    if value is None or (value == spec.default and not is_explicit):
        return []
    if spec.is_switch:
        return [spec.flag] if value else list(spec.opposites[:1])
    shown = plain(value)
    return [spec.flag, *map(str, shown if isinstance(shown, list) else [shown])]
