"""Turn text into token files for training.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \
        --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt \
        --append-eod --workers 8

writes data/corpus_text_document.bin and .idx. The same input gives the same bytes with any number
of workers. Nothing appears under the final names before everything is written; a run that was
killed goes on where it stopped when the same command is given again. See docs/data.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

# Before a tokenizer library is loaded: --workers says how many processes work, each on one thread.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAYON_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.index_file import DType
from megatron.core.datasets.preprocessing.encoder import Encoder
from megatron.core.datasets.preprocessing.fill_in_middle import FillInMiddle, fill_in_middle
from megatron.core.datasets.preprocessing.inputs import (
    InputFile,
    InputFormat,
    expand_inputs,
    share_of,
)
from megatron.core.datasets.preprocessing.job import Job
from megatron.core.datasets.preprocessing.length_report import check_report_name, write_report
from megatron.core.datasets.preprocessing.sentence_splitting import SentenceSplitter
from megatron.core.datasets.preprocessing.shards import rank_and_world, shard_name, shards_of
from megatron.core.datasets.preprocessing.tally import Tally, summary
from megatron.core.datasets.preprocessing.units import read_units
from megatron.core.datasets.preprocessing.workers import encode_in_order
from megatron.core.errors import ConfigError, MegatronError
from megatron.core.tokenizers.base import TextTokenizer
from megatron.core.tokenizers.fast_engine import (
    CheckedEngine,
    GigatokenEngine,
    TokenizerBackend,
    make_engine,
)
from megatron.core.tokenizers.megatron_tokenizer import TOKENIZER_TYPES, make_tokenizer


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line; the flags are Megatron's."""
    parser = argparse.ArgumentParser(
        description="Turn text into token files for training.", allow_abbrev=False
    )
    data = parser.add_argument_group("input")
    data.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files, folders, glob patterns or URLs; .gz, .bz2, .xz and .zst are decompressed",
    )
    data.add_argument(
        "--input-format",
        choices=[one.value for one in InputFormat],
        help="of every file; by the suffix if not given",
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
        "--skip-bad-lines", action="store_true", help="leave faulty documents out and count them"
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
    text.add_argument(
        "--tokenizer-backend",
        choices=[one.value for one in TokenizerBackend],
        default="auto",
        help="auto takes gigatoken where it is installed and gives the same ids",
    )
    text.add_argument("--append-eod", action="store_true", help="end every document with a token")

    middle = parser.add_argument_group("fill in the middle")
    middle.add_argument("--fim-rate", type=float, default=0.0, help="share of documents cut")
    middle.add_argument("--fim-spm-rate", type=float, default=0.5, help="of those, suffix first")
    middle.add_argument("--fim-seed", type=int, default=1234)
    middle.add_argument("--fim-tokens", nargs=3, metavar=("PREFIX", "MIDDLE", "SUFFIX"))

    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="path without _KEY_document.bin")
    output.add_argument("--report", metavar="FILE", help="lengths of documents: .html or .png")
    output.add_argument(
        "--restart", action="store_true", help="forget an unfinished run and a finished output"
    )
    output.add_argument("--dataset-impl", default="mmap", choices=["mmap"], help=argparse.SUPPRESS)

    many = parser.add_argument_group("many machines")
    many.add_argument("--num-shards", type=int, help="outputs that the input is cut into")
    many.add_argument("--rank", type=int, help="of this process; SLURM's variables if not given")
    many.add_argument("--world-size", type=int, help="processes that share the shards")

    run = parser.add_argument_group("running")
    run.add_argument(
        "--workers", type=int, required=True, help="processes that tokenize; 0: this one"
    )
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
        "--journal-interval", type=float, default=5.0, help="seconds of work a kill can cost"
    )
    run.add_argument(
        "--find-optimal-num-workers",
        action="store_true",
        help="measure --workers-to-check on the first --max-documents and write nothing",
    )
    run.add_argument("--workers-to-check", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    run.add_argument("--max-documents", type=int, default=100_000)
    return parser.parse_args(argv)


def load_tokenizer(args: argparse.Namespace) -> TextTokenizer:
    """Load the tokenizer that the flags name."""
    return make_tokenizer(
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


def make_encoder(args: argparse.Namespace, files: Sequence[InputFile]) -> Encoder:
    """Load the tokenizer and everything else that a worker needs."""
    if args.workers < 0:
        raise ConfigError(
            f"--workers {args.workers}.", rule="0 (this process) or more", flags=["--workers"]
        )
    is_text = [f for f in files if f.format in (InputFormat.text, InputFormat.text_lines)]
    if is_text and len(args.json_keys) > 1:
        raise ConfigError(
            f"--json-keys {' '.join(args.json_keys)}, and {is_text[0].path} is plain text.",
            rule="plain text has one key",
            flags=["--json-keys", "--input-format"],
            fix="give one key, which names the output",
        )
    tokenizer = load_tokenizer(args)
    engine, reason = make_engine(tokenizer, TokenizerBackend(args.tokenizer_backend))
    print(f"tokenizing with {reason}", file=sys.stderr)
    is_fast = isinstance(engine, GigatokenEngine)
    splitter = None
    if args.split_sentences:
        splitter = SentenceSplitter(args.lang, keep_newlines=args.keep_newlines)
        splitter.load()
    middle: FillInMiddle | None = None
    if args.fim_rate:
        middle = fill_in_middle(
            tokenizer.vocab,
            rate=args.fim_rate,
            spm_rate=args.fim_spm_rate,
            seed=args.fim_seed,
            names=args.fim_tokens,
        )
    return Encoder(
        engine=CheckedEngine(engine, tokenizer) if is_fast else engine,
        keys=args.json_keys,
        dtype=DType.optimal_dtype(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        end_of_document=(
            tokenizer.special_id("eod", purpose="--append-eod") if args.append_eod else None
        ),
        split=splitter,
        transform=middle,
        identity=tokenizer.unique_identifiers,
    )


def settings_of(args: argparse.Namespace, encoder: Encoder) -> dict[str, Any]:
    """Return what decides the output besides the files."""
    names = "json_keys split_sentences append_eod fim_rate"
    if args.split_sentences:
        names += " lang keep_newlines"
    if args.fim_rate:
        names += " fim_spm_rate fim_seed fim_tokens"
    return {"tokenizer": encoder.identity, **{name: getattr(args, name) for name in names.split()}}


def preprocess(args: argparse.Namespace) -> list[Tally]:
    """Write the corpora of this process's shards and print what was made."""
    if args.report:
        check_report_name(args.report)
    format = InputFormat(args.input_format) if args.input_format else None
    files = expand_inputs(args.input, format)
    num_shards = args.num_shards or args.world_size or 1
    rank, world_size = 0, 1
    if args.num_shards or args.world_size or args.rank is not None:
        rank, world_size = rank_and_world(num_shards, args.rank, args.world_size)
    encoder = make_encoder(args, files)
    level = "sentence" if args.split_sentences else "document"
    tallies = []
    for shard in shards_of(rank, world_size, num_shards):
        output = shard_name(args.output_prefix, shard, num_shards)
        prefixes = {name: f"{output}_{name}_{level}" for name in encoder.corpora}
        job = Job(
            files=share_of(files, shard, num_shards),
            keys=args.json_keys,
            encoder=encoder,
            settings=settings_of(args, encoder),
            corpora={name: (prefixes[name], dtype) for name, dtype in encoder.corpora.items()},
            output=output,
            num_workers=args.workers,
            skip_bad=args.skip_bad_lines,
            restart=args.restart,
            log_interval=args.log_interval,
            journal_interval_s=args.journal_interval,
        )
        begun = time.perf_counter()
        tally = job.run()
        dtypes = {name: dtype.__name__ for name, dtype in encoder.corpora.items()}
        told = summary(tally, prefixes, dtypes, time.perf_counter() - begun)
        if job.was_finished:
            told += f"\nalready there; --restart makes {output} again"
        print(told, flush=True)
        if args.report:
            write_report(
                shard_name(args.report, shard, num_shards) if num_shards > 1 else args.report,
                tally,
                title=os.path.basename(output),
                summary=told,
            )
        tallies.append(tally)
    return tallies


def find_optimal_num_workers(args: argparse.Namespace) -> None:
    """Tokenize the beginning of the input with several numbers of workers and print the rates."""
    files = expand_inputs(args.input, InputFormat(args.input_format) if args.input_format else None)
    encoder = make_encoder(args, files)
    units, documents = [], 0
    for unit in read_units(files, keys=args.json_keys):
        units.append(unit)
        documents += sum(len(part.sequences.per_document) for part in encoder(unit).parts.values())
        if documents >= args.max_documents:
            break
    print(f"{'workers':>8} {'docs/s':>12} {'tokens/s':>12}")
    for num_workers in args.workers_to_check:
        begun = time.perf_counter()
        tally = Tally()
        for encoded in encode_in_order(units, encoder, num_workers):
            tally.add(encoded)
        seconds = time.perf_counter() - begun
        print(
            f"{num_workers:>8} {tally.documents / seconds:>12.1f} {tally.tokens / seconds:>12.0f}",
            flush=True,
        )


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
    except KeyboardInterrupt:
        print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
