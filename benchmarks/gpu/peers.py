"""Part `peers`: one model by this project and by megatron-core, also with Transformer Engine.

`one_model_peer.py` is the same script for both. Its runs alternate, so that a machine that becomes
slower or hotter does so for all of them.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

from benchmarks.gpu.processes import REPOSITORY, Machine, MeasurementFailedError, run
from benchmarks.gpu.report import Found, Row, Table

SCRIPT = Path(__file__).with_name("one_model_peer.py")
LLAMA_1B = {
    "layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 8, "ffn": 8192, "vocabulary": 128256,
    "sequence": 4096, "batch": 1, "steps": 15,
}  # fmt: skip
TINY = {
    "layers": 1, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "vocabulary": 128,
    "sequence": 16, "batch": 1, "steps": 3,
}  # fmt: skip
ROUNDS = 3
_WARM_UP = 2
_TIMEOUT_S = 900
_ASK = "import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)"


def candidates(machine: Machine) -> tuple[dict[str, tuple[Path, str]], list[str]]:
    """Return (Python, layers) by name, and why others are left out."""
    pythons = {"lattice": Path(sys.executable)}
    missing = []
    if machine.peer_python is None:
        missing.append("megatron-core: --peer-python names no environment that has it")
    else:
        pythons["megatron-core"] = machine.peer_python
    found: dict[str, tuple[Path, str]] = {}
    for project, python in pythons.items():
        found[f"{project}, local layers"] = (python, "local")
        if _has(python, "transformer_engine", machine):
            found[f"{project}, Transformer Engine"] = (python, "transformer_engine")
        else:
            missing.append(f"{project} with Transformer Engine: {python} has no transformer_engine")
    return found, missing


def _has(python: Path, module: str, machine: Machine) -> bool:
    try:
        run([str(python), "-P", "-c", _ASK, module], machine.directory / "logs" / "ask.log",
            timeout_s=60)  # fmt: skip
    except MeasurementFailedError:
        return False
    return True


def measure(machine: Machine) -> Found:
    """Run the candidates in turn."""
    found, missing = candidates(machine)
    sizes, rounds = (TINY, 1) if machine.is_rehearsal else (LLAMA_1B, ROUNDS)
    steps: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    failures: list[str] = []
    for turn in range(rounds):
        for name, (python, layers) in found.items():
            log = machine.directory / "logs" / f"{name.replace(', ', '-').replace(' ', '')}-{turn}"
            # The peer's own package has the name of ours.
            paths = str(REPOSITORY) if python == Path(sys.executable) else ""
            command = [str(python), "-P", str(SCRIPT), layers, json.dumps(sizes)]
            try:
                run(command, log, timeout_s=_TIMEOUT_S, also={"PYTHONPATH": paths})
            except MeasurementFailedError as error:
                failures.append(f"{name}: {error}")
                continue
            lines = log.read_text(encoding="utf-8").splitlines()
            said = json.loads(next(line for line in reversed(lines) if line.startswith('{"sec')))
            steps.setdefault(name, []).append(statistics.median(said["seconds"][_WARM_UP:]))
            peaks[name] = said["peak"]
    tokens = sizes["batch"] * sizes["sequence"]
    rows: list[Row] = []
    for name, values in steps.items():
        step_s = statistics.median(values)
        rows.append({
            "candidate": name, "ms/step": 1e3 * step_s, "lowest": 1e3 * min(values),
            "highest": 1e3 * max(values), "tokens/s": tokens / step_s,
            "peak GiB": peaks[name] / 2**30,
        })  # fmt: skip
    note = f"Llama with {sizes}; {rounds} runs of each in turn, medians. " + (
        "Left out: " + "; ".join(missing) + "." if missing else ""
    )
    return Found(tables=[Table(title="one model on one accelerator", rows=rows, note=note)],
                 failures=failures)  # fmt: skip
