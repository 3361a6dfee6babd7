"""How far each recipe of few bits ends from bf16: the same model, steps and text.

    python -m tests.parity.low_precision_curves [--steps 1000] [--output CURVES.csv]

A model of 9.8 million parameters, as Llama is built, reads the sources of Python's standard library
as bytes. Prints the mean loss of the last tenth of the steps and that of validation, each over
bf16's. "Other sums" adds the same gradients in two micro batches: so far apart are two runs of one
recipe. A thousand steps of all recipes take about an hour and a half of one core; no test runs it.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from tests.harness.pool import REPOSITORY

RECIPES = {
    "bf16": (),
    "bf16, other sums": ("--micro-batch-size", "2"),
    "FP8, delayed": ("--fp8-format", "hybrid"),
    "FP8, tensorwise": ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "FP8, blockwise": ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
    "MXFP8": ("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "NVFP4": ("--fp4-format", "e2m1"),
}
MODEL = (
    "--num-layers", "12", "--hidden-size", "256", "--num-attention-heads", "4", "--swiglu",
    "--ffn-hidden-size", "704", "--normalization", "RMSNorm", "--position-embedding-type", "rope",
    "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--hidden-dropout", "0",
    "--attention-dropout", "0", "--seq-length", "128", "--max-position-embeddings", "128",
    "--micro-batch-size", "4", "--global-batch-size", "4", "--lr", "5e-4", "--min-lr", "5e-5",
    "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1", "--clip-grad", "1.0", "--bf16",
    "--split", "98,2,0", "--tokenizer-type", "ByteTokenizer", "--eval-iters", "50",
    "--log-interval", "1",
)  # fmt: skip
MEASURED_SHARE = 0.1
VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    steps: int = 1000
    output: Path | None = None
    """CSV of recipe, step, loss."""


def run(*command: str) -> str:
    """Run one process on one core of the CPU from the repository; return what it printed.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "LATTICE_DEVICE": "cpu",
                   "OMP_NUM_THREADS": "1"}  # fmt: skip
    done = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def tokens(folder: Path) -> Path:
    """Make token files of the standard library's sources; return their prefix."""
    text, prefix = folder / "sources.jsonl", folder / "sources"
    run("-m", "benchmarks.real_text", str(text), sysconfig.get_paths()["stdlib"])
    run(
        "tools/preprocess_data.py", "--input", str(text), "--output-prefix", str(prefix),
        "--tokenizer-type", "ByteTokenizer", "--append-eod",
    )  # fmt: skip
    return folder / "sources_text_document"


def curve(data: Path, steps: int, *flags: str) -> tuple[list[float], float]:
    """Train; return the loss of each step, and that of validation after the last one."""
    printed = run(
        "pretrain_gpt.py", *MODEL, *flags, "--train-iters", str(steps), "--eval-interval",
        str(steps), "--data-path", str(data),
    )  # fmt: skip
    losses = re.findall(r"iteration +\d+/.* lm loss: ([\d.E+-]+)", printed)
    at_last = re.findall(r"validation loss at .*? lm loss value: ([\d.E+-]+)", printed)
    return [float(loss) for loss in losses], float(at_last[-1])


def main() -> int:
    """Print the table."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.low_precision_curves", description=__doc__
    )
    rows: list[tuple[str, int | str, float]] = []
    reference = None
    with tempfile.TemporaryDirectory() as folder:
        data = tokens(Path(folder))
        for name, chosen in RECIPES.items():
            losses, validation = curve(data, flags.steps, *chosen)
            last = losses[-max(1, int(MEASURED_SHARE * len(losses))) :]
            ends = (sum(last) / len(last), validation)
            reference = reference or ends
            last_apart, validation_apart = (ends[i] / reference[i] - 1 for i in range(2))
            print(
                f"{name:16} last steps {ends[0]:.4f} ({last_apart:+.2%}),"
                f" validation {ends[1]:.4f} ({validation_apart:+.2%})",
                flush=True,
            )
            rows += [(name, step, loss) for step, loss in enumerate(losses, 1)]
            rows.append((name, VALIDATION, validation))
    if flags.output is not None:
        with flags.output.open("w", newline="") as file:
            csv.writer(file).writerows([("recipe", "step", "loss"), *rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
