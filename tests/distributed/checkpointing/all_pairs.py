"""Every ordered pair of many layouts: python -m tests.distributed.checkpointing.all_pairs

For a tied and an untied model: saves a run in each layout, loads it in each other one, saves it
again and compares digests; then lets each layout train 10 further steps from a checkpoint of
another layout and compares the losses with the unbroken run. From tied to untied, checks that the
head is the embedding and that nothing else changed. For a model with experts: all pairs of layouts
with expert parallelism. Prints a summary; exits 1 on any difference.

`--involving cp` keeps the pairs of which one layout has that in its name, among those layouts and
`--others` (6) more.
"""

import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.loader import open_contents
from megatron.core.settings.command_line import read_command_line
from megatron.core.transport.object_collectives import SingleProcess
from megatron.training.checkpointing.restore import EMBEDDING, HEAD, is_head
from tests.distributed.checkpointing.gpt_run import (
    Layout,
    Model,
    load_each_and_save_again,
    loss_of_each_step,
    resume_and_train,
    train_and_save,
)
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_AFTER_OPTIMIZER
from tools.checkpoint.state_digest import checkpoint_digest, tensor_digests

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


def run(function, layout: Layout, *arguments) -> list:
    """Run a job in a layout and return the results of its ranks."""
    return run_distributed(function, layout.size, layout, *arguments, **layout.axes())


def each_digest(path: Path) -> dict[str, str]:
    """Return the digest of every tensor of a checkpoint."""
    return dict(tensor_digests(open_contents(path, peers=SingleProcess())))


class Table:
    """Counts comparisons and keeps what differed."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.different: list[str] = []

    def show(self) -> None:
        """Print the counts so far."""
        counts = ", ".join(f"{kind}: {count}" for kind, count in self.counts.items())
        print(f"{counts}; {len(self.different)} differ", flush=True)

    def compare(self, kind: str, is_equal: bool, what: str) -> None:
        """Count one comparison."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        if not is_equal:
            self.different.append(f"{kind}: {what}")


def layouts_around(every: list[Layout], text: str, num_others: int) -> list[Layout]:
    """Return the layouts with `text` in their name, and evenly chosen ones of the others."""
    others = [layout for layout in every if text not in str(layout)]
    step = max(1, -(-len(others) // max(1, num_others)))
    return [layout for layout in every if text in str(layout)] + others[::step]


def check_pairs(
    every: list[Layout], model: Model, root: Path, table: Table, involving: str = ""
) -> None:
    """Compare the digests of the ordered pairs of layouts in which one is named `involving`."""
    name = "experts" if model.experts else "tied" if model.is_tied else "untied"
    kind = f"{name} to the same"
    digests = {}
    for layout in every:
        run(train_and_save, layout, model, root / str(layout), STEPS_BEFORE)
        digests[layout] = checkpoint_digest(root / str(layout) / CHECKPOINT)
    for wanted in every:
        sources = [s for s in every if involving in str(s) or involving in str(wanted)]
        work = [(root / str(source), root / f"{source}--{wanted}") for source in sources]
        run(load_each_and_save_again, wanted, model, work)
        for source, (_, again) in zip(sources, work, strict=True):
            found = checkpoint_digest(again / CHECKPOINT)
            table.compare(kind, found == digests[source], f"{source} -> {wanted}")
            shutil.rmtree(again)
        print(f"{name} to {wanted}: {len(sources)} pairs", flush=True)
        table.show()


def check_further_steps(every: list[Layout], model: Model, root: Path, table: Table) -> float:
    """Train on in each layout from a checkpoint of the next one; return the largest error."""
    total, worst = STEPS_BEFORE + STEPS_AFTER, 0.0
    reference = run(resume_and_train, Layout(), model, root / "unbroken", [total])
    expected = loss_of_each_step(reference, total)[STEPS_BEFORE:]
    for number, wanted in enumerate(every):
        source = every[(number + 1) % len(every)]
        shutil.copytree(root / str(source), root / "on")
        found = run(resume_and_train, wanted, model, root / "on", [STEPS_AFTER])
        losses = loss_of_each_step(found, STEPS_AFTER)
        error = float(((losses - expected).abs() / expected.abs()).max())
        worst = max(worst, error)
        is_close = torch.allclose(
            losses, expected, rtol=FP32_AFTER_OPTIMIZER.rtol, atol=FP32_AFTER_OPTIMIZER.atol
        )
        what = f"{source} -> {wanted}: relative error of a loss {error:.1e}"
        table.compare("10 further steps", is_close, what)
        shutil.rmtree(root / "on")
    return worst


def check_untying(every: list[Layout], root: Path, table: Table) -> None:
    """Load tied checkpoints into untied models of all layouts."""
    for number, wanted in enumerate(every):
        source = every[(number + 3) % len(every)]
        where = root / "tied" / str(source)
        run(load_each_and_save_again, wanted, Model(is_tied=False), [(where, root / "now")])
        before, after = each_digest(where / CHECKPOINT), each_digest(root / "now" / CHECKPOINT)
        expected = before | {
            key: before[key.removesuffix(HEAD) + EMBEDDING] for key in after if is_head(key)
        }
        is_equal = after == expected and len(after) == len(before) + 3
        table.compare("tied to untied", is_equal, f"{source} -> {wanted}")
        shutil.rmtree(root / "now")


def check_dense(every: list[Layout], root: Path, table: Table, involving: str) -> float:
    """Compare pairs and further steps of dense models; return the largest error of a loss."""
    worst = 0.0
    for is_tied in (True, False):
        model, where = Model(is_tied=is_tied), root / ("tied" if is_tied else "untied")
        check_pairs(every, model, where, table, involving)
        worst = max(worst, check_further_steps(every, model, where, table))
        table.show()
    check_untying(every, root, table)
    return worst


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    max_ranks: int = 4
    stages: tuple[int, ...] = (0, 1, 2, 3)
    experts_only: bool = False
    """Not the dense models."""
    dense_only: bool = False
    """Not the model with experts."""
    involving: str = ""
    """Pairs with this in a layout's name."""
    others: int = 6
    """Layouts beside those."""


def main() -> int:
    """Run all pairs and print what was found."""
    arguments = read_command_line(Flags, description=__doc__)
    every, started_at = layouts(arguments.max_ranks, tuple(arguments.stages)), time.monotonic()
    every = layouts_around(every, arguments.involving, arguments.others)
    with_experts = expert_layouts(arguments.max_ranks)
    with_experts = layouts_around(with_experts, arguments.involving, arguments.others)
    table, worst = Table(), 0.0
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        if not arguments.experts_only:
            worst = check_dense(every, root, table, arguments.involving)
        if not arguments.dense_only:
            model, where = Model(experts=4), root / "experts"
            check_pairs(with_experts, model, where, table, arguments.involving)
            print(f"{len(with_experts)} layouts with experts")
    print(f"{time.monotonic() - started_at:.0f} s")
    table.show()
    if not arguments.experts_only:
        print(
            f"{len(every)} layouts without; largest relative error of a loss in "
            f"{STEPS_AFTER} further steps: {worst:.1e}"
        )
    for what in table.different:
        print(f"  {what}")
    return int(bool(table.different))


if __name__ == "__main__":
    sys.exit(main())
