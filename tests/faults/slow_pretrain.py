"""`pretrain_gpt.py` with sleeps, so that a signal can meet what is short in a small model.

    --slow-building S      while the datasets are built
    --slow-step S          in every micro batch of training
    --hold-file FILE       in every micro batch of training, while there is such a file
    --slow-evaluation S    in every micro batch of evaluations
    --long-evaluation S    once in each evaluation, on rank 1
    --long-save S          in each save, on rank 1, with the interpreter lock
    --hold-lock THREAD     from SIGUSR2 on, see `planted.py`
    --mismatch KIND RANK N     change the N-th collective of a rank
    --slow-rank R --slow-factor F --slow-from STEP
                           that rank computes F times as long as it has to
    --on-core N            all ranks run on that core, once they are started

It prints when it builds and when an evaluation begins.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.enums import ModelType
from megatron.core.settings.command_line import flags_provider
from megatron.training import get_args, pretrain
from megatron.training.config.resolved import ResolvedRun
from pretrain_gpt import datasets_provider, forward_step, model_provider
from tests.faults import planted

BUILDING, EVALUATING = "slowly building the datasets", "slowly evaluating"
_was_training = True
_is_planted = False


@dataclass(frozen=True, kw_only=True)
class SlowFlags:
    """Sleeps, in seconds, and planted faults."""

    slow_building: float = 0.0
    slow_step: float = 0.0
    hold_file: str = ""
    slow_evaluation: float = 0.0
    long_evaluation: float = 0.0
    long_save: float = 0.0
    hold_lock: str = ""
    mismatch: tuple[str, ...] = ()
    slow_rank: int = -1
    slow_factor: float = 1.0
    slow_from: int = 1
    """First slow step."""
    on_core: int = -1


def slow_datasets(
    num_samples: Sequence[int | None], vp_stage: int | None = None, *, run: ResolvedRun
) -> list:
    """Build after a sleep."""
    print(BUILDING, flush=True)
    time.sleep(get_args().slow_building)
    return datasets_provider(num_samples, vp_stage, run=run)


slow_datasets.is_distributed = True


def plant_faults() -> None:
    """Plant what the flags ask for."""
    args = get_args()
    if args.hold_lock:
        planted.hold_lock_at_signal(args.hold_lock)
    if args.mismatch:
        kind, rank, after = args.mismatch
        if int(rank) == args.rank:
            planted.Mismatch(kind, int(after)).plant()
    if args.long_save and args.rank == 1:
        planted.make_saves_long(args.long_save)
    if args.on_core >= 0:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {args.on_core})


def model_with_faults(*arguments: Any, run: ResolvedRun, **named: Any) -> Any:
    """Plant faults before the first chunk is built."""
    global _is_planted
    if not _is_planted:
        _is_planted = True
        plant_faults()
    return model_provider(*arguments, run=run, **named)


def slow_forward_step(data_iterator: Any, model: Any) -> tuple:
    """Sleep, then run one micro batch."""
    global _was_training
    args = get_args()
    if _was_training and not model.training:
        print(EVALUATING, flush=True)
        if args.long_evaluation and args.rank == 1:
            print(f"{planted.LONG} evaluating", flush=True)
            time.sleep(args.long_evaluation)
    _was_training = model.training
    time.sleep(args.slow_step if model.training else args.slow_evaluation)
    while model.training and args.hold_file and os.path.exists(args.hold_file):
        time.sleep(0.01)
    if args.rank == args.slow_rank:
        is_slow = args.curr_iteration + 1 >= args.slow_from
        planted.compute_more(args.slow_factor - 1.0 if is_slow else 0.0)
    return forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain(
        slow_datasets,
        model_with_faults,
        ModelType.encoder_or_decoder,
        slow_forward_step,
        extra_args_provider=flags_provider(SlowFlags),
    )
