"""Give the commands bad input and show what they say: `python -m tests.parity.bad_input`.

Every case is a real command line. Its last words are printed and checked for the text that a user
needs; the exit status is 1 if one is missing. `--only TEXT` runs the cases whose title has TEXT.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.settings.command_line import read_command_line
from tests.harness.machine import ONE_MACHINE, free_port

ROOT = Path(__file__).parents[2]
MODEL = [
    "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16",
    "--micro-batch-size", "2", "--train-iters", "4", "--lr", "1e-3", "--log-interval", "1",
    "--num-workers", "0",
]  # fmt: skip
MOCK = [*MODEL, "--mock-data", "--vocab-size", "90"]


@dataclass(frozen=True)
class Case:
    """A title, how to run it, and what its output must hold."""

    title: str
    run: Callable[[Path], str]
    expected: tuple[str, ...]


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a command on the CPU."""
    return {
        **os.environ,
        "LATTICE_DEVICE": "cpu",
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": str(ROOT),
        **more,
    }


def command(*words: str, **more: str) -> str:
    """Run a command that must fail; return what it says on standard error."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0, f"{words} succeeded:\n{done.stdout}"
    return done.stderr


def pretrain(*words: str) -> str:
    """Run pretrain_gpt.py in one process."""
    return command("pretrain_gpt.py", *words)


def pretrain_on(num_ranks: int, *words: str) -> str:
    """Run pretrain_gpt.py under torchrun."""
    launcher = ("-m", "torch.distributed.run", *ONE_MACHINE, "--nproc-per-node", str(num_ranks))
    return command(*launcher, "pretrain_gpt.py", *words)


def write_corpus(directory: Path, *, token: int = 5) -> Path:
    """Write ten documents of 20 tokens, one of which is `token`; return their prefix."""
    prefix = directory / "corpus"
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.int32)
    for document in range(10):
        tokens = [*range(19), token if document == 3 else 1]
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return prefix


def on_corpus(prefix: Path) -> list[str]:
    """Return flags that train on all of a corpus of ids below 90."""
    return [*MODEL, "--data-path", str(prefix), "--split", "1,0,0",
            "--tokenizer-type", "NullTokenizer", "--vocab-size", "90"]  # fmt: skip


def truncated_index(directory: Path) -> str:
    prefix = write_corpus(directory)
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes()[:-7])
    return pretrain(*on_corpus(prefix))


def token_outside(tp: int) -> Callable[[Path], str]:
    def run(directory: Path) -> str:
        words = [*on_corpus(write_corpus(directory, token=70000)), "--train-iters", "12"]
        if tp == 1:
            return pretrain(*words)
        return pretrain_on(tp, *words, "--tensor-model-parallel-size", str(tp))

    return run


def different_flags(directory: Path) -> str:
    """Start two ranks by hand, as two nodes would be, with different learning rates."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "pretrain_gpt.py", *MOCK, "--lr", lr],
            cwd=ROOT,
            env=environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2",
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            ),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, lr in enumerate(("0.001", "0.002"))
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[1] for process in ranks]
    assert all(process.returncode == 10 for process in ranks), [p.returncode for p in ranks]
    return "".join(said)


def broken_line(directory: Path) -> str:
    path = directory / "text.jsonl"
    path.write_text('{"text": "1 2 3"}\n{"text": "4 5"\n')
    return command(
        "tools/preprocess_data.py", "--input", str(path), "--output-prefix",
        str(directory / "out"), "--tokenizer-type", "NullTokenizer", "--vocab-size", "90",
        "--workers", "1",
    )  # fmt: skip


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """Mount a disk of 64 KiB; needs root."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)], check=True)
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def full_disk(directory: Path) -> str:
    with small_disk(directory):
        return pretrain(*MOCK, "--save", str(directory / "save"), "--save-interval", "2")


CASES = (
    Case(
        "heads, layers and batch that do not divide",
        lambda directory: pretrain(
            *MOCK, "--num-layers", "5", "--num-attention-heads", "3", "--hidden-size", "33",
            "--global-batch-size", "7", "--tensor-model-parallel-size", "2",
            "--pipeline-model-parallel-size", "2", "--dry-run", "--dry-run-world-size", "4",
        ),
        ("num_attention_heads=3 cannot be split", "5 layers cannot be split",
         "--global-batch-size 7 cannot be split", "FATAL[CONFIG]"),
    ),
    Case(
        "an unknown flag",
        lambda directory: pretrain(*MOCK, "--nun-layers", "3"),
        ("unknown flag --nun-layers", "did you mean --num-layers?"),
    ),
    Case(
        "flags whose mechanism does not exist",
        lambda directory: pretrain(
            *MOCK, "--fim-data", "--hybrid-layer-pattern", "M-"
        ),
        ("--fim-data is not supported", "--hybrid-layer-pattern M- is not supported"),
    ),
    Case(
        "missing data",
        lambda directory: pretrain(*on_corpus(directory / "nothing")),
        ("nothing.idx and", "tools/preprocess_data.py", "FATAL[DATA]"),
    ),
    Case("a truncated .idx", truncated_index, ("FATAL[DATA]", "corpus.idx")),
    Case("a token outside the vocabulary, tp 1", token_outside(1), ("token 70000", "document 3")),
    Case("a token outside the vocabulary, tp 2", token_outside(2), ("token 70000", "document 3")),
    Case("a token outside the vocabulary, tp 4", token_outside(4), ("token 70000", "document 3")),
    Case(
        "ranks launched with different flags",
        different_flags,
        ("--lr: rank 1 0.002, rank 0 0.001", "different flags"),
    ),
    Case(
        "a loss that is not finite",
        lambda directory: pretrain(*MOCK, "--lr", "1e30", "--clip-grad", "0"),
        ("FATAL[NONFINITE]", "iteration 2"),
    ),
    Case("a broken line of JSONL", broken_line, ("2", "text.jsonl")),
    Case("no space on the disk for a checkpoint", full_disk, ("FATAL[CHECKPOINT]", "save")),
)  # fmt: skip


def last_words(said: str) -> str:
    """Return what this project said, without the launcher's own report."""
    lines = [line for line in said.splitlines() if not line.startswith(("W1", "E1", "W0", "E0"))]
    fatal = [number for number, line in enumerate(lines) if line.startswith("FATAL[")]
    return "\n".join(lines[: fatal[-1] + 1] if fatal else lines).strip()


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    only: str = ""
    """Run cases whose title has this text."""


def main() -> int:
    only = read_command_line(Flags, description=__doc__.splitlines()[0]).only
    failures = []
    for case in CASES:
        if only not in case.title:
            continue
        if case.run is full_disk and os.geteuid() != 0:
            print(f"\n=== {case.title}\nnot shown: mounting a small disk needs root")
            continue
        with tempfile.TemporaryDirectory() as directory:
            said = last_words(case.run(Path(directory)))
        print(f"\n=== {case.title}\n{said}", flush=True)
        missing = [text for text in case.expected if text not in said]
        if missing or "Traceback" in said:
            failures.append(f"{case.title}: {missing or 'a traceback'}")
    print("\n" + ("\n".join(failures) if failures else "every message says what it must"))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
