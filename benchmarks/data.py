"""Rates of the data path: building indices, blending, fetching (see also `preprocessing`).

    python -m benchmarks.data

Compare processor seconds: wall seconds depend on the load of the machine.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
)
from megatron.core.datasets.order.blend_order import greedy_counts, stride_of_table
from megatron.core.datasets.order.index_building import (
    EpochPlan,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.settings.command_line import read_command_line

os.environ["TOKENIZERS_PARALLELISM"] = "false"


def timed(label: str, work: Callable[[], object]) -> None:
    """Run once and print wall and processor seconds."""
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - begun, time.process_time() - cpu
    print(f"  {label:<58} wall {wall:6.2f} s  processor {cpu:6.2f} s")


def indices(folder: Path, num_documents: int) -> None:
    """Open, check and index a corpus of many documents."""
    lengths = np.random.RandomState(0).randint(1, 2000, num_documents).astype(np.int32)
    prefix = str(folder / "many")
    tokens = int(lengths.sum(dtype=np.int64))
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint8)
    for start in range(0, num_documents, 20_000):
        part = lengths[start : start + 20_000].astype(np.int64)
        builder.add_documents(np.zeros(part.sum(), np.uint8), part, np.ones(len(part), np.int64))
    builder.finalize(prefix + ".idx")
    print(f"index of {num_documents:,} documents, {tokens:,} tokens, sequence length 2048")
    timed("open and check .bin/.idx", lambda: IndexedDataset(prefix))
    documents = np.arange(num_documents, dtype=np.int32)
    for epochs in (1, 3):
        plan = plan_epochs(tokens, 2048, 1, epochs * tokens // 2048 - 1)

        def build(plan: EpochPlan = plan) -> None:
            random = np.random.RandomState(1)
            order = build_document_index(documents, plan, random)
            samples = build_sample_index(lengths, order, plan)
            build_shuffle_index(len(samples) - 1, plan, random)

        timed(f"document, sample and shuffle index, {plan.num_epochs} epochs", build)
    for count in (2, 10, 100):
        weights = np.random.RandomState(count).rand(count)
        weights /= weights.sum()
        blend = partial(greedy_counts, weights, 10_000_000, stride_of_table(count))
        timed(f"blend of {count} datasets, 10,000,000 samples", blend)


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    documents: int = 1_000_000


def main() -> None:
    """Measure everything and print it."""
    args = read_command_line(Flags, description="Rates of the data path.")
    with tempfile.TemporaryDirectory() as name:
        indices(Path(name), args.documents)


if __name__ == "__main__":
    main()
