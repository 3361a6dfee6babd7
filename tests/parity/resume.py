"""Show that 20 steps with stops are 20 steps, to the bit: `python -m tests.parity.resume`.

In each layout, with dropout on, one run does 20 steps without loader workers. Others are stopped
after 3 random steps, each time going on from the checkpoint before: with 0, 2 and 4 loader
workers, the second saving in the background. Compared are every logged loss, gradient norm and
learning rate, and digests over the full weights, the Adam state, and the counters of the last
checkpoint. Exits with status 1 if a bit differs.
"""

import random
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from tests.harness.distributed import run_distributed
from tests.parity.training_run import read_metrics, train_with_flags
from tools.checkpoint.state_digest import checkpoint_digest


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
    ResumeCase(
        "pp 2, zb-v", 2, (("pp", 2), ("vp", 2)),
        "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v",
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
    ResumeCase(
        "dp 2, sharded gradients", 2, (), "--data-parallel-sharding-strategy optim_grads",
    ),
    ResumeCase(
        "dp 2, sharded parameters", 2, (),
        "--data-parallel-sharding-strategy optim_grads_params",
    ),
    ResumeCase("cp 2", 2, (("cp", 2),), "--context-parallel-size 2"),
    ResumeCase(
        "tp 2, fp16 whose first steps overflow", 2, (("tp", 2),),
        "--tensor-model-parallel-size 2 --fp16 --initial-loss-scale 4294967296 --hysteresis 1"
        " --loss-scale-window 4",
    ),
    ResumeCase("pp 4", 4, (("pp", 4),), "--pipeline-model-parallel-size 4"),
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


def words_of(case: ResumeCase, num_steps: int) -> list[str]:
    """Return the command line of a case."""
    words = [*MODEL.split(), *case.flags.split(), "--train-iters", str(num_steps)]
    return [*words, "--save-interval", str(num_steps // 2), "--eval-interval", str(num_steps // 4)]


def run_in_pieces(
    case: ResumeCase, save: Path, num_steps: int, stops: Sequence[int], *more: str
) -> Outcome:
    """Run to each stop and then to the end, each time from the checkpoint before."""
    words = [*words_of(case, num_steps), *more, "--save", str(save)]
    words += ["--metrics-jsonl", f"{save}.jsonl"]
    edges = [0, *sorted(stops)]
    for begin, end in zip(edges, [*edges[1:], None], strict=True):
        flags = [] if begin == 0 else ["--load", str(save), "--exit-on-missing-checkpoint"]
        # It stops at multiples of the interval, of which the first after the start is the end.
        flags += [] if end is None else ["--exit-interval", str(end)]
        run_distributed(
            train_with_flags, case.world_size, words + flags, timeout_s=240.0, **dict(case.groups)
        )
    return read_outcome(save, num_steps)


def run_case(
    case: ResumeCase, num_workers: int, directory: Path, num_steps: int = 20
) -> tuple[Outcome, Outcome]:
    """Return what the unbroken run and the run that was resumed half-way left."""
    workers = ("--num-workers", str(num_workers))
    unbroken = run_in_pieces(case, directory / "unbroken", num_steps, [], *workers)
    return unbroken, run_in_pieces(
        case, directory / "broken", num_steps, [num_steps // 2], *workers
    )


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


VARIANTS = (
    ("0 workers", ("--num-workers", "0")),
    ("2 workers, async save", ("--num-workers", "2", "--async-save")),
    ("4 workers", ("--num-workers", "4")),
)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    only: str = ""
    """Run the layouts whose name has this text."""
    steps: int = 20
    stops: int = 3
    seed: int = 0


def main() -> int:
    arguments = read_command_line(Flags, description=(__doc__ or "").splitlines()[0])
    cases = [case for case in CASES if arguments.only in case.name]
    # Four loader workers are more than some machines have cores for, and are meant.
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    rng, started, failures = random.Random(arguments.seed), time.time(), 0
    print(
        f"{'layout':<42}{'':24}{'stopped at':>14}{'losses':>8}{'weights':>9}{'Adam':>7}{'all':>7}"
    )
    for case in cases:
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            unbroken = run_in_pieces(case, root / "unbroken", arguments.steps, [])
            for number, (variant, flags) in enumerate(VARIANTS):
                stops = sorted(rng.sample(range(1, arguments.steps), arguments.stops))
                broken = run_in_pieces(case, root / str(number), arguments.steps, stops, *flags)
                equal = [
                    unbroken.metrics == broken.metrics,
                    unbroken.weights == broken.weights,
                    unbroken.optimizer == broken.optimizer,
                    unbroken.everything == broken.everything,
                ]
                failures += not all(equal)
                shown = ["equal" if e else "DIFFER" for e in equal]
                print(
                    f"{case.name:<42}{variant:24}{','.join(map(str, stops)):>14}"
                    f"{shown[0]:>8}{shown[1]:>9}{shown[2]:>7}{shown[3]:>7}",
                    flush=True,
                )
    total = len(cases) * len(VARIANTS)
    print(f"\n{total} broken runs in {time.time() - started:.0f} s, {failures} differ")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
