"""Rates of the data path: preprocessing, index building, blending, fetching.

    python benchmarks/data.py --input corpus.jsonl --vocab-file vocab.json --merge-file merges.txt

Without arguments it uses the test text and a tokenizer trained on it. Preprocessing alternates
with the bare tokenizer library on the same texts, so that both meet the same load of the machine;
processor seconds are the figure to compare, wall seconds depend on who else is working.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"
ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

import numpy as np  # noqa: E402

from megatron.core.datasets.blending import greedy_blend  # noqa: E402
from megatron.core.datasets.index_building import (  # noqa: E402
    EpochPlan,
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from megatron.core.datasets.indexed_dataset import (  # noqa: E402
    IndexedDataset,
    IndexedDatasetBuilder,
)


def prepare_default(folder: Path) -> tuple[str, str, str]:
    """Write the test text as JSON lines and train a tokenizer on it."""
    import tokenizers

    texts = [path.read_text() for path in sorted((ROOT / "tests/fixtures/text").glob("*.txt"))]
    paragraphs = [p for text in texts for p in text.split("\n\n") if p.strip()] * 10
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": p}) + "\n" for p in paragraphs))
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        texts, vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False
    )
    bpe.save_model(str(folder))
    return str(corpus), str(folder / "vocab.json"), str(folder / "merges.txt")


def children_seconds() -> float:
    """Return the processor seconds of all finished child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measured(command: list[str]) -> tuple[float, float]:
    """Run a command; return its wall and processor seconds."""
    before, begun = children_seconds(), time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begun, children_seconds() - before


RAW = """
import json, sys
from tokenizers import ByteLevelBPETokenizer
tokenizer = ByteLevelBPETokenizer(sys.argv[2], sys.argv[3])._tokenizer
texts = [json.loads(line)["text"] for line in open(sys.argv[1])]
print(sum(len(e.ids) for i in range(0, len(texts), 200)
          for e in tokenizer.encode_batch_fast(texts[i:i + 200], add_special_tokens=False)))
"""
"""The least a tokenizing program can do: read, tokenize, count; nothing is written."""


def preprocessing(corpus: str, vocab: str, merges: str, folder: Path, repeats: int) -> None:
    """Compare the tool with the bare library, alternating."""
    raw = [sys.executable, "-c", RAW, corpus, vocab, merges]
    tool = [
        sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", corpus,
        "--output-prefix", str(folder / "out"), "--tokenizer-type", "GPT2BPETokenizer",
        "--vocab-file", vocab, "--merge-file", merges, "--append-eod", "--workers",
    ]  # fmt: skip
    programs = {"bare library": raw, "1 worker": [*tool, "1"], "2 workers": [*tool, "2"]}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, command in programs.items():
            seconds[name].append(measured(command))
    tokens = int(IndexedDataset(str(folder / "out_text_document")).sequence_lengths.sum())
    print(f"preprocessing {os.path.getsize(corpus) / 1e6:.1f} MB, {tokens:,} tokens")
    base = statistics.median(cpu for _, cpu in seconds["bare library"])
    for name, pairs in seconds.items():
        wall = statistics.median(wall for wall, _ in pairs)
        cpu = statistics.median(cpu for _, cpu in pairs)
        print(
            f"  {name:<14} wall {wall:6.2f} s {tokens / wall:>10,.0f} tokens/s   "
            f"processor {cpu:6.2f} s, {cpu / base:.2f} of the bare library"
        )


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
        blend = partial(greedy_blend, weights, 10_000_000)
        timed(f"blend of {count} datasets, 10,000,000 samples", blend)


def main() -> None:
    """Measure everything and print it."""
    parser = argparse.ArgumentParser(description="Rates of the data path.")
    parser.add_argument("--input", help="JSON lines with a key 'text'")
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--documents", type=int, default=1_000_000)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = (args.input, args.vocab_file, args.merge_file)
        corpus, vocab, merges = source if args.input else prepare_default(folder)
        preprocessing(corpus, vocab, merges, folder, args.repeats)
        indices(folder, args.documents)


if __name__ == "__main__":
    main()
