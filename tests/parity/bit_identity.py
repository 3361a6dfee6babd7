"""Thirty command lines over all axes, before and after a change that must not change a number.

    python -m tests.parity.bit_identity record before/          # on the commit before
    python -m tests.parity.bit_identity compare before/         # on the commit after

`record` draws command lines (`random_layouts`) until every axis of `AXES` is among them, trains
them, and keeps of each what it printed, every figure with all its bits, the hash of the trained
weights and the digest of the checkpoint. `compare` trains the same command lines and
names each that differs; then it goes on for one step from each checkpoint that was recorded. Both
run on one machine: another processor may add in another order.
"""

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.parity.random_layouts.cases import Case, draw_cases
from tests.parity.random_layouts.outcomes import Kind
from tests.parity.random_layouts.runner import Runner
from tests.parity.random_layouts.settings import Settings, number
from tools.checkpoint.state_digest import checkpoint_digest

SEED = 4711
COUNT = 30
_RECORD = "record.json"


def _beyond_one(name: str) -> Callable[[Settings], bool]:
    return lambda s: number(s, name) > 1


def _given(name: str, value: Any = None) -> Callable[[Settings], bool]:
    return lambda s: name in s and value in (None, s[name])


AXES: Mapping[str, Callable[[Settings], bool]] = {
    "tensor parallel": _beyond_one("tensor-model-parallel-size"),
    "sequence parallel": _given("sequence-parallel"),
    "pipeline": _beyond_one("pipeline-model-parallel-size"),
    "virtual stages": _beyond_one("num-virtual-stages-per-pipeline-rank"),
    "zero bubble": _given("pipeline-schedule", "zb-v"),
    "DualPipe-V": _given("pipeline-schedule", "dualpipe-v"),
    "context parallel": _beyond_one("context-parallel-size"),
    "expert parallel": _beyond_one("expert-model-parallel-size"),
    "expert tensor parallel": _given("expert-tensor-parallel-size"),
    "distributed optimizer": _given("use-distributed-optimizer"),
    "ZeRO 2": _given("data-parallel-sharding-strategy", "optim_grads"),
    "ZeRO 3": _given("data-parallel-sharding-strategy", "optim_grads_params"),
    "torch FSDP2": _given("use-torch-fsdp2"),
    "fp32": lambda s: "bf16" not in s and "fp16" not in s,
    "bf16": _given("bf16"),
    "fp16": _given("fp16"),
    "recomputation": _given("recompute-granularity"),
    "experts": _given("num-experts"),
    "shared experts": _given("moe-shared-expert-intermediate-size"),
    "multi-latent attention": _given("multi-latent-attention"),
    "multi-token prediction": _given("mtp-num-layers"),
    "adapters": _given("lora-rank"),
    "muon": _given("optimizer", "muon"),
    "packed documents": _given("reset-attention-mask"),
    "dropout": _given("hidden-dropout", 0.1),
    "window": _given("window-size"),
}
"""What must be among the command lines: name -> whether one shows it."""


def candidates() -> Iterator[Case]:
    """Yield drawn cases of the precision that a user has, with those that show something rare
    before those that show nothing new."""
    drawn = [case for cases in draw_cases(SEED, 1200) for case in cases if not case.is_wide]
    missing = set(AXES)
    chosen: list[Case] = []
    while missing:
        best = max(drawn, key=lambda case: len(missing & shown(case)))
        new = missing & shown(best)
        if not new:
            raise SystemExit(f"no drawn case shows {', '.join(sorted(missing))}")
        missing -= new
        chosen.append(best)
        drawn.remove(best)
    yield from chosen
    yield from (case for case in drawn if case.ranks > 1)


def shown(case: Case) -> set[str]:
    """Return the axes that a case shows."""
    return {name for name, shows in AXES.items() if shows(case.settings)}


def measure(runner: Runner, case: Case, save: Path) -> dict[str, Any] | None:
    """Train a case; return what must not change, or None if it was refused."""
    result = runner.run(case.with_value("save", str(save)))
    if result.kind is Kind.REFUSED:
        return None
    if result.kind is not Kind.EQUAL:
        raise SystemExit(f"{case}\n{result.text}")
    return {
        "case": str(case),
        "figures": [[figure.name, float(figure.value).hex()] for figure in result.figures],
        "weights": hash_of_tensors(result.weights),
        "checkpoint": checkpoint_digest(newest_checkpoint(save)),
    }


def hash_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names and bytes."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def newest_checkpoint(save: Path) -> Path:
    """Return the directory of the last checkpoint below a save directory."""
    return max(save.glob("iter_*"))


def record(folder: Path, runner: Runner) -> int:
    """Write the record; return the exit status."""
    folder.mkdir(parents=True)
    kept: list[dict[str, Any]] = []
    axes: set[str] = set()
    for case in candidates():
        found = measure(runner, case, folder / f"{len(kept)}")
        if found is None:
            continue
        kept.append(found)
        axes |= shown(case)
        if len(kept) >= COUNT:
            break
    missing = sorted(set(AXES) - axes)
    if missing:
        print(f"not shown, for their cases were refused: {', '.join(missing)}")
    (folder / _RECORD).write_text(json.dumps(kept, indent=1))
    print(f"{len(kept)} command lines, {len(axes)} of {len(AXES)} axes, recorded in {folder}")
    return 1 if missing else 0


def compare(folder: Path, runners: list[Runner]) -> int:
    """Train what was recorded, and continue from its checkpoints; return the exit status."""
    kept = json.loads((folder / _RECORD).read_text())
    with tempfile.TemporaryDirectory(prefix="bit-identity-") as scratch:

        def judge(job: int) -> list[str]:
            return [
                line
                for index in range(job, len(kept), len(runners))
                for line in _differences(
                    kept[index], runners[job], Path(scratch) / str(index), folder / str(index)
                )
            ]

        with ThreadPoolExecutor(len(runners)) as jobs:
            lines = [line for found in jobs.map(judge, range(len(runners))) for line in found]
    print("\n".join(lines))
    if not lines:
        print(f"{len(kept)} command lines: figures, weights and checkpoints equal to the bit;")
        print("every recorded checkpoint was loaded, and a step was taken from it")
    return 1 if lines else 0


def _differences(before: dict[str, Any], runner: Runner, save: Path, old: Path) -> Iterator[str]:
    case = Case.read(before["case"])
    after = measure(runner, case, save)
    if after is None:
        yield f"refused now: {case}"
        return
    figures = dict(map(tuple, before["figures"])), dict(map(tuple, after["figures"]))
    for name in figures[0] | figures[1]:
        values = [side.get(name) for side in figures]
        if values[0] != values[1]:
            old_value, new_value = (value and float.fromhex(value) for value in values)
            yield f"{name}: {old_value} before, {new_value} now: {case}"
            break
    for what in ("weights", "checkpoint"):
        if before[what] != after[what]:
            yield f"{what} differ: {case}"
    further = case.with_value("load", str(old))
    further = further.with_value("train-iters", int(case.settings["train-iters"]) + 1)
    further = further.with_value("override-opt_param-scheduler", True)
    result = runner.run(further)
    if result.kind is not Kind.EQUAL:
        yield f"does not continue from a recorded checkpoint: {further}\n{result.text}"
    elif len(result.figures) == 0:
        yield f"took no step from a recorded checkpoint: {further}"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    what: str = positional(choices=["record", "compare"])
    folder: Path = positional()
    jobs: int = max(1, os.cpu_count() or 2)


def main() -> int:
    """Run the command."""
    options = read_command_line(
        Flags, prog="python -m tests.parity.bit_identity", description=__doc__
    )
    torch.set_num_threads(1)
    count = 1 if options.what == "record" else options.jobs
    runners = [Runner(is_wide=False) for _ in range(count)]
    try:
        if options.what == "record":
            return record(options.folder, runners[0])
        return compare(options.folder, runners)
    finally:
        for runner in runners:
            runner.close()


if __name__ == "__main__":
    sys.exit(main())
