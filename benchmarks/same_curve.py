"""Draw the picture of the README: the loss curve of one process and of eight.

    python -m benchmarks.same_curve            # writes docs/same_curve.png

Both runs train the same small GPT for 60 steps with dropout: one process, then
TP 2 x PP 2 x DP 2 with ZeRO-1.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.optional_imports import require
from megatron.core.settings.command_line import read_command_line

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64"
    " --max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 16 --train-iters 60"
    " --lr 3e-3 --lr-decay-style cosine --lr-warmup-iters 10 --hidden-dropout 0.1 --mock-data"
    " --tokenizer-type NullTokenizer --vocab-size 256 --log-interval 1 --eval-iters 0"
    " --distributed-backend gloo"
)
EIGHT = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel"
    " --use-distributed-optimizer"
)
RUNS = {"1 process": (1, ""), "8 processes: TP 2 x PP 2 x DP 2": (8, EIGHT)}


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Output of the picture."""

    out: Path = Path("docs/same_curve.png")


def losses(num_ranks: int, layout: str, folder: Path) -> list[float]:
    """Train, and return the loss of every step."""
    metrics = folder / "metrics.jsonl"
    words = [*MODEL.split(), *layout.split(), "--metrics-jsonl", str(metrics)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *launch, "pretrain_gpt.py", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [line["lm loss"] for line in lines if "lm loss" in line]


def main() -> int:
    """Train both and draw."""
    flags = read_command_line(Flags, prog="python -m benchmarks.same_curve", description=__doc__)
    curves = {}
    for name, (num_ranks, layout) in RUNS.items():
        with tempfile.TemporaryDirectory() as folder:
            curves[name] = losses(num_ranks, layout, Path(folder))
    one, eight = curves.values()
    furthest = max(abs(a - b) for a, b in zip(one, eight, strict=True))
    figures = require("matplotlib.figure", purpose="the picture")
    figure = figures.Figure((7, 3), layout="tight")
    axes = figure.subplots()
    styles = ({"linewidth": 5, "color": "0.75"}, {"linewidth": 1.2, "color": "C0"})
    for (name, curve), style in zip(curves.items(), styles, strict=True):
        axes.plot(range(1, len(curve) + 1), curve, label=name, **style)
    axes.set(xlabel="step", ylabel="loss", title=f"largest difference {furthest:.0e}")
    axes.legend(frameon=False)
    flags.out.parent.mkdir(exist_ok=True)
    figure.savefig(flags.out, dpi=120)
    print(f"{flags.out}: largest difference of {len(one)} losses {furthest:.1e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
