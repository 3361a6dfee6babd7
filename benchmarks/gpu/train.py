"""Part `train`: published models on 1, 2, 4 and 8 accelerators by `pretrain_gpt.py`.

For each number of ranks and each layout two models: the smallest, and the largest that fits by the
dry run's estimate. What is measured is compared with what was estimated and planned before.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.processes import Machine, MeasurementFailedError, ranks_command, run
from benchmarks.gpu.report import Found, Row, Table
from megatron.core.foundation.errors import MegatronError
from megatron.core.models.gpt.presets import preset
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.planner.cluster_calibration import calibrate_to_runs
from megatron.planner.hardware import Gpu
from megatron.planner.measured_run import WARM_UP_STEPS, MeasuredRun
from megatron.planner.memory import GIB
from megatron.planner.predictor import load_predictor
from megatron.planner.run_layout import row_of_run
from megatron.planner.search_command import run_of_words
from megatron.planner.step_command import predicted_step
from megatron.training.cli.dry_run import memory_of_stages
from megatron.training.config.resolved import ResolvedRun
from megatron.training.metrics.model_size import ModelSize
from megatron.training.reports.run_charts import MEMORY, THROUGHPUT
from megatron.training.reports.run_record import read_run
from megatron.training.reports.scalar_files import STEP_TIME

PRESETS = ("llama3.2-1b", "llama3.2-3b", "llama3.1-8b", "qwen2.5-14b", "qwen2.5-32b",
           "llama3.1-70b")  # fmt: skip
_FILLED = 0.85
"""Share of the memory that an estimate may have: NCCL, cuBLAS and fragments are not in it."""
_MICROBATCHES = 8
_PROFILED = 10
"""Step that is traced, after those that are timed."""
_TIMEOUT_S = 1800
_NUM_KERNELS = 12


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run.

    Attributes:
        words: flags of the model and the layout.
    """

    name: str
    num_ranks: int
    words: tuple[str, ...]

    def resolved(self) -> ResolvedRun:
        """Return its settings.

        Raises:
            MegatronError: they cannot be used.
        """
        return run_of_words(self.words, self.num_ranks)


def case(name: str, num_ranks: int, layout: str, *, is_tiny: bool) -> Case:
    """Return the run of a preset in a layout of `layouts`."""
    model = f"--preset {name} --seq-length 4096 --vocab-size {preset(name).vocab_size}"
    if is_tiny:
        model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32"
        model += " --max-position-embeddings 32 --vocab-size 256"
    replicas = 1 if "tensor" in layout else num_ranks
    batch = (2 if is_tiny else _MICROBATCHES) * replicas
    text = f"{model} {layout} --micro-batch-size 1 --global-batch-size {batch}"
    text += " --bf16 --attention-dropout 0 --hidden-dropout 0 --use-distributed-optimizer"
    text += " --mock-data --tokenizer-type NullTokenizer"
    short = "tp" if "tensor" in layout else "dp"
    model_name = "tiny" if is_tiny else name
    return Case(name=f"{model_name}, {short} {num_ranks}", num_ranks=num_ranks,
                words=tuple(text.split()))  # fmt: skip


def layouts(num_ranks: int) -> list[str]:
    """Return the flags of the layouts that are measured on so many ranks."""
    replicas = "--overlap-grad-reduce --overlap-param-gather" if num_ranks > 1 else ""
    shards = f"--tensor-model-parallel-size {num_ranks} --sequence-parallel"
    return [replicas] + [shards] * (num_ranks > 1)


def estimated_bytes(run: ResolvedRun) -> float:
    """Return what the dry run estimates for the rank that needs most."""
    size = ModelSize.from_settings(run)
    stages = memory_of_stages(run, size, pipeline_layout(run.transformer_config))
    return max(stage.total for stage in stages)


def cases(machine: Machine) -> Iterator[Case]:
    """Yield the runs: in each layout the smallest preset, and the largest that fits."""
    for num_ranks in machine.ranks:
        for layout in layouts(num_ranks):
            if machine.is_rehearsal:
                yield case(PRESETS[0], num_ranks, layout, is_tiny=True)
                continue
            every = [case(name, num_ranks, layout, is_tiny=False) for name in PRESETS]
            limit = _FILLED * machine.memory_bytes
            fitting = [each for each in every if estimated_bytes(each.resolved()) <= limit]
            yield from fitting[:1] + fitting[1:][-1:]


def kernel_shares(trace: Path) -> list[Row]:
    """Return the kernels that took most of a traced step, and their kinds.

    Where nothing ran on an accelerator these are torch's operators, those within others too.
    """
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel"]
    kernels = kernels or [e for e in events if e.get("cat") == "cpu_op"]
    seconds: Counter[str] = Counter()
    for event in kernels:
        seconds[event["name"]] += 1e-6 * event["dur"]
    whole = sum(seconds.values())
    return [
        {"kernel": name[:80], "kind": _kind_of(name), "ms": 1e3 * s, "share": s / whole}
        for name, s in seconds.most_common(_NUM_KERNELS)
    ]


_KINDS = {
    "communication": r"nccl|allreduce|all_reduce|allgather|reduce_scatter|c10d|gloo",
    "attention": r"flash|fmha|attention|sdpa",
    "matrix product": r"gemm|cutlass|xmma|nvjet|matmul|::mm|addmm|bmm|linear",
    "copy": r"memcpy|copy|memset",
}


def _kind_of(name: str) -> str:
    found = (kind for kind, words in _KINDS.items() if re.search(words, name, re.IGNORECASE))
    return next(found, "other")


def train(each: Case, machine: Machine) -> tuple[Row, list[Row], float]:
    """Run one case; return its row, the kernels of its traced step, and the seconds of a step.

    Raises:
        MegatronError: it failed.
    """
    run_ = each.resolved()
    folder = machine.directory.resolve() / "train" / each.name.replace(", ", "-").replace(" ", "")
    words = [*each.words, "--lr", "1e-4", "--train-iters", str(_PROFILED), "--eval-iters", "0",
             "--log-interval", "1", "--log-throughput", "--log-memory-to-tensorboard",
             "--metrics-jsonl", str(folder / "metrics.jsonl"), "--tensorboard-dir", str(folder),
             "--profile", "--use-pytorch-profiler", "--profile-step-start", str(_PROFILED),
             "--profile-step-end", str(_PROFILED + 1)]  # fmt: skip
    run(ranks_command(each.num_ranks, ["pretrain_gpt.py", *words]), folder / "log.txt",
        timeout_s=_TIMEOUT_S)  # fmt: skip
    series = read_run(folder / "metrics.jsonl").series
    counted = slice(WARM_UP_STEPS, _PROFILED - 1)
    step_s = statistics.median(series[STEP_TIME].values[counted])
    tflops = statistics.median(series[THROUGHPUT].values[counted])
    tokens = run_.schedule.global_batch_size * run_.model.seq_length
    peak = max(series[MEMORY].values)
    estimate = estimated_bytes(run_)
    row: Row = {
        "run": each.name, "ranks": each.num_ranks, "ms/step": 1e3 * step_s,
        "tokens/s": tokens / step_s, "TFLOP/s of a rank": tflops,
        "peak GiB": peak / GIB, "dry run GiB": estimate / GIB, "peak/dry run": peak / estimate,
    }  # fmt: skip
    if machine.gpu is not None:
        row["MFU"] = 1e12 * tflops / machine.gpu.peak_16_bit_flops
        row |= planned(run_, machine.gpu, step_s)
    return row, kernel_shares(folder / "trace-rank0.json"), step_s


def planned(run_: ResolvedRun, gpu: Gpu, step_s: float) -> Row:
    """Return what the planner says of a step that took `step_s`."""
    prediction, _ = predicted_step(run_, gpu)
    assert prediction.memory_bytes is not None
    return {
        "planned ms": 1e3 * prediction.seconds,
        "measured/planned": step_s / prediction.seconds,
        "planned GiB": prediction.memory_bytes / GIB,
    }


def after_calibration(measured: Sequence[MeasuredRun], gpu: Gpu) -> tuple[Row, list[Row]]:
    """Return the constants of the GPU that these runs change, and their times by them."""
    before = load_predictor()
    after = calibrate_to_runs(before, measured, gpu)
    rows: list[Row] = []
    for name, value in after.hardware.constants.items():
        if abs(value / before.hardware.constants[name] - 1) > 1e-3:
            rows.append({"constant": name, "published steps": before.hardware.constants[name],
                         "these runs": value})  # fmt: skip
    ratios = [float(each.step_s / after.seconds(row_of_run(each.run, gpu))[0]) for each in measured]
    return {"measured/planned after calibration, median": statistics.median(ratios)}, rows


def measure(machine: Machine) -> Found:
    """Run all cases."""
    rows: list[Row] = []
    failures: list[str] = []
    kernels: list[Table] = []
    measured: list[MeasuredRun] = []
    for each in cases(machine):
        try:
            row, shares, step_s = train(each, machine)
            measured.append(MeasuredRun(each.name, each.resolved(), step_s))
            rows.append(row)
            kernels.append(Table(title=f"kernels of {each.name}", rows=shares))
        except (MegatronError, MeasurementFailedError) as error:
            failures.append(f"{each.name}: {error}")
    note = (
        "Medians of the steps after the first two and before the traced one. TFLOP/s as"
        " --log-throughput counts them; the peak of memory is the last rank's; traces are in"
        " train/."
    )
    tables = [Table(title="published models", rows=rows, note=note), *kernels]
    if machine.gpu is not None and measured:
        summary, constants = after_calibration(measured, machine.gpu)
        tables.append(Table(title="the planner, calibrated to these runs", rows=[summary]))
        tables.append(Table(title="constants that this changes", rows=constants))
    return Found(tables=tables, failures=failures)
