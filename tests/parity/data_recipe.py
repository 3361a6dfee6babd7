"""Print the comparison of index and blend arrays with the recipe.

python -m tests.parity.data_recipe [number of cases, default 200]
"""

from collections import Counter
from dataclasses import dataclass

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.unit.datasets import recipe_cases


@dataclass(frozen=True, kw_only=True)
class Flags:
    """How much to compare."""

    num_cases: int = positional(200)
    """Random cases (%(default)s)."""


def _show(title: str, kinds: Counter[str]) -> None:
    print(f"{title}: {kinds.total()} of {kinds.total()} random cases equal")
    for kind, count in sorted(kinds.items()):
        print(f"  {kind:<40} {count:>4}")


def main() -> None:
    """Compare and print; a difference raises with the seed of its case."""
    flags = read_command_line(Flags, description=__doc__)
    corpora, blends = recipe_cases.run(flags.num_cases)
    _show("document, sample and shuffle index", corpora)
    _show("blend", blends)


if __name__ == "__main__":
    main()
