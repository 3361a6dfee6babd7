"""Remove from a constraints file the distributions that another file pins already.

    python tools/constraints_beside.py torch /etc/pip/constraint.txt < constraints.txt > beside.txt

Each argument is the name of a distribution or another constraints file. Two different pins of one
distribution conflict, so an image that pins its own torch needs our file without these lines.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path


def name_of(line: str) -> str:
    """Return the normalised distribution name of a requirement; "" for a comment."""
    found = re.match(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)", line)
    return re.sub(r"[-_.]+", "-", found[1]).lower() if found else ""


def constraints_beside(lines: Iterable[str], others: Iterable[str]) -> Iterator[str]:
    """Yield the lines whose distribution is not in `others`."""
    pinned = {name_of(other) for other in others} - {""}
    return (line for line in lines if name_of(line) not in pinned)


def main() -> None:
    """Filter standard input."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("others", nargs="*", help="a distribution or a constraints file")
    others: list[str] = []
    for argument in parser.parse_args().others:
        is_file = Path(argument).is_file()
        others += Path(argument).read_text().splitlines() if is_file else [argument]
    sys.stdout.writelines(constraints_beside(sys.stdin, others))


if __name__ == "__main__":
    main()
