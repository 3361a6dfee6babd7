"""Stage C: the step of stage B with one change at a time, four steps each.

    python -m benchmarks.gpu.variants                     # all, in order of importance
    python -m benchmarks.gpu.variants --only base fp8     # some of them
    python -m benchmarks.gpu.variants --rehearse          # tiny models on the CPU

A row has time, tokens/s, and peak memory. Afterwards `--dry-run` estimates the peak memory of all
variants at the same time. Each variant is a fork (`forks.py`): if a variant runs out of memory,
crashes or hangs, only its row is lost.
`calibrated` compares the rows with the planner; `benchmarks.gpu.evidence` calls it afterwards.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu import workload
from benchmarks.gpu.forks import FOLDER, Case, Outcome, Run, run_cases
from benchmarks.gpu.speed import estimated_gib, measure, words_of
from benchmarks.gpu.workload import Row, Workload
from benchmarks.plain_gpt import Sizes
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron_lattice.planner.cluster_calibration import calibrate_to_runs
from megatron_lattice.planner.hardware import Gpu
from megatron_lattice.planner.measured_run import MeasuredRun, row_of_run
from megatron_lattice.planner.predictor import load_predictor
from megatron_lattice.planner.search_command import run_of_words
from megatron_lattice.planner.step_command import predicted_step

NO_TIME = "no time"
"""Problem of a case that `run_cases` had no time for."""
OUT_OF_MEMORY = "out of memory"
_ESTIMATES_S = 14.0
"""Seconds that are kept for the estimates of all variants."""
LLAMA_1B = Sizes(num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, ffn_size=8192,
                 vocab_size=128256, sequence=4096)  # fmt: skip
WITH_EXPERTS = Sizes(num_layers=4, hidden_size=2048, num_heads=16, num_kv_heads=4, ffn_size=8 * 768,
                     vocab_size=128256, sequence=4096)  # fmt: skip
"""The total width of the 8 experts of a token determines the FLOPs."""
HYBRID = replace(WITH_EXPERTS, num_layers=9)
"""Four layers of Mamba-2, one of attention, four of experts."""
FINE_GRAINED = (
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm"
    " --moe-router-load-balancing-type none"
)
_REHEARSED = (("experts 128", "experts 8"), ("size 768", "size 8"),
              ("--hybrid", "--mamba-num-groups 1 --hybrid"))  # fmt: skip
"""Parts of flags -> the parts for a tiny model."""
_NAME, _REHEARSES = "LATTICE_VARIANT", "LATTICE_VARIANT_REHEARSES"


@dataclass(frozen=True)
class Variant:
    """One change of the step.

    Attributes:
        flags: additional flags of `pretrain_gpt.py`.
        before: flags of an unmeasured run before it.
        environment: additional environment variables.
        micro_batches: micro batches of a step. The optimizer's time depends on the weights alone:
            variants with few FLOPs per weight have as many micro batches as stage B.
        is_plannable: the planner has constants for it; its row is used in the calibration.
        counts_flops: see `speed.measure`.
    """

    name: str
    flags: str = ""
    micro_batch: int = 2
    micro_batches: int = 2
    sequence: int = 4096
    sizes: Sizes | None = None
    environment: tuple[tuple[str, str], ...] = ()
    is_plannable: bool = False
    counts_flops: bool = False
    before: str = ""

    def workload(self, is_rehearsal: bool) -> Workload:
        """Return the variant's step."""
        if is_rehearsal:
            sizes = workload.TINY.sizes
            sizes = replace(sizes, num_layers=9) if self.sizes is HYBRID else sizes
        else:
            sizes = replace(self.sizes or Workload().sizes, sequence=self.sequence)
        steps = workload.WARM_UP_STEPS + (1 if is_rehearsal else 2)
        return Workload(
            sizes=sizes, micro_batch=self.micro_batch, num_micro_batches=self.micro_batches,
            num_steps=steps,
        )  # fmt: skip

    def case(self, *, is_rehearsal: bool) -> Case:
        """Return the variant's runs."""
        texts = [self.before] * bool(self.before) + [self.flags]
        if is_rehearsal:
            for large, small in _REHEARSED:
                texts = [text.replace(large, small) for text in texts]
        variables = {_NAME: self.name, _REHEARSES: "1" * is_rehearsal, **dict(self.environment)}
        runs = tuple(Run(words=tuple(text.split())) for text in texts)
        return Case(name=self.name, runs=runs, environment=variables)


GRAPHS = "--cuda-graph-impl local"
VARIANTS = (
    Variant("1B, 1 x 4096, graphs", GRAPHS, micro_batch=1, micro_batches=8, sizes=LLAMA_1B),
    Variant("experts", FINE_GRAINED, micro_batches=8, sizes=WITH_EXPERTS),
    Variant("fp8", "--fp8-format hybrid --fp8-recipe tensorwise"),
    Variant("hybrid with experts", f"{FINE_GRAINED} --hybrid-layer-pattern MEMEM*EME",
            micro_batches=8, sizes=HYBRID, counts_flops=True),
    Variant("fused head and loss", "--cross-entropy-loss-fusion"),
    Variant("1B, 1 x 4096", micro_batch=1, micro_batches=8, sizes=LLAMA_1B, is_plannable=True),
    Variant("1B, 4 x 4096", micro_batch=4, sizes=LLAMA_1B, is_plannable=True),
    Variant("graphs", GRAPHS),
    Variant("1B, 4 x 4096, LoRA", f"--lora-rank 16 --pretrained-checkpoint {FOLDER}/model",
            micro_batch=4, sizes=LLAMA_1B, before=f"--save {FOLDER}/model --no-save-optim"),
    Variant("deterministic", "--deterministic-mode"),
    Variant("base", is_plannable=True),
    Variant("without Triton", environment=(("LATTICE_TRITON", "0"),)),
    Variant("4 x 4096", micro_batch=4, is_plannable=True),
    Variant("1 x 8192", micro_batch=1, sequence=8192, is_plannable=True),
    Variant("1 x 4096", micro_batch=1, is_plannable=True),
)  # fmt: skip
"""In order of importance: there may be no time for the last variants, which have run before."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Run tiny models on the CPU."""
    only: tuple[str, ...] = flag((), choices=[each.name for each in VARIANTS])
    """Names of variants. Default: all."""
    limit: float = 25.0
    """Limit of a variant in seconds; then it is killed."""


def _of_environment() -> tuple[Variant, Workload]:
    name, is_rehearsal = os.environ[_NAME], bool(os.environ[_REHEARSES])
    variant = next(each for each in VARIANTS if each.name == name)
    return variant, variant.workload(is_rehearsal)


def estimate_variant() -> None:
    """Print the estimated peak memory of the variant named in the environment."""
    variant, work = _of_environment()
    row: Row = {"estimate of": variant.name, "dry run GiB": estimated_gib(work, sys.argv[1:])}
    workload.print_row(row)


def train_variant() -> None:
    """Train and measure the variant named in the environment, and print its row."""
    variant, work = _of_environment()
    try:
        row = measure(variant.name, work, sys.argv[1:], counts_flops=variant.counts_flops)
    except Exception as error:
        traceback.print_exc()
        cause = error.__cause__ or error
        kind = OUT_OF_MEMORY if isinstance(cause, torch.OutOfMemoryError) else type(cause).__name__
        workload.print_row({"error": f"{kind}: {cause}"[:300]})
        raise SystemExit(1) from error
    workload.print_row(row)


def row_of(outcome: Outcome) -> Row:
    """Return the last row that a variant printed, or a row with the problem."""
    printed = [line for line in outcome.log.splitlines() if line.startswith("ROW: ")]
    row: Row = {"variant": outcome.case.name, "took s": outcome.seconds}
    if outcome.problem:
        row["not run" if outcome.problem == NO_TIME else "error"] = outcome.problem
    return row | (json.loads(printed[-1][5:]) if printed else {})


def print_estimate(outcome: Outcome) -> None:
    """Print the row of an estimate, or the end of its log; its failure fails no variant."""
    rows = [line for line in outcome.log.splitlines() if line.startswith("ROW: ")]
    print("\n".join(rows[-1:]) or outcome.log[-2000:], flush=True)


def calibrated(measured: Sequence[MeasuredRun], gpu: Gpu) -> Iterator[Row]:
    """Yield the planner's time of each run before and after its calibration to all runs."""
    before = load_predictor()
    after = calibrate_to_runs(before, measured, gpu)
    ratios = []
    for each in measured:
        prediction, _ = predicted_step(each.run, gpu)
        later_s = float(after.seconds(row_of_run(each.run, gpu))[0])
        ratios.append(each.step_s / later_s)
        yield {
            "plan of": each.name, "ms": 1e3 * each.step_s, "planned ms": 1e3 * prediction.seconds,
            "after calibration ms": 1e3 * later_s,
        }  # fmt: skip
    yield {"measured/planned after calibration, median": statistics.median(ratios)}
    for name, value in after.hardware.constants.items():
        old = before.hardware.constants[name]
        if abs(value / old - 1) > 1e-3:
            yield {"constant": name, "published steps": old, "these runs": value}


def measured_runs(rows: Sequence[Row]) -> list[MeasuredRun]:
    """Return the runs that the planner can predict, without variants whose sizes changed."""
    plannable = {each.name: each for each in VARIANTS if each.is_plannable}
    found = []
    for row in rows:
        each = plannable.get(str(row.get("variant")))
        if each is not None and "ms" in row:
            shape = workload.shape_of(each.workload(False))
            if row.get("micro batches", shape) != shape:
                continue
            run = run_of_words(words_of(each.workload(False)), 1)
            found.append(MeasuredRun(each.name, run, 1e-3 * float(str(row["ms"]))))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the variants; running out of memory is a result and no failure."""
    prog = "python -m benchmarks.gpu.variants"
    options = read_command_line(Flags, argv, prog=prog, description=__doc__)
    if options.rehearse:
        os.environ["LATTICE_DEVICE"] = "cpu"
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")  # once, before the forks
    workload.wait_for_turn()
    failed: list[Row] = []

    def keep(outcome: Outcome) -> None:
        row = row_of(outcome)
        workload.print_row(row)
        if OUT_OF_MEMORY not in str(row.get("error", OUT_OF_MEMORY)):
            print(outcome.log[-20_000:], flush=True)
            failed.append(row)

    chosen = [each for each in VARIANTS if not options.only or each.name in options.only]
    cases = [each.case(is_rehearsal=options.rehearse) for each in chosen]
    with tempfile.TemporaryDirectory(prefix="lattice-gpu-") as folder:
        run_cases(
            cases, Path(folder), main=train_variant, ranks_at_once=1, limit_s=options.limit,
            whole_limit_s=workload.seconds_left() - _ESTIMATES_S, on_end=keep,
        )  # fmt: skip
        cases = [each for each in cases if len(each.runs) == 1]  # others need files
        run_cases(
            cases, Path(folder) / "estimates", main=estimate_variant, ranks_at_once=len(cases),
            limit_s=options.limit, whole_limit_s=workload.seconds_left() - 2, on_end=print_estimate,
        )  # fmt: skip
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
