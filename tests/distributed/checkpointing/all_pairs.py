"""Every ordered pair of many layouts: python -m tests.distributed.checkpointing.all_pairs

For a tied and an untied model, and for a model with experts: saves a run in each layout, loads it
in each other one, saves it again and compares digests. Lets each layout of a dense model train 10
further steps from a checkpoint of another layout and compares the losses with the unbroken run.
Ends at the first difference.
"""

import shutil
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from tests.distributed.checkpointing.gpt_run import (
    Layout,
    Model,
    load_each_and_save_again,
    loss_of_each_step,
    resume_and_train,
    run_in_layout,
    train_and_save,
)
from tests.harness.tolerances import FP32_AFTER_OPTIMIZER, assert_close
from tools.checkpoint.state_digest import checkpoint_digest

STEPS_BEFORE, STEPS_AFTER = 2, 10
CHECKPOINT = f"iter_{STEPS_BEFORE:07d}"


def layouts(max_ranks: int, stages: tuple[int, ...]) -> list[Layout]:
    """TP {1,2,4} x PP {1,2,4} x VPP {1,2} x CP {1,2} x DP {1,2,4} x ZeRO stages, up to `max_ranks`
    ranks; with CP the first and the last stage."""
    found = []
    for tp, pp, cp, dp in product((1, 2, 4), (1, 2, 4), (1, 2), (1, 2, 4)):
        if tp * pp * cp * dp > max_ranks:
            continue
        for vp in (1, 2) if pp == 2 else (1,):
            rungs = stages if cp == 1 else {stages[0], stages[-1]}
            for zero in sorted(rungs) if cp * dp > 1 else (0,):
                found.append(Layout(tp=tp, pp=pp, cp=cp, dp=dp, vp=vp, zero=zero, sp=tp == 4))
    return found


def expert_layouts(max_ranks: int) -> list[Layout]:
    """TP {1,2} x PP {1,2} x DP {1,2,4} x EP {1,2,4} x expert-TP {1,2}, the stages in turn."""
    found: list[Layout] = []
    for tp, pp, dp, ep, expt_tp in product((1, 2), (1, 2), (1, 2, 4), (1, 2, 4), (1, 2)):
        if tp * pp * dp > max_ranks or expt_tp > tp or tp * dp % (ep * expt_tp):
            continue
        zero = (0, 1, 3)[len(found) % 3] if dp > 1 else 0
        found.append(Layout(tp=tp, pp=pp, dp=dp, ep=ep, expt_tp=expt_tp, zero=zero))
    return found


def assert_all_pairs_agree(layouts: list[Layout], model: Model, root: Path) -> int:
    """Save in each layout, load in each, save again: the digest stays. Returns the pairs."""
    digests = {}
    for layout in layouts:
        run_in_layout(train_and_save, layout, model, root / str(layout), STEPS_BEFORE)
        digests[layout] = checkpoint_digest(root / str(layout) / CHECKPOINT)
    for wanted in layouts:
        work = [(root / str(source), root / f"{source}--{wanted}") for source in layouts]
        run_in_layout(load_each_and_save_again, wanted, model, work)
        for source, (_, again) in zip(layouts, work, strict=True):
            digest = checkpoint_digest(again / CHECKPOINT)
            assert digest == digests[source], f"{source} to {wanted}"
            shutil.rmtree(again)
    return len(layouts) ** 2


def assert_further_steps_agree(layouts: list[Layout], model: Model, root: Path) -> None:
    """Train on in each layout from a checkpoint of the next one, as the unbroken run would."""
    total = STEPS_BEFORE + STEPS_AFTER
    reference = run_in_layout(resume_and_train, Layout(), model, root / "unbroken", [total])
    expected = loss_of_each_step(reference, total)[STEPS_BEFORE:]
    for number, wanted in enumerate(layouts):
        source = layouts[(number + 1) % len(layouts)]
        shutil.copytree(root / str(source), root / "on")
        found = run_in_layout(resume_and_train, wanted, model, root / "on", [STEPS_AFTER])
        losses = loss_of_each_step(found, STEPS_AFTER)
        assert_close(losses, expected, FP32_AFTER_OPTIMIZER, what=f"{source} to {wanted}")
        shutil.rmtree(root / "on")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    max_ranks: int = 4
    stages: tuple[int, ...] = (0, 1, 2, 3)


def main() -> None:
    """Run all pairs and print how many there were."""
    arguments, started_at = read_command_line(Flags, description=__doc__), time.monotonic()
    dense = layouts(arguments.max_ranks, tuple(arguments.stages))
    for name, model, every in (
        ("tied", Model(), dense),
        ("untied", Model(is_tied=False), dense),
        ("experts", Model(experts=4), expert_layouts(arguments.max_ranks)),
    ):
        with tempfile.TemporaryDirectory() as directory:
            pairs = assert_all_pairs_agree(every, model, Path(directory))
            if not model.experts:
                assert_further_steps_agree(every, model, Path(directory))
        print(f"{name}: {pairs} pairs, {time.monotonic() - started_at:.0f} s", flush=True)


if __name__ == "__main__":
    main()
