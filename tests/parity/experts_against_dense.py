"""Train experts and a dense model of equal active parameters on the same text.

`python -m tests.parity.experts_against_dense`

Both read plays and poems as bytes (`tests/fixtures/text`, or the files of `--texts`), the same
samples in the same order under the same settings. A token meets two of eight experts, each half as
wide as the dense model's MLP: as many products, and the router's. Printed are the mean training
loss over windows of steps, the losses of both on text that neither has trained on, and how evenly
the experts were visited.
Exits with status 1 unless the experts end below the dense model in both.

Takes about three minutes on one core; --train-iters 200 takes half of one and shows the trend.
"""

import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from megatron.core.settings.command_line import read_command_line
from tests.harness.distributed import run_distributed
from tests.parity.long_context import TEXTS, prepare_corpus
from tests.parity.training_run import read_metrics, train_with_flags

HIDDEN, WIDTH, SEQUENCE, BATCH = 96, 256, 128, 8
DOCUMENT = 4000
"""Characters of a document: short ones, so that each tenth holds some of every text."""
EXPERTS = (
    f"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size {WIDTH // 2} --moe-grouped-gemm"
    " --moe-aux-loss-coeff 0.01 --moe-z-loss-coeff 0.001 --moe-router-topk-scaling-factor 2"
)
"""The weights of the two experts add up to 2: each is half of a dense MLP, and counts as such. With
weights that add up to 1 the experts begin at half the strength of the dense MLP and stay behind."""


@dataclass(frozen=True)
class Curve:
    """What one run reported."""

    losses: list[float]
    validation: float
    loads: dict[int, tuple[float, float, float]]
    """layer -> (lowest, median, highest) tokens of an expert, over the even share."""
    seconds: float


def train(corpus: Path, steps: int, seed: int, flags: str) -> Curve:
    """Train one model."""
    metrics = corpus.parent / f"{len(list(corpus.parent.iterdir()))}.jsonl"
    words = (
        f"--num-layers 2 --hidden-size {HIDDEN} --ffn-hidden-size {WIDTH} --num-attention-heads 4"
        f" --position-embedding-type rope --seq-length {SEQUENCE} --normalization RMSNorm --swiglu"
        f" --max-position-embeddings {SEQUENCE} --disable-bias-linear --hidden-dropout 0"
        f" --attention-dropout 0 --micro-batch-size {BATCH} --global-batch-size {BATCH}"
        f" --train-iters {steps} --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine"
        f" --lr-warmup-iters {max(steps // 20, 1)} --data-path {corpus} --split 90,10,0"
        f" --tokenizer-type ByteTokenizer --eval-iters 16 --eval-interval {steps} --seed {seed}"
        f" --num-workers 0 --log-interval {steps} --metrics-jsonl {metrics} {flags}"
    ).split()
    started = time.time()
    run_distributed(train_with_flags, 1, words, timeout_s=1200.0)
    trained = read_metrics(metrics)
    told = [json.loads(line) for line in metrics.read_text().splitlines()]
    validation = [line["lm loss validation"] for line in told if "lm loss validation" in line][-1]
    last, loads = trained[-1], {}
    for layer in (1, 2):
        name = f"experts/layer {layer}"
        if f"{name} median load" in last:
            figures = (last[f"{name} {kind} load"] for kind in ("lowest", "median", "highest"))
            loads[layer] = tuple(figures)
    return Curve([x["lm loss"] for x in trained], validation, loads, time.time() - started)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    train_iters: int = 1000
    """Optimizer steps."""
    seed: int = 1234
    """Of weights and data."""
    texts: tuple[Path, ...] = tuple(TEXTS)
    """Files to read."""


def main() -> int:
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    steps, window = options.train_iters, max(options.train_iters // 5, 1)
    with tempfile.TemporaryDirectory() as directory:
        corpus = prepare_corpus(Path(directory), options.texts, DOCUMENT)
        dense = train(corpus, steps, options.seed, "")
        experts = train(corpus, steps, options.seed, EXPERTS)
    print(f"{steps} steps of {BATCH * SEQUENCE} tokens, seed {options.seed}")
    print(f"{'steps':<16}{'dense':>10}{'experts':>10}")
    for begin in range(0, steps, window):
        means = (fmean(curve.losses[begin : begin + window]) for curve in (dense, experts))
        label = f"{begin + 1}-{min(begin + window, steps)}"
        print(f"{label:<16}" + "".join(f"{mean:>10.4f}" for mean in means))
    print(f"{'validation':<16}{dense.validation:>10.4f}{experts.validation:>10.4f}")
    print(f"{'seconds':<16}{dense.seconds:>10.0f}{experts.seconds:>10.0f}")
    for layer, (lowest, median, highest) in experts.loads.items():
        print(
            f"layer {layer}: tokens of an expert over the even share, last step: lowest"
            f" {lowest:.2f}, median {median:.2f}, highest {highest:.2f}"
        )
    last = [fmean(curve.losses[-window:]) for curve in (dense, experts)]
    return 0 if last[1] < last[0] and experts.validation < dense.validation else 1


if __name__ == "__main__":
    sys.exit(main())
