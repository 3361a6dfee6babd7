"""Say what is installed, what is used and why the rest is not, and whether two ranks can meet.

    python tools/doctor.py                 # all of it; under half a minute
    python tools/doctor.py --no-self-test
    python tools/doctor.py --imports       # also import every optional library
    python tools/doctor.py --json

The exit status is 1 if something is wrong; what is merely not installed is not wrong.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron.training.doctor import findings
from megatron.training.doctor.findings import Finding, State
from megatron.training.doctor.self_test import python_of, run_rank, self_test


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    no_self_test: bool = False
    """Start no ranks."""
    imports: bool = False
    """Import every optional library."""
    json: bool = False
    """Write a JSON list of findings."""
    self_test_rank: bool = flag(False, is_hidden=True)


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    """Parse the command line."""
    return read_command_line(Flags, argv, description=__doc__.split("\n")[0])


def examine(options: Flags) -> list[Finding]:
    """Return everything that was found."""
    parts = (
        findings.base_findings,
        findings.device_findings,
        findings.backend_findings,
        lambda: findings.library_findings(imports=options.imports),
        findings.network_findings,
        findings.environment_findings,
    )
    found: list[Finding] = []
    for part in parts:
        try:
            found += part()
        except Exception as error:  # one broken part must not hide the others
            found.append(findings.problem_of("doctor", "an examination", error))
    if not options.no_self_test:
        found.append(self_test(python_of(os.path.abspath(__file__), "--self-test-rank")))
    return found


def report(found: Sequence[Finding]) -> str:
    """Return the findings as text, a section after the other."""
    lines: list[str] = []
    width = max(len(one.name) for one in found)
    section = ""
    for one in found:
        if one.section != section:
            section = one.section
            lines.append(section)
        lines.append(f"  {one.state.value} {one.name:{width}}  {one.text}")
    problems = sum(one.state is State.PROBLEM for one in found)
    lines.append("no problems" if not problems else f"{problems} problem(s), marked !!")
    return "\n".join(lines)


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Examine and print; return the exit status."""
    options = parse_args(argv)
    if options.self_test_rank:
        return run_rank()
    found = examine(options)
    if options.json:
        shown = [{**vars(one), "state": one.state.name.lower()} for one in found]
        print(json.dumps(shown, indent=2))
    else:
        print(report(found))
    is_wrong = any(one.state is State.PROBLEM for one in found)
    return ExitStatus.FAILED if is_wrong else ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
