"""Print requirements that pin everything to the lowest version that pyproject.toml allows.

    python tools/lowest_versions.py [EXTRA ...]

All extras except dev, docs and gpu by default. Torch is left out, because its oldest build brings
gigabytes of CUDA: install a torch first.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REQUIREMENT = re.compile(r"([\w.-]+)(?:\[[\w,]+\])?(?:>=([\w.]+))?$")
NOT_TESTED = {"dev", "docs", "gpu"}
ITSELF = "megatron-lattice"


def lowest_versions(project: dict[str, Any], extras: Sequence[str]) -> dict[str, str]:
    """Return distribution -> lowest version, "" where none is stated.

    Args:
        project: the table of that name in pyproject.toml.
        extras: optional dependencies to include in addition to the required ones.
    """
    optional = project["optional-dependencies"]
    lines = list(project["dependencies"])
    for extra in extras or sorted(set(optional) - NOT_TESTED):
        lines += optional[extra]
    found = {}
    for line in lines:
        matched = REQUIREMENT.match(line.replace(" ", ""))
        if matched is None:
            raise SystemExit(f"{line!r}: a requirement here is a name, or name>=version")
        if matched[1] not in (ITSELF, "torch"):
            found[matched[1]] = matched[2] or ""
    return found


def main() -> None:
    """Print a requirement a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("extras", nargs="*", help="all that are tested by default")
    extras = parser.parse_args().extras
    path = Path(__file__).resolve().parent.parent / "pyproject.toml"
    project = tomllib.loads(path.read_text())["project"]
    for name, version in sorted(lowest_versions(project, extras).items()):
        print(f"{name}=={version}" if version else name)


if __name__ == "__main__":
    main()
