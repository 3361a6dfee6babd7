"""Launch lines put together from parts of recipes: each can be planned, or breaks a shared rule.

    python -m tests.parity.recipe_lines [--seed 1]

Every two parts of two axes of tests/fixtures/compatibility/recipe_flags.toml meet on a line. Lines
are planned as `--dry-run` does, in this process; a quarter of a minute for all of them.
"""

from __future__ import annotations

import random
import shlex
import sys
import tomllib
from collections import Counter
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from megatron.core.foundation.errors import MegatronError
from megatron.core.settings.command_line import read_command_line
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import parse_command_line

_FIXTURES = Path(__file__).parents[1] / "fixtures" / "compatibility"
PARTS: dict[str, dict[str, str]] = tomllib.loads((_FIXTURES / "recipe_flags.toml").read_text())[
    "parts"
]
BASES: dict[str, str] = tomllib.loads((_FIXTURES / "launch_lines.toml").read_text())["bases"]
RANKS = 32
BATCH = "--global-batch-size 1024"
"""On every line: as many samples as any layout of the ranks divides into micro batches."""

SHARED_RULES = (
    "--use-torch-fsdp2 with --pipeline-model-parallel-size",
    "--use-torch-fsdp2 with --use-distributed-optimizer",
    "--use-torch-fsdp2 with --overlap-param-gather",
    "--use-torch-fsdp2 with --overlap-moe-expert-parallel-comm",
    "overlap_moe_expert_parallel_comm with recomputed expert layers",
    "overlap_moe_expert_parallel_comm with 8 experts",
    "moe_shared_expert_overlap with",
    "recompute_modules names shared_experts beside moe_shared_expert_overlap",
)
"""Beginnings of refusals that Megatron-LM makes too."""

Line = dict[str, str]
"""Axis -> name of a part."""


def draw_lines(base: str, seed: int = 1, tries: int = 30) -> list[Line]:
    """Return lines of one base on which every two parts of two axes meet; tied draws by the seed.

    Each line begins with a pair that is missing; of some fillings the one with most others is kept.
    """
    axes = {
        axis: [name for name in parts if base == "experts" or not name.startswith("experts")]
        for axis, parts in PARTS.items()
        if base == "experts" or not axis.startswith("experts")
    }
    rng = random.Random(seed)
    missing = {((a, x), (b, y)) for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]}
    lines: list[Line] = []
    while missing:
        pair = rng.choice(sorted(missing))
        fillings = [
            {axis: rng.choice(names) for axis, names in axes.items()} | dict(pair)
            for _ in range(tries)
        ]
        best = max(fillings, key=lambda line: len(missing & {*combinations(line.items(), 2)}))
        lines.append(best)
        missing -= {*combinations(best.items(), 2)}
    return lines


def words_of(base: str, line: Line) -> list[str]:
    """Return the words of a line, with those of a dry run."""
    parts = [BASES[base], BATCH, *(PARTS[axis][name] for axis, name in line.items())]
    planned = ["--dry-run", "--dry-run-world-size", str(RANKS)]
    return [word for part in parts for word in shlex.split(part)] + planned


def refusals_of(base: str, line: Line) -> list[str]:
    """Return what a dry run refuses; nothing if it plans the run."""
    try:
        describe_run(lambda: parse_command_line(words_of(base, line)))
    except MegatronError as error:
        return [each.found for each in error.problems or (error,)]
    return []


def is_shared(refusal: str) -> bool:
    """Return whether Megatron-LM refuses this too."""
    return refusal.startswith(SHARED_RULES)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    seed: int = 1


def main() -> int:
    """Plan all lines; print what is refused and how often."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.recipe_lines", description=__doc__
    )
    planned, own, refused = 0, 0, Counter[str]()
    for base in ("small", "experts"):
        for line in draw_lines(base, flags.seed):
            found = refusals_of(base, line)
            planned += not found
            refused.update(found)
            if not all(map(is_shared, found)):
                own += 1
                print(base, {axis: name for axis, name in line.items() if name != "none"}, found)
    for refusal, count in refused.most_common():
        print(f"{count:4d}  {'shared' if is_shared(refusal) else 'OWN   '}  {refusal}")
    print(f"{planned} planned, {own} refused by a rule that Megatron-LM does not have")
    return 1 if own else 0


if __name__ == "__main__":
    sys.exit(main())
