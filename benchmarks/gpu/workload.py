"""The training step of all rows of stages B and C, and functions that make and print a row.

This module imports nothing of `megatron`, because the process that measures megatron-core, whose
package has the same name as ours, imports this module too.

Legend: s sequence, h hidden, v vocabulary.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from benchmarks.plain_gpt import Sizes

Row = dict[str, object]

PEAK_FLOPS = 989e12
"""Dense bf16 FLOP/s of one H100 SXM or H200, NVIDIA's data sheet."""
TURN = "LATTICE_GPU_CHECK_TURN"
"""Environment variable of `tools/gpu_session.py`: a file that exists when this check may use the
GPU, and contains the time (monotonic) when the check is killed."""
WARM_UP_STEPS = 2
"""First steps, which allocate and compile; `planner.measured_run` skips the same number."""

PREDICTED_MFU = {
    "ours": (51.8, 60.7),
    "plain-compiled": (48.0, 54.0),
    "hf-liger": (46.0, 51.0),
    "megatron-core": (38.0, 45.0),
}
"""MFU in percent, predicted before any GPU ran this. Ours: bytes and FLOPs of each kernel of the
traced step at the rates of an H100 (products at 640 to 720 TFLOP/s). The lower value assumes that
the cross entropy moves 20 bytes per element and that weight gradients are rounded to bf16, the
upper value assumes neither. The others: from published runs on several GPUs."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A Llama and its batches, in bf16 with fp32 main weights.

    Attributes:
        micro_batch: samples of a micro batch.
        num_micro_batches: micro batches of one step.
        num_steps: number of steps, including the first `WARM_UP_STEPS`.
    """

    sizes: Sizes = field(
        default_factory=lambda: Sizes(
            num_layers=8, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_size=14336,
            vocab_size=128256, sequence=4096,
        )
    )  # fmt: skip
    micro_batch: int = 2
    num_micro_batches: int = 8
    num_steps: int = 6

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.micro_batch * self.num_micro_batches * self.sizes.sequence

    def with_micro_batch(self, samples: int) -> Workload:
        """Return the same step with micro batches of `samples` samples."""
        number = self.micro_batch * self.num_micro_batches // samples
        return replace(self, micro_batch=samples, num_micro_batches=number)


TINY = Workload(
    sizes=Sizes(num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, ffn_size=64,
                vocab_size=256, sequence=32),
    num_micro_batches=2,
    num_steps=WARM_UP_STEPS + 1,
)  # fmt: skip


def workload(is_rehearsal: bool) -> Workload:
    """Return the measured step: 8 layers of the width of Llama 3 8B, or a tiny model."""
    return TINY if is_rehearsal else Workload()


def model_flops(sizes: Sizes, tokens: int) -> float:
    """Return the FLOPs of a forward and a backward pass: the numerator of every MFU.

    6 per token and weight of a matrix, with the head and without the embedding, plus the causal
    half of attention: 118.2e12 for 8,192 tokens of the full workload.
    """
    h, head = sizes.hidden_size, sizes.hidden_size // sizes.num_heads
    of_attention = h * (sizes.num_heads + 2 * sizes.num_kv_heads) * head + h * h
    weights = sizes.num_layers * (of_attention + 3 * h * sizes.ffn_size) + h * sizes.vocab_size
    # Two products of s x s with half of the scores: 2 * 2 * s * h / 2 forward, three times in all.
    attention = sizes.num_layers * 6.0 * sizes.sequence * h
    return tokens * (6.0 * weights + attention)


def wait_for_turn() -> None:
    """Return when the check before this one has ended. Call it after the imports."""
    while TURN in os.environ and not os.path.exists(os.environ[TURN]):
        time.sleep(0.02)


def seconds_left() -> float:
    """Return the seconds until the runner kills this check; infinity without a runner."""
    if TURN not in os.environ:
        return math.inf
    return float(Path(os.environ[TURN]).read_text(encoding="ascii")) - time.monotonic()


def choose_device(is_rehearsal: bool) -> torch.device:
    """Return the device to measure, the CPU for a rehearsal, when this check may use it.

    Raises:
        SystemExit: there is no accelerator and this is no rehearsal.
    """
    wait_for_turn()
    if is_rehearsal:
        os.environ["LATTICE_DEVICE"] = "cpu"
        torch.set_num_threads(1)  # for tiny tensors, several threads would wait for each other
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        raise SystemExit("torch finds no accelerator here; --rehearse runs tiny sizes on the CPU")
    return torch.device(accelerator.type, 0)


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or "cpu"."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.get_device_module(device.type).get_device_name())


def clocks() -> Row:
    """Return clock (MHz), power (W) and temperature (C) of the first GPU; empty without one."""
    query = "--query-gpu=clocks.sm,power.draw,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "--id=0"]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout
        values = [float(word) for word in out.split(",")]
        return dict(zip(("MHz", "W", "C"), values, strict=True))
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}


def print_row(row: Row) -> None:
    """Print a row in the runner's format."""
    print(f"ROW: {json.dumps(row)}", flush=True)


def shape_of(work: Workload) -> str:
    """Return micro batches per step, samples per micro batch, and tokens per sample."""
    return f"{work.num_micro_batches} x {work.micro_batch} x {work.sizes.sequence}"


def step_row(
    name: str,
    work: Workload,
    device: torch.device,
    seconds: Sequence[float],
    loss: float,
    peak_bytes: float,
    before: Row,
    flops: float | None = None,
) -> Row:
    """Return the row of one measured step.

    Args:
        seconds: duration of each step, at least two, including the first ones. If there are at
            most `WARM_UP_STEPS`, only the last one is measured.
        loss: loss of the last step.
        before: `clocks` before the first step; empty if unknown.
        flops: FLOPs of a step; None for `model_flops` of the workload.
    Raises:
        RuntimeError: the loss is not finite: the time of such a step is meaningless.
    """
    if not math.isfinite(loss):
        raise RuntimeError(f"{name}: the loss of the last step is {loss}")
    measured = seconds[min(WARM_UP_STEPS, len(seconds) - 1) :]
    step_s = statistics.median(measured)
    tflops = 1e-12 * (flops or model_flops(work.sizes, work.tokens)) / step_s
    row: Row = {
        "step": name,
        "device": device_name(device),
        "micro batches": shape_of(work),
        "ms": round(1e3 * step_s, 2),
        "measured steps": len(measured),
        "fastest ms": round(1e3 * min(measured), 2),
        "slowest ms": round(1e3 * max(measured), 2),
        "first step ms": round(1e3 * seconds[0], 2),
        "tokens/s": round(work.tokens / step_s),
        "TFLOP/s": round(tflops, 1),
        "peak GiB": round(peak_bytes / 2**30, 2),
        "loss": round(loss, 4),
        "before": before,
        "after": clocks(),
    }
    if device.type != "cpu":
        row["MFU %"] = round(1e14 * tflops / PEAK_FLOPS, 2)
    if name in PREDICTED_MFU:
        row["predicted MFU %"] = list(PREDICTED_MFU[name])
    return row
