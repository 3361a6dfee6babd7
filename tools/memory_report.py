"""Show the memory of a rank at every stage of sharding, in one layout or in all layouts.

    python tools/memory_report.py --world-size 8 --num-layers 24 --hidden-size 2048 \\
        --num-attention-heads 16 --seq-length 2048 --micro-batch-size 1 --bf16 --vocab-size 50000
    python tools/memory_report.py --world-size 64 --all-layouts --fits 80 ...

The command reads the flags of pretrain_gpt.py. It starts no ranks and needs no accelerator. A line
shows the pipeline stage that needs the most memory, at its peak, from a traced step; a trace takes
about a second. Workspaces of kernels and fragmentation of the allocator are not included.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import flags_provider, settings_of
from megatron.core.settings.flags import flag
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training.cli.dry_run import planned_world_size
from megatron.training.cli.parser import ParsedCommand, parse_command_line
from megatron.training.config.resolved import resolve_vocabulary
from megatron.training.config.run import RunConfig
from megatron.training.metrics.memory_timeline import Kind
from megatron.training.rules import resolve_and_check
from megatron.training.setup.traced_memory import StageMemory, memory_of_stages
from megatron.training.setup.traced_rank import ModelScript
from megatron_lattice import read_deepspeed_config
from pretrain_gpt import forward_step, model_provider

WITHOUT_A_RUN = {"train_iters": 1, "lr": 1e-3}
"""Settings that a run requires and a report does not, with placeholders."""
SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


@dataclass(frozen=True)
class Row:
    """One stage in one layout."""

    layout: tuple[int, int, int, int]
    """tensor, pipeline, context, data."""
    stage: int
    memory: StageMemory | None
    reason: str = ""
    """Reason why this combination cannot run; empty if it can."""


@dataclass(frozen=True, kw_only=True)
class ReportFlags:
    """Memory report."""

    world_size: int | None = None
    """Ranks to plan for."""
    all_layouts: bool = False
    """Report every split."""
    fits: float | None = flag(None, metavar="GIB")
    """Show only lines of at most this size."""


def layouts(values: dict[str, Any], world_size: int, *, is_all: bool) -> Iterator[dict[str, int]]:
    """Yield sizes of the model-parallel axes: the flags' values, or all powers of two that fit."""
    if not is_all:
        yield {name: values.get(name, 1) for name in SIZES}
        return
    powers = [2**i for i in range(world_size.bit_length())]
    for tp in powers:
        for pp in powers:
            for cp in powers:
                if world_size % (tp * pp * cp) == 0:
                    yield dict(zip(SIZES, (tp, pp, cp), strict=True))


def traced(values: dict[str, Any], world_size: int) -> StageMemory:
    """Return the memory of the pipeline stage that needs the most.

    Raises:
        ConfigError: the settings conflict.
    """
    command = ParsedCommand(config=RunConfig.from_values(values))
    run = resolve_and_check(lambda: command, lambda config: world_size)
    run = resolve_vocabulary(run, build_tokenizer(run.namespace()).vocab_size)
    stages = memory_of_stages(run, ModelScript(model_provider, forward_step))
    return max(stages, key=lambda found: found.peak_bytes)


def rows(values: dict[str, Any], world_size: int, *, is_all: bool) -> Iterator[Row]:
    """Yield all stages in the requested layouts."""
    for sizes in layouts(values, world_size, is_all=is_all):
        tp, pp, cp = (sizes[name] for name in SIZES)
        layout = (tp, pp, cp, world_size // max(tp * pp * cp, 1))
        for stage, strategy in enumerate(SHARDING_STRATEGIES):
            asked = {
                **values,
                **sizes,
                "data_parallel_sharding_strategy": strategy,
                "use_distributed_optimizer": stage > 0,
            }
            try:
                yield Row(layout, stage, traced(asked, world_size))
            except ConfigError as problem:
                first = problem.problems[0] if problem.problems else problem
                yield Row(layout, stage, None, first.found)


def table(found: Sequence[Row], fits: float | None) -> list[str]:
    """Return the lines of the report, in GiB."""
    titles = "".join(f"{name:>14}" for name in (*(kind.value for kind in Kind), "total"))
    lines = [f"{'tp x pp x cp x dp':<20}{'stage':>5}{titles}  (GiB)"]
    refused: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for row in found:
        if row.memory is None:
            refused.setdefault((row.layout, row.reason), []).append(row.stage)
        elif fits is None or row.memory.peak_bytes <= fits * 2**30:
            amounts = (*row.memory.kinds.values(), row.memory.peak_bytes)
            shown = "".join(f"{amount / 2**30:>14.3f}" for amount in amounts)
            lines.append(f"{' x '.join(map(str, row.layout)):<20}{row.stage:>5}{shown}")
    if len(lines) == 1 and fits is not None:
        lines.append(f"nothing fits in {fits:g} GiB")
    if fits is None:
        lines += [
            f"{' x '.join(map(str, layout))}, stage {', '.join(map(str, stages))}: {reason}"
            for (layout, reason), stages in refused.items()
        ]
    return lines


@tool
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status."""
    command = parse_command_line(
        arguments,
        extra_args_provider=flags_provider(ReportFlags),
        args_defaults=WITHOUT_A_RUN,
        deepspeed_reader=read_deepspeed_config,
    )
    flags = settings_of(ReportFlags, command.extra)
    world_size = flags.world_size or planned_world_size(command.config)
    found = list(rows(command.config.changed(), world_size, is_all=flags.all_layouts))
    if not any(row.memory for row in found):
        print(found[0].reason, file=sys.stderr)
        return ExitStatus.WRONG_USAGE
    print("\n".join(table(found, flags.fits)))
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
