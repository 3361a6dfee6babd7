"""Stage A: train a step of the width of Llama 3 8B, and compare our kernels with torch.

    python -m benchmarks.gpu.first_step                # on the GPU of this machine
    python -m benchmarks.gpu.first_step --rehearse     # a tiny model on the CPU

Two layers train a few steps with our kernels, then with torch alone (LATTICE_TRITON=0), from the
same weights on the same batches. The losses must be finite, fall, and agree. The rows list the
lines at which the host waits for the device.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import pretrain_gpt
from benchmarks.gpu.forks import Case, Outcome, Run, first_errors, run_cases
from benchmarks.gpu.small_models import choose_cpu
from megatron.core.foundation import device
from megatron.core.settings.command_line import read_command_line

TOLERANCE = 5e-3
"""Relative difference of losses between two sets of kernels in bf16: they round activations to
u = 2e-3 at different places, and the loss is a mean over thousands of tokens."""
STEPS = 6
_WAITS = "host waits: "
_LIMIT_S = 36
_REPOSITORY = Path(pretrain_gpt.__file__).parent


def words_of(*, is_tiny: bool) -> tuple[str, ...]:
    """Return the flags."""
    width = "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32"
    width += " --num-query-groups 8 --vocab-size 128256 --seq-length 4096"
    if is_tiny:
        width = "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4"
        width += " --num-query-groups 2 --vocab-size 256 --seq-length 64"
    model = (
        f"{width} --num-layers 2 --group-query-attention --max-position-embeddings 4096 --bf16"
        " --hidden-dropout 0 --attention-dropout 0 --swiglu --disable-bias-linear"
        " --normalization RMSNorm --position-embedding-type rope"
        " --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --mock-data"
        " --use-distributed-optimizer --micro-batch-size 2 --global-batch-size 4"
        f" --train-iters {STEPS} --rerun-mode disabled --lr 1e-4 --eval-iters 0 --log-interval 1"
    )
    return tuple(model.split())


def note_waits() -> Counter[str]:
    """Count torch's warnings about host waits from now on, by line of this project."""
    places: Counter[str] = Counter()

    def note(message: Any, *_: Any) -> None:
        if "synchroniz" not in str(message):
            return
        frame = sys._getframe(1)
        while frame.f_back and not frame.f_code.co_filename.startswith(f"{_REPOSITORY}/"):
            frame = frame.f_back
        file = frame.f_code.co_filename.removeprefix(f"{_REPOSITORY}/")
        places[f"{file}:{frame.f_lineno}"] += 1

    warnings.showwarning = note
    warnings.simplefilter("always")
    return places


def main_of_rank() -> None:
    """Train, and print the lines at which the host waits for the device."""
    places = note_waits()
    kind = device.device_type()
    if kind != "cpu":
        device.set_local_device(0)
        torch.get_device_module(kind).set_sync_debug_mode("warn")
    try:
        pretrain_gpt.main()
    finally:
        print(_WAITS + json.dumps(places.most_common(20)))
        print(f"peak GiB: {device.peak_memory_bytes() / 2**30:.2f}")


def row_of(outcome: Outcome, kernels: str) -> dict[str, object]:
    """Return the row of one run; `ok` means that its losses are finite and fall."""
    losses = [loss for _, loss in sorted(outcome.losses.items())]
    is_good = (
        len(losses) == STEPS and all(map(math.isfinite, losses)) and min(losses[1:]) < losses[0]
    )
    row: dict[str, object] = {
        "first step": kernels, "losses": losses, "s": outcome.seconds,
        "ok": is_good and not outcome.problem,
    }  # fmt: skip
    for line in outcome.log.splitlines():
        if line.startswith(_WAITS):
            row["host waits"] = dict(json.loads(line.removeprefix(_WAITS)))
        if line.startswith("peak GiB: "):
            row["peak GiB"] = float(line.split()[-1])
    if not row["ok"]:
        row |= {"problem": outcome.problem, "errors": list(first_errors(outcome.log))}
    return row


def difference(ours: Sequence[float], torchs: Sequence[float]) -> float:
    """Return the largest relative difference of losses; infinite without six finite ones each."""
    if len(ours) != STEPS or len(torchs) != STEPS or not all(map(math.isfinite, [*ours, *torchs])):
        return math.inf
    return max(abs(a / b - 1) for a, b in zip(ours, torchs, strict=True))


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Train a tiny model on the CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train twice and compare."""
    options = read_command_line(Flags, argv, prog="python -m benchmarks.gpu.first_step",
                                description=__doc__)  # fmt: skip
    if options.rehearse:
        choose_cpu()
    run = Run(words=words_of(is_tiny=options.rehearse))
    cases = [Case(name=name, runs=(run,), environment={"LATTICE_TRITON": value})
             for name, value in (("our kernels", "1"), ("torch's kernels", "0"))]  # fmt: skip
    rows: list[dict[str, Any]] = []

    def show(outcome: Outcome) -> None:
        rows.append(row_of(outcome, outcome.case.name))
        print(outcome.log[-20_000:])
        print(f"ROW: {json.dumps(rows[-1])}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        run_cases(cases, Path(folder), main=main_of_rank, ranks_at_once=1, limit_s=_LIMIT_S,
                  whole_limit_s=2 * _LIMIT_S, on_end=show)  # fmt: skip
    found = difference(rows[0]["losses"], rows[1]["losses"])
    is_equal = found <= TOLERANCE
    print(f"ROW: {json.dumps({'first step': 'both', 'difference': found, 'ok': is_equal})}")
    return 0 if is_equal and all(row["ok"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
