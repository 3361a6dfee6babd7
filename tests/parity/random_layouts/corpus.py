"""A corpus of short documents of random tokens: `python -m ....corpus PREFIX` writes one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

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


if __name__ == "__main__":
    write_corpus(Path(sys.argv[1]))
