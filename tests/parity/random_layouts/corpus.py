"""Corpora of short documents of random tokens: `python -m ....corpus PREFIX` writes them."""

import sys
from pathlib import Path

import numpy as np
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

CORPUS = "CORPUS"
CONVERSATIONS = {"SINGLE_CONVERSATIONS": 1, "PACKED_CONVERSATIONS": 3}
"""Words in place of a path, and how many conversations are in one sample at most."""
VOCABULARY = 89
"""Of the tokenizer NullTokenizer, whose last id ends a document."""


def write_corpus(prefix: Path) -> None:
    """Write PREFIX.bin and PREFIX.idx: 800 documents of 1 to 24 tokens and their end."""
    rng, end = np.random.default_rng(0), VOCABULARY - 1
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in rng.integers(1, 25, size=800):
        tokens = np.append(rng.integers(0, end, size=length), end)
        builder.add_document(torch.from_numpy(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")


def write_conversations(prefix: Path, most: int) -> None:
    """Write PREFIX and PREFIX_mask, as `tools/preprocess_data.py --sft` does: 800 packs of at most
    15 tokens, each of 1 to `most` conversations, a part of which is learned."""
    rng = np.random.default_rng(most)
    names = {"": np.uint16, "_mask": np.uint8}
    builders = {n: IndexedDatasetBuilder(f"{prefix}{n}.bin", dtype=d) for n, d in names.items()}
    for _ in range(800):
        lengths = rng.integers(2, 15 // most + 1, size=rng.integers(1, most + 1)).tolist()
        total = sum(lengths)
        tokens, mask = rng.integers(0, VOCABULARY - 1, size=total), rng.integers(0, 2, size=total)
        builders[""].add_document(torch.from_numpy(tokens), lengths)
        builders["_mask"].add_document(torch.from_numpy(mask), lengths)
    for name, builder in builders.items():
        builder.finalize(f"{prefix}{name}.idx")


def write_all(folder: Path) -> dict[str, str]:
    """Write every corpus into a folder; return its prefix by the word that stands for it."""
    write_corpus(folder / "corpus")
    found = {CORPUS: str(folder / "corpus")}
    for word, most in CONVERSATIONS.items():
        write_conversations(folder / word.lower(), most)
        found[word] = str(folder / word.lower())
    return found


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
    for word, most in CONVERSATIONS.items():
        write_conversations(Path(f"{sys.argv[1]}_{word.lower()}"), most)
