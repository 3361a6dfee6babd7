"""The command; see the package."""

import os
import shlex
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from tests.parity.random_layouts import __doc__ as about
from tests.parity.random_layouts.campaign import Campaign, described
from tests.parity.random_layouts.cases import Case, draw_cases
from tests.parity.random_layouts.outcomes import Kind, Verdict
from tests.parity.random_layouts.settings import from_words

PRECISIONS = ("fp32", "half precision", "fp64 for fp32", "fp32 for half precision")
FORMER = Path(__file__).with_name("former_failures.txt")


def former_failures() -> list[Case]:
    """Return the command lines that once failed."""
    lines = (line.strip() for line in FORMER.read_text().splitlines())
    return [Case.read(line) for line in lines if line and not line.startswith("#")]


def precision_of(case: Case) -> str:
    """Return which errors can be expected of a case."""
    is_half = {"bf16", "fp16"} & set(case.settings)
    return PRECISIONS[case.is_wide * 2 + bool(is_half)]


def print_largest(precision: str, verdicts: list[Verdict]) -> None:
    """Print the largest differences of equal cases from one process."""
    equal = [v.largest for v in verdicts if v.kind is Kind.EQUAL and v.largest]
    if equal:
        worst = {name: max(one[name] for one in equal) for name in equal[0]}
        shown = ", ".join(f"{name} {value:.1e}" for name, value in worst.items())
        print(f"{len(equal)} in {precision}, largest relative differences: {shown}")


def report(campaign: Campaign, show: int) -> int:
    """Print what was found; return the exit status."""
    verdicts = campaign.verdicts
    kinds = Counter(v.kind for v in verdicts)
    failures = Counter(v.signature for v in verdicts if v.is_failure)
    refusals = Counter(v.signature for v in verdicts if v.kind is Kind.REFUSED)
    for signature, count in refusals.most_common():
        examples = [v for v in verdicts if v.kind is Kind.REFUSED and v.signature == signature]
        print(f"\n{count} x {signature}")
        for verdict in examples[:show]:
            print(described(verdict))
    for signature, count in failures.most_common():
        print(f"\nFAILURE, {count} x {signature}\n{described(campaign.shrunk[signature])}")
    for precision in PRECISIONS:
        print_largest(precision, [v for v in verdicts if precision_of(v.case) == precision])
    seconds = campaign.seconds()
    counts = ", ".join(f"{kinds[kind]} {kind.value}" for kind in Kind)
    print(
        f"\n{len(verdicts)} cases in {seconds:.0f} s ({len(verdicts) / seconds:.2f} a second):"
        f" {counts}"
    )
    return 1 if failures else 0


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: int = 100
    seed: int = 1
    having: list[str] = flag([], nargs="+")
    """Draw only cases with all of these flags, without dashes: NAME, or NAME=VALUE."""
    jobs: int = max(1, os.cpu_count() or 2)
    show: int = 1
    """Examples of each kind of refusal."""
    no_shrink: bool = False
    """Show failures as they were drawn."""
    former: bool = False
    """Run former_failures.txt as well."""
    command: str | None = None
    """Run this command line alone."""
    ranks: int = 1
    """Ranks of --command."""
    wide: bool = False
    """fp64 for fp32 in --command."""


def main() -> int:
    """Run cases and report."""
    options = read_command_line(
        Flags, prog="python -m tests.parity.random_layouts", description=about
    )
    torch.set_num_threads(1)
    if options.command is not None:
        settings = from_words(shlex.split(options.command))
        models = [[Case(options.ranks, options.wide, settings)]]
    else:
        models = list(draw_cases(options.seed, options.cases, having=options.having))
        models += [[case] for case in former_failures()] if options.former else []
    campaign = Campaign(models, lambda text: print(text, flush=True), shrinks=not options.no_shrink)
    campaign.run(min(options.jobs, len(models)))
    return report(campaign, options.show)


if __name__ == "__main__":
    sys.exit(main())
