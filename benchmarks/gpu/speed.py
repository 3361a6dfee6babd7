"""Stage B: measure one training step of `pretrain_gpt.py`, at the sizes of `workload.py`.

    python -m benchmarks.gpu.speed                # on the GPU of this machine
    python -m benchmarks.gpu.speed --rehearse     # a tiny model on the CPU

Prints one row: time, tokens/s, TFLOP/s, MFU, peak memory, and the clocks before and after.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pretrain_gpt
from benchmarks.gpu import workload
from benchmarks.gpu.workload import Row, Workload
from megatron.core.foundation import device
from megatron.core.settings.command_line import read_command_line
from megatron.training.reports import STEP_TIME, read_run
from megatron.training.setup.traced_memory import UntraceableStepError, memory_of_stages
from megatron.training.setup.traced_rank import ModelScript
from megatron_lattice.planner.memory import GIB
from megatron_lattice.planner.search_command import run_of_words

LOSS = "lm loss"
THROUGHPUT = "throughput"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    rehearse: bool = False
    """Run a tiny model on the CPU."""


def words_of(work: Workload) -> list[str]:
    """Return the flags of `pretrain_gpt.py` for a workload."""
    z = work.sizes
    text = (
        f"--num-layers {z.num_layers} --hidden-size {z.hidden_size} --ffn-hidden-size {z.ffn_size}"
        f" --num-attention-heads {z.num_heads} --group-query-attention"
        f" --num-query-groups {z.num_kv_heads} --vocab-size {z.vocab_size} --bf16"
        " --hidden-dropout 0 --attention-dropout 0 --swiglu --disable-bias-linear"
        " --normalization RMSNorm --position-embedding-type rope"
        " --untie-embeddings-and-output-weights --tokenizer-type NullTokenizer --mock-data"
        f" --use-distributed-optimizer --seq-length {z.sequence}"
        f" --max-position-embeddings {z.sequence} --micro-batch-size {work.micro_batch}"
        f" --global-batch-size {work.micro_batch * work.num_micro_batches}"
        f" --train-iters {work.num_steps} --rerun-mode disabled --lr 1e-4 --eval-iters 0"
        " --log-interval 1"
    )
    return text.split()


def train(words: Sequence[str], folder: Path) -> dict[str, list[float]]:
    """Train once in this process; return curve name -> value of each step.

    Raises:
        RuntimeError: the run failed; it has printed the error, and its exception is the cause.
    """
    metrics = folder / "metrics.jsonl"
    more = ["--log-throughput", "--metrics-jsonl", str(metrics)]
    sys.argv = ["pretrain_gpt.py", *words, *more]
    try:
        pretrain_gpt.main()
    except SystemExit as end:
        if end.code:
            text = f"pretrain_gpt.py ended with status {end.code}"
            raise RuntimeError(text) from (end.__context__ or end)
    return {name: list(curve.values) for name, curve in read_run(metrics).series.items()}


def estimated_gib(work: Workload, more: Sequence[str] = ()) -> float | None:
    """Return the peak memory of `work` with more flags from the traced step, as `--dry-run` does.

    None if the step cannot be traced.
    """
    run = run_of_words([*words_of(work), *more], 1)
    script = ModelScript(pretrain_gpt.model_provider, pretrain_gpt.forward_step)
    try:
        peak = max(stage.peak_bytes for stage in memory_of_stages(run, script))
    except UntraceableStepError as error:
        print(error)
        return None
    return round(peak / GIB, 2)


def measure(
    name: str,
    work: Workload,
    more: Sequence[str] = (),
    *,
    before: Row | None = None,
    counts_flops: bool = False,
) -> Row:
    """Train `work` with more flags and return its row.

    Args:
        before: `workload.clocks` before the run.
        counts_flops: use the FLOPs that the program counts: the model is no Llama.
    Raises:
        RuntimeError: the run failed or its loss is not finite.
    """
    with tempfile.TemporaryDirectory() as folder:
        curves = train([*words_of(work), *more], Path(folder))
    seconds = curves[STEP_TIME]
    flops = 1e12 * curves[THROUGHPUT][-1] * seconds[-1] if counts_flops else None
    return workload.step_row(
        name, work, device.current_device(), seconds, curves[LOSS][-1],
        device.peak_memory_bytes(), before or {}, flops,
    )  # fmt: skip


def main() -> None:
    """Measure and print."""
    options = read_command_line(Flags, prog="python -m benchmarks.gpu.speed", description=__doc__)
    workload.choose_device(options.rehearse)
    work, before = workload.workload(options.rehearse), workload.clocks()
    workload.print_row(measure("ours", work, before=before))


if __name__ == "__main__":
    main()
