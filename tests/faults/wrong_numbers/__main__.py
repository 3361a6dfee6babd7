"""The command; see the package."""

import sys
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.faults.wrong_numbers import __doc__ as about
from tests.faults.wrong_numbers import bit_flips, causes

CAMPAIGNS: dict[str, tuple[Callable[[int, int], bool], int]] = {
    "bits": (bit_flips.campaign, 62),
    "causes": (causes.campaign, 20),
}
"""Name -> (what returns whether all cases were right, given their number and a seed; number)."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    campaigns: tuple[str, ...] = positional((), metavar="CAMPAIGN", help=", ".join(CAMPAIGNS))
    cases: int = 0
    """How many of each campaign; 0 is its own number."""
    seed: int = 0
    """Of ranks, steps, elements and bits."""


def main() -> int:
    """Run what the command line says."""
    flags = read_command_line(Flags, description=about)
    chosen = [CAMPAIGNS[name] for name in flags.campaigns or CAMPAIGNS]
    results = [run(flags.cases or number, flags.seed) for run, number in chosen]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
