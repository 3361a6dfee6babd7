"""Preprocessing against the bare tokenizer library on the same text, alternating.

    python -m benchmarks.preprocessing --input corpus.jsonl --megabytes 100 \
        --bpe FOLDER_WITH_VOCAB_AND_MERGES --pieces tokenizer.model --ranks gpt2.tiktoken

Each round runs the bare library once and then each of `--ways`: `--ways library:1 --largest 0`
compares these two alone. Without arguments it uses the test text and tokenizers trained on it
(under a minute; too short for reliable figures). For each library it prints tokens per second of
the bare library in one process with the texts in memory, and of the whole tool, from start to end,
with 1 and 2 workers, through the same library and through the fast engine; all files must be equal.
Then it prints the start-up time, and the peak memory over the size of the input.

With `--peer PYTHON`, an interpreter with megatron-core and tokenizers, the same job also runs in
the way of Megatron-LM's tool: a pool of 2 processes with one document per task, 32 at a time, and
one process that writes them through megatron-core's builder. The files must be equal, too.
`real_text` makes an input out of documentation and sources.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag

ROOT = Path(__file__).resolve().parents[1]
RAW = r"""
import os
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import base64, json, sys, time
kind, corpus, *files = sys.argv[1:]
texts = [json.loads(line)["text"] for line in open(corpus)]
if kind == "bpe":
    from tokenizers import ByteLevelBPETokenizer
    model = ByteLevelBPETokenizer(*files)._tokenizer
    def encode(part):
        return [e.ids for e in model.encode_batch_fast(part, add_special_tokens=False)]
elif kind == "pieces":
    import sentencepiece
    model = sentencepiece.SentencePieceProcessor(model_file=files[0])
    def encode(part):
        return model.encode(part, num_threads=1)
else:
    import tiktoken
    ranks = {base64.b64decode(t): int(r) for t, r in map(bytes.split, open(files[0], "rb"))}
    model = tiktoken.Encoding("r", pat_str=files[1], mergeable_ranks=ranks, special_tokens={})
    def encode(part):
        return [model.encode_ordinary(text) for text in part]
begun, spent, count = time.perf_counter(), time.process_time(), 0
for i in range(0, len(texts), 100):
    count += sum(map(len, encode(texts[i:i + 100])))
print(count, time.perf_counter() - begun, time.process_time() - spent)
"""
"""The library alone: texts in memory before the clock starts, ids counted and discarded."""

PEER = r"""
import json, multiprocessing, os, sys
os.environ["TOKENIZERS_PARALLELISM"] = "false"
corpus, output, *files = sys.argv[1:]
def begin():
    from tokenizers import ByteLevelBPETokenizer
    global model
    model = ByteLevelBPETokenizer(*files)._tokenizer
def encode(line):
    ids = model.encode(json.loads(line)["text"], add_special_tokens=False).ids
    return ids, [len(ids)], len(line)
if __name__ == "__main__":
    import torch
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
    builder = IndexedDatasetBuilder(output + ".bin", dtype=DType.optimal_dtype(50257))
    with multiprocessing.Pool(2, initializer=begin) as pool, open(corpus) as lines:
        for ids, lengths, _ in pool.imap(encode, lines, 32):
            if ids:  # the tool leaves empty documents out
                builder.add_document(torch.IntTensor(ids), lengths)
    builder.finalize(output + ".idx")
"""
"""The job with the structure of Megatron-LM's tool."""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    input: str | None = None
    """JSON lines with a key 'text'."""
    megabytes: float | None = None
    """Megabytes of the input to use; all by default."""
    bpe: str | None = None
    """Folder with vocab.json and merges.txt."""
    pieces: str | None = None
    """A SentencePiece model."""
    ranks: str | None = None
    """A .tiktoken file with GPT-2's splitting pattern."""
    repeats: int = 3
    peer: str | None = None
    """Interpreter of an environment with megatron-core."""
    largest: int = 4
    """Multiples of the input for the memory measurement; 0 skips it."""
    ways: tuple[str, ...] = flag(
        ("library:1", "library:2", "auto:1", "auto:2"), metavar="BACKEND:WORKERS"
    )
    """Variants that are compared with the bare library."""


def prepare_default(folder: Path) -> Flags:
    """Write the test text as JSON lines and train tokenizers on it."""
    import base64

    import sentencepiece
    import tokenizers

    sources = sorted((ROOT / "tests/fixtures/text").glob("*.txt"))
    text = "\n".join(path.read_text() for path in sources)
    documents = [p for p in text.split("\n\n") if p.strip()] * 60
    corpus = folder / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": p}) + "\n" for p in documents))
    bpe = tokenizers.ByteLevelBPETokenizer()
    bpe.train_from_iterator(
        [text], vocab_size=8000, special_tokens=["<|endoftext|>"], show_progress=False
    )
    bpe.save_model(str(folder))
    sentencepiece.SentencePieceTrainer.train(
        input=",".join(map(str, sources)), model_prefix=str(folder / "tokenizer"),
        vocab_size=4000, model_type="bpe", byte_fallback=True, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    ranks = [base64.b64encode(bytes([b])) for b in range(256)]
    lines = (b"%s %d\n" % (token, rank) for rank, token in enumerate(ranks))
    (folder / "bytes.tiktoken").write_bytes(b"".join(lines))
    return Flags(
        input=str(corpus), bpe=str(folder), pieces=str(folder / "tokenizer.model"),
        ranks=str(folder / "bytes.tiktoken"),
    )  # fmt: skip


def cut(corpus: str, megabytes: float, folder: Path) -> str:
    """Return the first megabytes of a corpus; repeat a shorter corpus."""
    path, size = folder / f"cut{megabytes:g}.jsonl", 0
    with open(path, "wb") as out:
        while size < megabytes * 1e6:
            before = size
            with open(corpus, "rb") as source:
                for line in source:
                    out.write(line)
                    size += len(line)
                    if size >= megabytes * 1e6:
                        break
            assert size > before, f"{corpus} is empty"
    return str(path)


def tool(corpus: str, output: str, flags: list[str]) -> tuple[float, float, int, float]:
    """Run the tool.

    Returns:
        seconds, processor seconds of all its processes, tokens, peak memory of a process in MB.
    """
    command = [
        sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", corpus,
        "--output-prefix", output, "--restart", *flags,
    ]  # fmt: skip
    begun = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - begun
    assert process.returncode == 0, command
    tokens = int(IndexedDataset(f"{output}_text_document").sequence_lengths.sum())
    return seconds, usage.ru_utime + usage.ru_stime, tokens, usage.ru_maxrss / 1e3


def contents(prefix: str) -> list[str]:
    """Return digests of both files of a corpus."""
    digests = []
    for end in (".bin", ".idx"):
        with open(prefix + end, "rb") as file:
            digests.append(hashlib.blake2b(file.read()).hexdigest())
    return digests


def middle(measured: list[tuple[float, float]], column: int) -> float:
    """Return the median of one column."""
    return statistics.median(one[column] for one in measured)


def compare(
    corpus: str,
    kind: str,
    raw: list[str],
    flags: list[str],
    folder: Path,
    n: int,
    ways: list[tuple[str, str]],
) -> None:
    """Print the rates of one library, bare and through the tool by (backend, workers).

    The two ratios, of wall time and of processor seconds, are the median, the lowest and the
    highest of the rounds' ratios: if a machine is slow for a while, it is slow for both sides of a
    ratio.
    """
    raw_rates: list[tuple[float, float]] = []
    made: set[tuple[str, ...]] = set()
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(n):
        done = subprocess.run(
            [sys.executable, "-c", RAW, kind, corpus, *raw],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        count, *times = done.stdout.split()
        raw_rates.append((int(count) / float(times[0]), int(count) / float(times[1])))
        for backend, workers in ways:
            more = ["--tokenizer-backend", backend, "--workers", workers]
            seconds, spent, tokens, _ = tool(corpus, str(folder / "out"), [*flags, *more])
            assert tokens == int(count), (tokens, count)
            made.add(tuple(contents(str(folder / "out_text_document"))))
            rates[backend, workers].append((tokens / seconds, tokens / spent))
    print(f"{kind:<8} bare library, 1 process    {middle(raw_rates, 0):>12,.0f} tokens/s")
    for (backend, workers), found in rates.items():
        shares = [
            [rate[i] / bare[i] for rate, bare in zip(found, raw_rates, strict=True)] for i in (0, 1)
        ]
        wall, processor = (
            f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in shares
        )
        print(
            f"{kind:<8} tool, {backend:<7}, {workers} workers   {middle(found, 0):>12,.0f} tokens/s"
            f"   {wall} of the bare library   {processor} by processor seconds",
            flush=True,
        )
    if len(made) != 1:
        raise SystemExit("the backends gave other ids")
    print(f"{kind:<8} all files equal")


def against_peer(python: str, corpus: str, files: list[str], flags: list[str], n: int) -> None:
    """Print the time of the whole job with 2 workers, ours and the peer's, alternating."""
    folder = Path(corpus).parent
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(n):
        begun = time.perf_counter()
        environment = {**os.environ, "PYTHONPATH": ""}
        subprocess.run(
            [python, "-c", PEER, corpus, str(folder / "peer"), *files],
            check=True, env=environment, cwd=folder,
        )  # fmt: skip
        theirs.append(time.perf_counter() - begun)
        ours.append(tool(corpus, str(folder / "out"), [*flags, "--workers", "2"])[0])
        if contents(str(folder / "out_text_document")) != contents(str(folder / "peer")):
            raise SystemExit("megatron-core's builder wrote other files")
    mine, other = statistics.median(ours), statistics.median(theirs)
    print(
        f"the whole job, 2 workers: {mine:.2f} s; as Megatron-LM does it {other:.2f} s: "
        f"{other / mine:.1f} times; files equal",
        flush=True,
    )


def main() -> None:
    """Measure everything and print it."""
    args = read_command_line(Flags, description="Rates of preprocessing.")
    from megatron.core.tokenizers.tik_token import PATTERNS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = args if args.input else prepare_default(folder)
        size = args.megabytes or os.path.getsize(given.input) / 1e6
        corpus = cut(given.input, size, folder)
        print(f"{size:.1f} MB of JSON lines, {args.repeats} rounds, medians", flush=True)
        cases = []
        if given.bpe:
            files = [f"{given.bpe}/vocab.json", f"{given.bpe}/merges.txt"]
            bpe = ["--tokenizer-type", "GPT2BPETokenizer", "--tokenizer-model", given.bpe]
            cases.append(("bpe", files, bpe))
        if given.pieces:
            pieces = ["--tokenizer-type", "GPTSentencePieceTokenizer"]
            cases.append(("pieces", [given.pieces], [*pieces, "--tokenizer-model", given.pieces]))
        if given.ranks:
            ranks = ["--tokenizer-type", "TikTokenizer", "--tiktoken-pattern", "gpt2"]
            files = [given.ranks, PATTERNS["gpt2"]]
            cases.append(("ranks", files, [*ranks, "--tokenizer-model", given.ranks]))
        for kind, files, flags in cases:
            ways = [(way.split(":")[0], way.split(":")[1]) for way in args.ways]
            compare(corpus, kind, files, flags, folder, args.repeats, ways)
        if args.peer and given.bpe:
            against_peer(args.peer, corpus, cases[0][1], cases[0][2], args.repeats)
        if not args.largest:
            return
        flags = [*cases[0][2], "--workers", "2"]
        small = cut(given.input, 0.001, folder)
        starts = [tool(small, str(folder / "small"), flags)[0] for _ in range(args.repeats)]
        print(f"start-up: one document from start to end in {statistics.median(starts):.2f} s")
        for times in (1, args.largest):
            seconds, _, tokens, peak = tool(
                cut(given.input, size * times, folder), str(folder / "big"), flags
            )
            print(
                f"{size * times:8.1f} MB, 2 workers: {tokens:>12,} tokens in {seconds:6.2f} s, "
                f"peak {peak:5.0f} MB in a process",
                flush=True,
            )


if __name__ == "__main__":
    main()
