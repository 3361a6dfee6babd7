"""Launch lines put together from parts of recipes: each can be planned, or breaks a shared rule.

    python -m tests.parity.recipe_lines [--seed 1] [--drawn 2000]

Every two parts of two axes of tests/fixtures/compatibility/recipe_flags.toml meet on a line; drawn
lines take parts of a few axes, and other flags about as often as recipes have them. Lines are
planned as `--dry-run` does, in this process; about 40 of them a second.
"""

import random
import shlex
import sys
import tomllib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from megatron.core.foundation.errors import MegatronError
from megatron.core.settings.command_line import read_command_line
from megatron.training.cli.dry_run import describe_run
from megatron.training.cli.parser import parse_command_line

_FIXTURES = Path(__file__).parents[1] / "fixtures" / "compatibility"
_RECIPES = tomllib.loads((_FIXTURES / "recipe_flags.toml").read_text())
PARTS: dict[str, dict[str, str]] = _RECIPES["parts"]
OFTEN: dict[str, list[float | str]] = _RECIPES["often"]
"""Flag -> its share of lines, and its values."""
BASES: dict[str, str] = tomllib.loads((_FIXTURES / "launch_lines.toml").read_text())["bases"]
BASES_OF_PARTS = ("small", "experts")
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
    "cpu_offloading_num_layers=4 with recomputation",
    "recompute_modules names shared_experts together with moe_shared_expert_overlap",
    "distribute_saved_activations is on together with sequence_parallel",
    "recompute_method='block' with recompute_granularity='selective'",
    "recompute_method='uniform' with recompute_granularity='selective'",
    "--swiglu and --squared-relu are both on",
    "--lr-warmup-iters in a run with --train-samples",
    "--lr-wsd-decay-iters in a run with --train-samples",
    "--lr-decay-style WSD without the length of its decay phase",
    "--override-opt-param-scheduler with --use-checkpoint-opt-param-scheduler",
    "--moe-use-upcycling with experts of width",
    "--swiglu and --quick-geglu are both on",
    "--quick-geglu and --squared-relu are both on",
    "--ddp-bucket-size ",
    "--num-layers-per-virtual-pipeline-stage and --",
    "--num-distributed-optimizer-instances 2 for 1 replica(s) of the experts",
    "12 layers ",
    "with order 'tp-cp-ep-pp-dp' the experts' pipeline stages hold other ranks",
    "linear_num_key_heads=4 cannot be split over tensor-parallel size 8",
    "pipeline ranks with 5, 7 layers cannot be cut into",
    "the pipeline layout has 0 'm' instead of",
    *(f"{layers} layers of a pipeline rank cannot be cut into chunks" for layers in (3, 6, 7, 12)),
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


def draw_line(base: str, rng: random.Random) -> tuple[Line, list[str]]:
    """Return parts of up to five axes, and single flags that stand beside them."""
    axes = [axis for axis in PARTS if base == "experts" or not axis.startswith("experts")]
    line = {}
    for axis in sorted(rng.sample(axes, rng.randint(1, 5)), key=axes.index):
        names = [n for n in PARTS[axis] if base == "experts" or not n.startswith("experts")]
        line[axis] = rng.choice(names)
    often = []
    for flag, (share, *values) in OFTEN.items():
        if rng.random() < float(share):
            often += [flag, str(rng.choice(values))] if values else [flag]
    return line, often


def words_of(base: str, line: Line, often: Sequence[str] = ()) -> list[str]:
    """Return the words of a line, with those of a dry run."""
    words = shlex.split(f"{BASES[base]} {BATCH}") + list(often)
    for axis, name in line.items():
        for word in shlex.split(PARTS[axis][name]):
            if word.startswith("!"):
                words = _without(words, word[1:])
            else:
                words.append(word)
    return [*words, "--dry-run", "--dry-run-world-size", str(RANKS)]


def _without(words: list[str], flag: str) -> list[str]:
    """Return the words without a flag and its values."""
    kept, is_left_out = [], False
    for word in words:
        if word.startswith("--"):
            is_left_out = word == flag
        if not is_left_out:
            kept.append(word)
    return kept


def refusals_of(words: list[str]) -> list[str]:
    """Return what a dry run refuses; nothing if it plans the run."""
    try:
        describe_run(lambda: parse_command_line(words))
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
    drawn: int = 0
    """Lines drawn at random; 0 puts every two parts together."""


def main() -> int:
    """Plan all lines; print what is refused and how often."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.recipe_lines", description=__doc__
    )
    rng = random.Random(flags.seed)
    lines: list[tuple[str, Line, list[str]]] = [
        (base, *draw_line(base, rng)) for base in BASES_OF_PARTS * (flags.drawn // 2)
    ] or [(base, line, []) for base in BASES_OF_PARTS for line in draw_lines(base, flags.seed)]
    planned, own = 0, 0
    examples: dict[str, list[Line]] = defaultdict(list)
    for base, line, often in lines:
        found = refusals_of(words_of(base, line, often))
        planned += not found
        own += not all(map(is_shared, found))
        for refusal in found:
            examples[refusal].append({axis: name for axis, name in line.items() if name != "none"})
    for refusal, of in sorted(examples.items(), key=lambda item: -len(item[1])):
        kind = "shared" if is_shared(refusal) else "OWN   "
        print(f"{len(of):4d}  {kind}  {refusal}")
        if kind != "shared":
            print(f"              {min(of, key=len)}")
    print(
        f"{len(lines)} lines: {planned} planned, {len(lines) - planned - own} refused by rules of"
    )
    print(f"Megatron-LM, {own} refused by a rule that Megatron-LM does not have")
    return 1 if own else 0


if __name__ == "__main__":
    sys.exit(main())
