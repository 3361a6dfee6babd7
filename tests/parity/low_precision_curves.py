"""Train the same model in bf16 and by each low-precision recipe, and compare the losses.

    python -m tests.parity.low_precision_curves [--steps 1000] [--output CURVES.csv]

A Llama-like model of 2 layers reads the sources of Python's standard library as bytes. Prints the
mean loss of the last tenth of the steps and the validation loss, each relative to bf16, and fails
if an FP8 recipe ends more than 1 % above bf16. "Other sums" adds the same gradients in two micro
batches, which shows how far two runs of one recipe can differ. A thousand steps of all recipes take
a few minutes on one core; no test runs it.
"""

import csv
import re
import subprocess
import sys
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from tests.harness.pool import REPOSITORY
from tests.harness.started import environment

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
    "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--swiglu",
    "--ffn-hidden-size", "176", "--normalization", "RMSNorm", "--position-embedding-type", "rope",
    "--disable-bias-linear", "--untie-embeddings-and-output-weights", "--hidden-dropout", "0",
    "--attention-dropout", "0", "--seq-length", "64", "--max-position-embeddings", "64",
    "--micro-batch-size", "4", "--global-batch-size", "4", "--lr", "2e-3", "--min-lr", "2e-4",
    "--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.1", "--clip-grad", "1.0", "--bf16",
    "--split", "98,2,0", "--tokenizer-type", "ByteTokenizer", "--eval-iters", "20",
    "--log-interval", "1",
)  # fmt: skip
MEASURED_SHARE = 0.1
MOST_ABOVE_BF16 = 0.01
"""Limit for the FP8 and MXFP8 recipes; NVFP4 is reported alone."""
VALIDATION = "validation"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    steps: int = 1000
    output: Path | None = None
    """CSV of recipe, step, loss."""


def run(*command: str) -> str:
    """Run one process on one core of the CPU from the repository; return what it printed.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    words = [sys.executable, *command]
    done = subprocess.run(words, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def tokens(folder: Path) -> Path:
    """Write token files of the standard library's sources; return their prefix."""
    text, prefix = folder / "sources.jsonl", folder / "sources"
    run("-m", "benchmarks.real_text", str(text), sysconfig.get_paths()["stdlib"])
    run(
        "tools/preprocess_data.py", "--input", str(text), "--output-prefix", str(prefix),
        "--tokenizer-type", "ByteTokenizer", "--append-eod",
    )  # fmt: skip
    return folder / "sources_text_document"


def curve(data: Path, steps: int, *flags: str) -> tuple[list[float], float]:
    """Train; return the loss of each step, and the validation loss after the last step."""
    printed = run(
        "pretrain_gpt.py", *MODEL, *flags, "--train-iters", str(steps), "--eval-interval",
        str(steps), "--data-path", str(data),
    )  # fmt: skip
    losses = re.findall(r"iteration +\d+/.* lm loss: ([\d.E+-]+)", printed)
    at_last = re.findall(r"validation loss at .*? lm loss value: ([\d.E+-]+)", printed)
    return [float(loss) for loss in losses], float(at_last[-1])


def main() -> int:
    """Print the table; 1 if an FP8 recipe is above the limit."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.low_precision_curves", description=__doc__
    )
    rows: list[tuple[str, int | str, float]] = []
    reference, status = None, 0
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
            status |= "FP8" in name and max(last_apart, validation_apart) > MOST_ABOVE_BF16
            rows += [(name, step, loss) for step, loss in enumerate(losses, 1)]
            rows.append((name, VALIDATION, validation))
    if flags.output is not None:
        with flags.output.open("w", newline="") as file:
            csv.writer(file).writerows([("recipe", "step", "loss"), *rows])
    return status


if __name__ == "__main__":
    sys.exit(main())
