"""Turn JSON-lines text into token files for training.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --append-eod --workers 8

writes data/corpus_text_document.bin and .idx. The same input gives the same bytes with any number
of workers. Nothing appears under the final names before everything is written.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from itertools import islice

# Before a tokenizer library is loaded: --workers says how many processes work, each on one thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.datasets.jsonl import BATCH_LINES, expand_inputs, read_batches
from megatron.core.datasets.preprocessing import (
    Encoder,
    Tally,
    encode_in_order,
    write_corpora,
)
from megatron.core.datasets.sentence_splitting import SentenceSplitter
from megatron.core.errors import ConfigError, MegatronError
from megatron.core.tokenizers.megatron_tokenizer import (
    TOKENIZER_TYPES,
    make_tokenizer,
)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; the flags are Megatron's."""
    parser = argparse.ArgumentParser(
        description="Turn JSON-lines text into token files for training.", allow_abbrev=False
    )
    data = parser.add_argument_group("input")
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders or glob patterns; .gz, .bz2, .xz and .zst are decompressed",
    )
    data.add_argument("--json-keys", nargs="+", default=["text"], help="members that hold text")
    data.add_argument(
        "--split-sentences", action="store_true", help="one sequence for each sentence (NLTK)"
    )
    data.add_argument("--lang", default="english", help="language of the sentence model")
    data.add_argument(
        "--keep-newlines", action="store_true", help="keep white space between sentences"
    )
    data.add_argument(
        "--skip-bad-lines", action="store_true", help="leave faulty lines out and count them"
    )

    text = parser.add_argument_group("tokenizer")
    text.add_argument(
        "--tokenizer-type", required=True, metavar="TYPE", help=", ".join(TOKENIZER_TYPES)
    )
    text.add_argument("--tokenizer-model", help="file, folder or name of the model")
    text.add_argument("--vocab-file", help="vocabulary of GPT2BPETokenizer")
    text.add_argument("--merge-file", help="merges of GPT2BPETokenizer")
    text.add_argument("--vocab-size", type=int, help="ids of NullTokenizer, limit of TikTokenizer")
    text.add_argument("--vocab-extra-ids", type=int, default=0, help="added <extra_id_N> tokens")
    text.add_argument("--tiktoken-pattern", help="v1, v2, or a regular expression")
    text.add_argument("--tiktoken-num-special-tokens", type=int)
    text.add_argument("--tiktoken-special-tokens", nargs="+")
    text.add_argument("--trust-remote-code", action="store_true")
    text.add_argument("--append-eod", action="store_true", help="end every document with a token")

    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="path without _KEY_document.bin")
    output.add_argument("--dataset-impl", default="mmap", choices=["mmap"], help=argparse.SUPPRESS)

    run = parser.add_argument_group("running")
    run.add_argument("--workers", type=int, required=True, help="processes that tokenize")
    run.add_argument(
        "--partitions",
        type=int,
        default=1,
        help="accepted, without effect: the workers share one ordered stream",
    )
    run.add_argument(
        "--keep-sequential-samples",
        action="store_true",
        help="accepted: documents always stay in the order of the input",
    )
    run.add_argument("--log-interval", type=int, default=1000, help="documents between reports")
    run.add_argument(
        "--find-optimal-num-workers",
        action="store_true",
        help="measure --workers-to-check on the first --max-documents and write nothing",
    )
    run.add_argument("--workers-to-check", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    run.add_argument("--max-documents", type=int, default=100_000)
    return parser.parse_args(argv)


def make_encoder(args: argparse.Namespace) -> Encoder:
    """Load the tokenizer and everything else that a worker needs."""
    if args.workers < 1:
        raise ConfigError(f"--workers {args.workers}.", rule="at least one", flags=["--workers"])
    tokenizer = make_tokenizer(
        args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        vocab_extra_ids=args.vocab_extra_ids,
        tiktoken_pattern=args.tiktoken_pattern,
        tiktoken_num_special_tokens=args.tiktoken_num_special_tokens,
        tiktoken_special_tokens=args.tiktoken_special_tokens,
        trust_remote_code=args.trust_remote_code,
    )
    splitter = None
    if args.split_sentences:
        splitter = SentenceSplitter(args.lang, keep_newlines=args.keep_newlines)
        splitter.load()
    return Encoder(
        tokenizer=tokenizer,
        json_keys=args.json_keys,
        dtype=DType.optimal_dtype(tokenizer.vocab_size),
        end_of_document=(
            tokenizer.special_id("eod", purpose="--append-eod") if args.append_eod else None
        ),
        split=splitter,
    )


class Progress:
    """Print a line every so many documents."""

    def __init__(self, interval: int, key: str) -> None:
        self.interval, self.key = max(1, interval), key
        self.begun = time.perf_counter()
        self.next_report = self.interval

    def __call__(self, tally: Tally) -> None:
        """Report if the next multiple of the interval was passed."""
        done = tally.documents[self.key]
        if done < self.next_report:
            return
        self.next_report = (done // self.interval + 1) * self.interval
        seconds = time.perf_counter() - self.begun
        print(
            f"Processed {done} documents ({done / seconds:.1f} docs/s, "
            f"{tally.text_bytes.total() / seconds / 1e6:.2f} MB/s, "
            f"{tally.tokens.total() / seconds:.0f} tokens/s).",
            file=sys.stderr,
            flush=True,
        )


def preprocess(args: argparse.Namespace) -> Tally:
    """Write the corpora and print what was made."""
    paths = expand_inputs(args.input)
    encoder = make_encoder(args)
    level = "sentence" if args.split_sentences else "document"
    prefixes = {key: f"{args.output_prefix}_{key}_{level}" for key in args.json_keys}
    begun = time.perf_counter()
    builders = {
        key: IndexedDatasetBuilder(get_bin_path(prefix), dtype=encoder.dtype)
        for key, prefix in prefixes.items()
    }
    try:
        tally = write_corpora(
            encode_in_order(read_batches(paths), encoder, args.workers),
            builders,
            skip_bad_lines=args.skip_bad_lines,
            on_progress=Progress(args.log_interval, args.json_keys[0]),
        )
        for key, builder in builders.items():
            builder.finalize(get_idx_path(prefixes[key]))
    finally:
        for builder in builders.values():
            builder.discard()
    print_summary(tally, prefixes, encoder, time.perf_counter() - begun)
    return tally


def print_summary(tally: Tally, prefixes: dict[str, str], encoder: Encoder, seconds: float) -> None:
    """Print documents, tokens, bytes per token, what was left out, and the rate."""
    for key, prefix in prefixes.items():
        tokens, size = tally.tokens[key], tally.text_bytes[key]
        print(f"{prefix}.bin/.idx")
        print(f"  documents         {tally.documents[key]:>14,}")
        if tally.sequences[key] != tally.documents[key]:
            print(f"  sequences         {tally.sequences[key]:>14,}")
        print(f"  tokens            {tokens:>14,}  ({encoder.dtype.__name__})")
        print(f"  bytes per token   {size / max(tokens, 1):>14.3f}")
        if tally.empty[key]:
            print(f"  empty, left out   {tally.empty[key]:>14,}")
    for reason, count in sorted(tally.skipped.items()):
        print(f"skipped lines, {reason}: {count:,} of {tally.lines:,}")
    print(
        f"{seconds:.1f} s, {tally.text_bytes.total() / seconds / 1e6:.2f} MB/s, "
        f"{tally.tokens.total() / seconds:,.0f} tokens/s",
        flush=True,
    )


def find_optimal_num_workers(args: argparse.Namespace) -> None:
    """Tokenize the beginning of the input with several numbers of workers and print the rates."""
    paths, encoder = expand_inputs(args.input), make_encoder(args)
    batches = list(islice(read_batches(paths), -(-args.max_documents // BATCH_LINES)))
    print(f"{'workers':>8} {'docs/s':>12} {'tokens/s':>12}")
    for num_workers in args.workers_to_check:
        begun = time.perf_counter()
        tally = Tally()
        for encoded in encode_in_order(batches, encoder, num_workers):
            tally.add(encoded)
        seconds = time.perf_counter() - begun
        rates = tally.documents.total() / seconds, tally.tokens.total() / seconds
        print(f"{num_workers:>8} {rates[0]:>12.1f} {rates[1]:>12.0f}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    args = parse_args(argv)
    try:
        if args.find_optimal_num_workers:
            find_optimal_num_workers(args)
        else:
            preprocess(args)
    except MegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
