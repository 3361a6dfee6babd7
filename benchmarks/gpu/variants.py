"""Stage C: the step of stage B with one thing changed at a time, four steps each.

    python -m benchmarks.gpu.variants                     # all, those that matter most first
    python -m benchmarks.gpu.variants --only base fp8     # some of them
    python -m benchmarks.gpu.variants --rehearse          # tiny models on the CPU

A row has time, tokens/s and peak memory beside the estimate of `--dry-run`. The last rows have the
planner's time before and after it is calibrated to these runs. Each variant is a fork of this
process, which has imported everything and has not touched the GPU. A variant that runs out of
memory, crashes or hangs costs its own row alone, and its memory is free afterwards.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import megatron.training.training  # noqa: F401 - before the forks
import pretrain_gpt  # noqa: F401
from benchmarks.gpu import workload
from benchmarks.gpu.speed import measure, words_of
from benchmarks.gpu.workload import Row, Workload
from benchmarks.plain_gpt import Sizes
from megatron.core.foundation.errors import MegatronError
from megatron.core.settings.command_line import read_command_line
from megatron.planner.cluster_calibration import calibrate_to_runs
from megatron.planner.hardware import Gpu, gpu_named
from megatron.planner.measured_run import MeasuredRun
from megatron.planner.predictor import load_predictor
from megatron.planner.run_layout import row_of_run
from megatron.planner.search_command import run_of_words
from megatron.planner.step_command import predicted_step

OUT_OF_MEMORY = "out of memory"
LLAMA_1B = Sizes(num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8, ffn_size=8192,
                 vocab_size=128256, sequence=4096)  # fmt: skip
WITH_EXPERTS = Sizes(num_layers=4, hidden_size=2048, num_heads=16, num_kv_heads=4, ffn_size=8 * 768,
                     vocab_size=128256, sequence=4096)  # fmt: skip
"""The width of the 8 experts of a token counts for the FLOPs."""
FINE_GRAINED = (
    "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-grouped-gemm"
    " --moe-router-load-balancing-type none"
)
CHECKPOINT = "CHECKPOINT"
"""Stands for a folder that variants share."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    rehearse: bool = False
    """Run tiny models on the CPU."""
    only: tuple[str, ...] = ()
    """Names of variants. Default: all."""
    seconds: float = 1e9
    """Start no variant after this time."""
    limit: float = 25.0
    """Seconds after which a variant is killed."""


@dataclass(frozen=True)
class Variant:
    """One change of the step.

    Attributes:
        flags: more flags of `pretrain_gpt.py`.
        environment: variables that are set.
        is_plannable: the planner has constants for it, and is calibrated to it.
    """

    name: str
    flags: str = ""
    micro_batch: int = 2
    sequence: int = 4096
    sizes: Sizes | None = None
    environment: tuple[tuple[str, str], ...] = ()
    is_plannable: bool = False

    def workload(self, is_rehearsal: bool) -> Workload:
        """Return its step: two micro batches."""
        if is_rehearsal:
            sizes = workload.TINY.sizes
        else:
            sizes = replace(self.sizes or Workload().sizes, sequence=self.sequence)
        steps = workload.WARM_UP_STEPS + (1 if is_rehearsal else 2)
        return Workload(
            sizes=sizes, micro_batch=self.micro_batch, num_micro_batches=2, num_steps=steps
        )

    def words(self, folder: Path, *, is_rehearsal: bool) -> list[str]:
        """Return the flags that are added to those of its workload."""
        text = self.flags.replace(CHECKPOINT, str(folder / "checkpoint"))
        if is_rehearsal:
            text = text.replace("--num-experts 128", "--num-experts 8")
            text = text.replace("--moe-ffn-hidden-size 768", "--moe-ffn-hidden-size 8")
        return text.split()


GRAPHS = "--cuda-graph-impl local"
VARIANTS = (
    Variant("base", is_plannable=True),
    Variant("without Triton", environment=(("LATTICE_TRITON", "0"),)),
    Variant("1 x 4096", micro_batch=1, is_plannable=True),
    Variant("4 x 4096", micro_batch=4, is_plannable=True),
    Variant("1 x 8192", micro_batch=1, sequence=8192, is_plannable=True),
    Variant("fused head and loss", "--cross-entropy-loss-fusion"),
    Variant("1B, 1 x 4096", micro_batch=1, sizes=LLAMA_1B, is_plannable=True),
    Variant("1B, 1 x 4096, graphs", GRAPHS, micro_batch=1, sizes=LLAMA_1B),
    Variant("1B, 4 x 4096", f"--save {CHECKPOINT} --save-interval 9 --no-save-optim", micro_batch=4,
            sizes=LLAMA_1B, is_plannable=True),
    Variant("experts", FINE_GRAINED, sizes=WITH_EXPERTS),
    Variant("fp8", "--fp8-format hybrid --fp8-recipe tensorwise"),
    Variant("1B, 4 x 4096, LoRA", f"--lora-rank 16 --pretrained-checkpoint {CHECKPOINT}",
            micro_batch=4, sizes=LLAMA_1B),
    Variant("deterministic", "--deterministic-mode"),
    Variant("graphs", GRAPHS),
)  # fmt: skip
"""By importance: the last may find no time. The one with LoRA adapts the checkpoint of another."""


def in_a_fork(variant: Variant, folder: Path, limit_s: float, *, is_rehearsal: bool) -> Row:
    """Measure a variant in a fork of this process; return its row, or what went wrong."""
    row: Row = {"variant": variant.name}
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setpgid(0, 0)
            found = _measured(variant, folder, is_rehearsal)
            os.write(writer, json.dumps(found).encode())
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(writer)
    text = b""
    end = time.monotonic() + limit_s
    while select.select([reader], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(reader, 1 << 16)
        text += part
        if not part:
            break
    else:
        row |= {"error": f"took more than {limit_s:.0f} s"}
    os.close(reader)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)  # its loader's processes too
    _, status = os.waitpid(child, 0)
    if text:
        return row | json.loads(text)
    return {"error": f"ended with status {os.waitstatus_to_exitcode(status)}"} | row


def _measured(variant: Variant, folder: Path, is_rehearsal: bool) -> Row:
    os.environ.update(variant.environment)
    try:
        words = variant.words(folder, is_rehearsal=is_rehearsal)
        return measure(variant.name, variant.workload(is_rehearsal), words)
    except BaseException as error:
        traceback.print_exc()
        cause = error.__cause__ or error
        kind = OUT_OF_MEMORY if isinstance(cause, torch.OutOfMemoryError) else type(cause).__name__
        return {"error": f"{kind}: {cause}"[:300]}


def calibrated(measured: Sequence[MeasuredRun], gpu: Gpu) -> Iterator[Row]:
    """Yield the planner's time of each run before and after it is calibrated to all of them."""
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
    """Return the runs among rows that the planner can predict."""
    plannable = {each.name: each for each in VARIANTS if each.is_plannable}
    found = []
    for row in rows:
        each = plannable.get(str(row["variant"]))
        if each is not None and "ms" in row:
            run = run_of_words(words_of(each.workload(False)), 1)
            found.append(MeasuredRun(each.name, run, 1e-3 * float(str(row["ms"]))))
    return found


def main() -> int:
    """Measure the variants, then calibrate."""
    prog, begin = "python -m benchmarks.gpu.variants", time.monotonic()
    options = read_command_line(Flags, prog=prog, description=__doc__)
    if options.rehearse:
        workload.choose_device(True)
    load_predictor()  # what each run asks for its log
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for each in VARIANTS:
            if options.only and each.name not in options.only:
                continue
            if time.monotonic() - begin > options.seconds:
                row: Row = {"variant": each.name, "not run": "no time was left"}
            else:
                row = in_a_fork(
                    each, Path(folder), options.limit, is_rehearsal=options.rehearse
                )  # fmt: skip
            workload.print_row(row)
            rows.append(row)
    names = {str(row["device"]) for row in rows if "device" in row} - {"cpu"}
    try:
        for name in names:
            hardware = load_predictor().hardware
            known = max((kind for kind in hardware.gpus if kind in name), key=len, default=name)
            for row in calibrated(measured_runs(rows), gpu_named(known, hardware)):
                workload.print_row(row)
    except MegatronError as error:
        workload.print_row({"plan of": "all", "error": str(error)})
    failed = [row for row in rows if OUT_OF_MEMORY not in str(row.get("error", OUT_OF_MEMORY))]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
