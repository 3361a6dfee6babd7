"""Part `tests`: the tests that need an accelerator, and our Triton kernels compiled on it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from benchmarks.gpu.processes import REPOSITORY, Machine, MeasurementFailedError, run
from benchmarks.gpu.report import Found, Row, Table

_KERNELS = REPOSITORY / "tests" / "gpu_without_gpu" / "triton_kernels"
_TIMEOUT_S = 3600


def suites(machine: Machine) -> dict[str, list[str]]:
    """Return the arguments of pytest for each run of it."""
    found = {"tests marked gpu": ["-m", "gpu", "tests/gpu"]}
    if not machine.is_rehearsal:
        found["Triton kernels"] = [
            str(path.relative_to(REPOSITORY)) for path in sorted(_KERNELS.glob("numerics*.py"))
        ]
    return found


def summary(log: Path) -> str:
    """Return pytest's last line without its frame."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    counts = [line for line in lines if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return counts[-1].strip("= ") if counts else "no test was run"


def measure(machine: Machine) -> Found:
    """Run them."""
    rows: list[Row] = []
    failures: list[str] = []
    for name, words in suites(machine).items():
        log = machine.directory / "logs" / f"{name.replace(' ', '-')}.log"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        also = {} if machine.is_rehearsal else {"LATTICE_TEST_KERNELS_ON_DEVICE": "1"}
        try:
            run(command, log, timeout_s=_TIMEOUT_S, also=also)
        except MeasurementFailedError:
            failures.append(f"{name}: {summary(log)}; see {log}")
        rows.append({"tests": name, "result": summary(log)})
    return Found(tables=[Table(title="the tests of a GPU", rows=rows)], failures=failures)
