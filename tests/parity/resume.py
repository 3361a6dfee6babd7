"""Show that 20 steps are 10 + stop + 10, to the bit: `python -m tests.parity.resume`.

In each layout, with 0 and 2 loader workers and dropout on, one run does 20 steps; another stops
after 10 and a third goes on from its checkpoint. Compared are every logged loss, gradient norm and
validation loss, and digests over the full weights, the Adam state, and the counters of the last
checkpoint. Exits with status 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.digest import checkpoint_digest
from tests.harness.distributed import run_distributed
from tests.parity.training_run import read_metrics, train_with_flags


@dataclass(frozen=True)
class ResumeCase:
    """A layout, and the flags that belong to it."""

    name: str
    world_size: int
    groups: tuple[tuple[str, int], ...] = ()
    flags: str = ""


CASES = (
    ResumeCase("one process", 1),
    ResumeCase("tp 2", 2, (("tp", 2),), "--tensor-model-parallel-size 2"),
    ResumeCase(
        "tp 2, sequence parallel", 2, (("tp", 2),),
        "--tensor-model-parallel-size 2 --sequence-parallel",
    ),
    ResumeCase("pp 2", 2, (("pp", 2),), "--pipeline-model-parallel-size 2"),
    ResumeCase(
        "pp 2, vp 2", 2, (("pp", 2), ("vp", 2)),
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2",
    ),
    ResumeCase("dp 2", 2, (), "--overlap-grad-reduce"),
    ResumeCase(
        "dp 2, distributed optimizer", 2, (),
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    ),
    ResumeCase(
        "tp 2 x pp 2", 4, (("tp", 2), ("pp", 2)),
        "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
    ),
    ResumeCase(
        "tp 2 x dp 2, bf16, distributed optimizer", 4, (("tp", 2),),
        "--tensor-model-parallel-size 2 --bf16 --use-distributed-optimizer",
    ),
    ResumeCase("dp 2, saved in the background", 2, (), "--async-save"),
    ResumeCase(
        "one process, growing batch, cyclic data", 1, (),
        "--dataloader-type cyclic --rampup-batch-size 4 4 24",
    ),
)  # fmt: skip

MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 2 --seq-length 8 --vocab-size 90"
    " --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --lr-warmup-iters 3"
    " --lr-decay-style cosine --hidden-dropout 0.1 --attention-dropout 0.1 --mock-data"
    " --log-interval 1 --eval-iters 1"
)


@dataclass(frozen=True)
class Outcome:
    """What is compared."""

    metrics: list[tuple[float, ...]]
    """Loss, gradient norm and learning rate of every step."""
    weights: str
    optimizer: str
    everything: str
    """Digest of all tensors and of the counters, schedules and seeds."""


def run_case(
    case: ResumeCase, num_workers: int, directory: Path, num_steps: int = 20
) -> tuple[Outcome, Outcome]:
    """Return what the unbroken run and the run that was resumed half-way left."""
    half = str(num_steps // 2)
    words = [*MODEL.split(), *case.flags.split(), "--num-workers", str(num_workers)]
    words += ["--train-iters", str(num_steps), "--save-interval", half]
    words += ["--eval-interval", str(num_steps // 4)]
    unbroken, broken = directory / "unbroken", directory / "broken"

    def train(save: Path, *more: str) -> None:
        flags = [*words, "--save", str(save), "--metrics-jsonl", str(save) + ".jsonl", *more]
        run_distributed(
            train_with_flags, case.world_size, flags, timeout_s=240.0, **dict(case.groups)
        )

    train(unbroken)
    train(broken, "--exit-interval", half)
    train(broken, "--load", str(broken), "--exit-on-missing-checkpoint")
    return read_outcome(unbroken, num_steps), read_outcome(broken, num_steps)


def read_outcome(save: Path, num_steps: int) -> Outcome:
    """Read the exact metrics and the digests of the last checkpoint of a run."""
    lines = read_metrics(Path(str(save) + ".jsonl"))
    last = save / f"iter_{num_steps:07d}"
    return Outcome(
        metrics=[(x["lm loss"], x["grad-norm"], x["learning-rate"]) for x in lines],
        weights=checkpoint_digest(
            last, only=lambda key: not key.startswith("optimizer."), with_plain_state=False
        ),
        optimizer=checkpoint_digest(
            last, only=lambda key: key.startswith("optimizer."), with_plain_state=False
        ),
        everything=checkpoint_digest(last),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="run the layouts whose name has this text")
    cases = [case for case in CASES if parser.parse_args().only in case.name]
    started, failures = time.time(), 0
    print(
        f"{'layout':<44}{'workers':>8}{'steps':>7}{'losses':>9}{'weights':>9}{'Adam':>7}{'all':>6}"
    )
    for case in cases:
        for num_workers in (0, 2):
            with tempfile.TemporaryDirectory() as directory:
                unbroken, broken = run_case(case, num_workers, Path(directory))
            equal = [
                unbroken.metrics == broken.metrics,
                unbroken.weights == broken.weights,
                unbroken.optimizer == broken.optimizer,
                unbroken.everything == broken.everything,
            ]
            failures += not all(equal)
            shown = ["equal" if e else "DIFFER" for e in equal]
            print(
                f"{case.name:<44}{num_workers:>8}{len(broken.metrics):>7}"
                f"{shown[0]:>9}{shown[1]:>9}{shown[2]:>7}{shown[3]:>6}",
                flush=True,
            )
    print(f"\n{2 * len(cases)} cases in {time.time() - started:.0f} s, {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
