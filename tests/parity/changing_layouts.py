"""Change the layout of a run again and again: `python -m tests.parity.changing_layouts`.

With `--layout-invariant-mode`, a run that changes its layout every 20 of 200 steps ends with the
losses, gradient norms, weights and optimizer state of one process, to the bit: each piece of the
run loads the checkpoint of the piece before it, on another number of ranks. A second run loses a
replica: its last steps after a checkpoint are lost, and fewer replicas compute them again with the
same global batch. The command prints a line for each piece, and exits with status 1 if a bit
differs.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core import parallel_state
from megatron.core.settings.command_line import read_command_line
from tests.harness.distributed import run_distributed
from tests.parity.resume import Outcome, read_outcome
from tests.parity.training_run import train_with_flags

MODEL = (
    "--layout-invariant-mode --num-layers 4 --hidden-size 64 --num-attention-heads 8"
    " --kv-channels 32 --ffn-hidden-size 256 --seq-length 16 --vocab-size 230"
    " --make-vocab-size-divisible-by 32 --micro-batch-size 1 --global-batch-size 12"
    " --lr 1e-2 --lr-decay-style cosine --lr-warmup-iters 3"
    " --hidden-dropout 0.1 --attention-dropout 0.1 --mock-data --log-interval 1 --num-workers 0"
    " --eval-iters 0"
)
_TP, _PP = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
_SHARDS = "--data-parallel-sharding-strategy"
LAYOUTS = (
    (1, ""),
    (8, f"{_TP} 2 --sequence-parallel {_PP} 2 {_SHARDS} optim"),
    (4, f"{_PP} 4"),
    (2, f"{_TP} 2"),
    (6, f"{_SHARDS} optim_grads_params"),
    (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    (8, f"{_TP} 8 --sequence-parallel"),
    (4, f"{_SHARDS} optim_grads --overlap-grad-reduce"),
    (6, f"{_PP} 2 --num-virtual-stages-per-pipeline-rank 2 {_SHARDS} optim"),
    (2, f"{_PP} 2 --pipeline-schedule zb-v"),
)
"""Number of ranks and flags of each piece; six ranks are six or three replicas."""
LOST_REPLICA = ((4, f"{_SHARDS} optim"), (3, f"{_SHARDS} optim"))
TIMEOUT_S = 1200.0


def train(groups: object, words: list[str]) -> None:
    """Train in the layout of the flags; the job of a rank."""
    parallel_state.destroy_model_parallel()
    train_with_flags(groups, words)


def run_piece(ranks: int, words: Sequence[str]) -> None:
    """Train on some ranks."""
    run_distributed(train, ranks, list(words), timeout_s=TIMEOUT_S)


def words_of(save: Path, num_steps: int, every: int) -> list[str]:
    """Return the command line of all pieces of a run that saves every `every` steps."""
    words = [*MODEL.split(), "--train-iters", str(num_steps), "--save", str(save)]
    return [*words, "--save-interval", str(every), "--metrics-jsonl", f"{save}.jsonl"]


def run_in_layouts(
    save: Path, num_steps: int, layouts: Sequence[tuple[int, str]]
) -> Iterator[tuple[int, str]]:
    """Train in one layout after the other; yield a layout after its piece."""
    every = num_steps // len(layouts)
    words = words_of(save, num_steps, every)
    for number, (ranks, flags) in enumerate(layouts):
        piece = [*words, *flags.split(), "--exit-interval", str((number + 1) * every)]
        if number:
            piece += ["--load", str(save), "--exit-on-missing-checkpoint"]
        run_piece(ranks, piece)
        yield ranks, flags


def lose_replica(save: Path, num_steps: int) -> Outcome:
    """Train with four replicas to 5/8 of the steps, and from the checkpoint at half of the steps
    with three of them to the end."""
    words = words_of(save, num_steps, num_steps // 2)
    (before, flags), (after, other_flags) = LOST_REPLICA
    run_piece(before, [*words, *flags.split(), "--exit-interval", str(num_steps * 5 // 8)])
    half = num_steps // 2
    log = Path(f"{save}.jsonl")
    lines = log.read_text().splitlines(True)
    kept = [line for line in lines if json.loads(line).get("iteration", 0) <= half]
    log.write_text("".join(kept))
    load = ["--load", str(save), "--ckpt-step", str(half), "--exit-on-missing-checkpoint"]
    run_piece(after, [*words, *other_flags.split(), *load])
    return read_outcome(save, num_steps)


def differences(one: Outcome, other: Outcome) -> list[str]:
    """Return what differs in a bit."""
    names = ("metrics", "weights", "optimizer")
    return [name for name in names if getattr(one, name) != getattr(other, name)]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    steps: int = 200


def main() -> int:
    """Run one process, the changing layouts and the lost replica; return 1 if a bit differs."""
    flags = read_command_line(
        Flags, prog="python -m tests.parity.changing_layouts", description=__doc__
    )
    failures = 0
    with tempfile.TemporaryDirectory() as name:
        root, begin = Path(name), time.monotonic()
        run_piece(1, words_of(root / "one", flags.steps, flags.steps))
        one = read_outcome(root / "one", flags.steps)
        print(
            f"one process: weights {one.weights[:16]}, {time.monotonic() - begin:.0f} s", flush=True
        )
        for ranks, text in run_in_layouts(root / "changing", flags.steps, LAYOUTS):
            print(f"{ranks} ranks: {text} ({time.monotonic() - begin:.0f} s)", flush=True)
        changing = read_outcome(root / "changing", flags.steps)
        lost = lose_replica(root / "lost", flags.steps)
        for what, other in (("changing layouts", changing), ("a lost replica", lost)):
            wrong = differences(one, other)
            failures += bool(wrong)
            verdict = f"DIFFERS in {', '.join(wrong)}" if wrong else "equal to the bit"
            print(f"{what}: weights {other.weights[:16]}, {verdict}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
