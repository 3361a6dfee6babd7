"""Print the comparison of index and blend arrays with the recipe.

python -m tests.parity.data_recipe [number of cases, default 200]
"""

from __future__ import annotations

import sys
from collections import Counter

from tests.unit.datasets import recipe_cases


def _show(title: str, kinds: Counter[str]) -> None:
    print(f"{title}: {kinds.total()} of {kinds.total()} random cases equal")
    for kind, count in sorted(kinds.items()):
        print(f"  {kind:<40} {count:>4}")


def main() -> None:
    """Compare and print; a difference raises with the seed of its case."""
    num_cases = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    corpora, blends = recipe_cases.run(num_cases)
    _show("document, sample and shuffle index", corpora)
    _show("blend", blends)


if __name__ == "__main__":
    main()
