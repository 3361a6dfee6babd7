"""The commands of the quickstart: choose layout and model, run commands with a progress bar."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm

REPOSITORY = Path(__file__).resolve().parents[2]
ITERATION = re.compile(r" iteration +(\d+)/ *(\d+) .*?elapsed time per iteration \(ms\): ([\d.]+)")
LOSS = re.compile(r" lm loss: ([-+\d.E]+)")
VALIDATION = re.compile(r"validation loss at (.+?) \| lm loss value: ([-+\d.E]+)")


@dataclass(frozen=True)
class Layout:
    """Number of processes along each axis."""

    tensor: int
    pipeline: int
    data: int
    uses_gpu: bool

    @property
    def num_processes(self) -> int:
        return self.tensor * self.pipeline * self.data

    def __str__(self) -> str:
        device = "GPU" if self.uses_gpu else "CPU process"
        plural = "" if self.num_processes == 1 else ("s" if self.uses_gpu else "es")
        return (
            f"{self.num_processes} {device}{plural}: tensor {self.tensor} x pipeline "
            f"{self.pipeline} x data {self.data}"
        )


def choose_layout(num_gpus: int) -> Layout:
    """Return TP 2 x PP 2 on the CPU; with GPUs, a similar layout on as many as fit."""
    if num_gpus == 0:
        return Layout(2, 2, 1, uses_gpu=False)
    if num_gpus < 4:
        return Layout(min(num_gpus, 2), 1, 1, uses_gpu=True)
    return Layout(2, 2, num_gpus // 4, uses_gpu=True)


def available_gpus() -> int:
    """Return the number of accelerators; 0 if LATTICE_DEVICE selects the CPU."""
    if os.environ.get("LATTICE_DEVICE") == "cpu" or not torch.accelerator.is_available():
        return 0
    return torch.accelerator.device_count()


@dataclass(frozen=True)
class Recipe:
    """Model and schedule for five minutes on two cores, or a minute on a GPU."""

    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    train_iters: int
    learning_rate: float

    def flags(self) -> list[str]:
        """Return the flags of a Llama-like model and its training."""
        return (
            f"--num-layers {self.num_layers} --hidden-size {self.hidden_size} "
            f"--num-attention-heads {self.num_heads} --seq-length {self.seq_length} "
            f"--max-position-embeddings {self.seq_length} --transformer-impl local "
            "--position-embedding-type rope --normalization RMSNorm --swiglu "
            "--disable-bias-linear --untie-embeddings-and-output-weights "
            "--attention-dropout 0 --hidden-dropout 0 "
            f"--micro-batch-size {self.micro_batch_size} "
            f"--global-batch-size {self.global_batch_size} --train-iters {self.train_iters} "
            f"--lr {self.learning_rate} --min-lr {self.learning_rate / 20} "
            f"--lr-decay-style cosine --lr-warmup-iters {max(self.train_iters // 20, 1)} "
            "--weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --seed 1234"
        ).split()


def recipe_for(layout: Layout) -> Recipe:
    """Return the recipe for this machine."""
    if layout.uses_gpu:
        return Recipe(8, 512, 8, 256, 8, 32 * layout.data, 600, 1e-3)
    return Recipe(4, 128, 4, 256, 2, 8, 800, 4e-3)


def layout_flags(layout: Layout) -> list[str]:
    """Return the flags that distribute a model over processes."""
    flags = ["--tensor-model-parallel-size", str(layout.tensor)]
    flags += ["--pipeline-model-parallel-size", str(layout.pipeline)]
    if layout.uses_gpu:
        return [*flags, "--bf16"]
    return [*flags, "--distributed-backend", "gloo"]


def torchrun(layout: Layout, script: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that starts `script` on every rank of this machine."""
    return [
        "torchrun",
        "--standalone",
        "--local-addr",  # otherwise torchrun resolves the full name of this machine
        "127.0.0.1",
        "--nproc-per-node",
        str(layout.num_processes),
        script,
        *arguments,
    ]


def show(command: Sequence[str]) -> str:
    """Format a command with one flag per line."""
    text = shlex.join(command)
    return re.sub(r" (--[a-z])", r" \\\n      \1", text)


def rank_environment(layout: Layout) -> dict[str, str]:
    """Set one thread per process if the processes already use all cores."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    if not layout.uses_gpu:
        threads = max((os.cpu_count() or 1) // layout.num_processes, 1)
        environment |= {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": "lo"}
    return environment


@dataclass
class Progress:
    """Progress of a training run, from its log."""

    milliseconds: list[float]
    last_loss: float = float("nan")
    validation: list[tuple[str, float]] | None = None


def run_training(command: Sequence[str], layout: Layout, log: Path, first: int) -> Progress:
    """Run a training command and show its log as a progress bar.

    Args:
        log: file for the output of all ranks.
        first: number of iterations that an earlier run has done.
    """
    progress = Progress([], validation=[])
    process = subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=rank_environment(layout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    bar = tqdm(
        total=None,
        initial=first,
        unit="step",
        desc="starting",
        # A log file gets a line from time to time, a terminal gets a moving bar.
        mininterval=0.2 if sys.stderr.isatty() else 15.0,
        ncols=None if sys.stderr.isatty() else 90,
    )
    with log.open("a") as copy:
        for line in process.stdout:
            copy.write(line)
            if (found := VALIDATION.search(line)) is not None:
                progress.validation.append((found[1], float(found[2])))
                bar.write(f"  held-out loss at {found[1]}: {float(found[2]):.3f}")
            if (found := ITERATION.search(line)) is None:
                continue
            progress.milliseconds.append(float(found[3]))
            bar.total = int(found[2])
            bar.set_description("training", refresh=False)
            if (loss := LOSS.search(line)) is not None:
                progress.last_loss = float(loss[1])
                bar.set_postfix_str(f"loss {progress.last_loss:.3f}", refresh=False)
            bar.update(int(found[1]) - bar.n)
    bar.close()
    stop_if_failed(process.wait(), log)
    return progress


def run_quietly(command: Sequence[str], layout: Layout, log: Path) -> str:
    """Run a command, write its output to `log`, and return the output."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=rank_environment(layout),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    with log.open("a") as copy:
        copy.write(done.stdout)
    stop_if_failed(done.returncode, log)
    return done.stdout


def stop_if_failed(return_code: int, log: Path) -> None:
    """End the quickstart with the last output lines of a command that failed."""
    if return_code:
        lines = log.read_text().splitlines()
        # torchrun's lines after the ranks' last line concern other ranks.
        fatal = [number for number, line in enumerate(lines) if "FATAL[" in line]
        end = fatal[-1] + 1 if fatal else len(lines)
        shown = "\n".join(lines[max(end - 30, 0) : end])
        raise SystemExit(f"{shown}\n\nThis command failed ({return_code}); its log: {log}")


class Stopwatch:
    """Wall seconds of named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._since = time.monotonic()

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        now = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
        self._since = now
