"""The flags of tools/preprocess_data.py. No torch import."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron.core.datasets.preprocessing.inputs import InputFile, InputFormat
from megatron.core.datasets.preprocessing.template_process import add_template_flags
from megatron.core.foundation.errors import ConfigError, raise_together

DESCRIPTION = """Turn text into token files for training: PREFIX_text_document.bin and .idx.
The same input gives the same bytes with any number of workers. A killed run continues where it
stopped when the same command is given again."""
EXAMPLE = """example:
  python tools/preprocess_data.py --input 'corpus/*.jsonl.zst' --output-prefix data/corpus \\
      --tokenizer-type HuggingFaceTokenizer --tokenizer-model FOLDER --append-eod"""


def parse_flags(
    argv: Sequence[str] | None, tokenizer_types: Sequence[str], backends: Sequence[str]
) -> argparse.Namespace:
    """Read the command line; the flags are Megatron's.

    Args:
        tokenizer_types, backends: values of --tokenizer-type and --tokenizer-backend.
    """
    parser = argparse.ArgumentParser(
        description=f"{DESCRIPTION}\n\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s --input PATH ... --output-prefix PREFIX --tokenizer-type TYPE [flags]",
        allow_abbrev=False,
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
    data.add_argument("--json-keys", nargs="+", help="members that hold text (by default 'text')")
    data.add_argument(
        "--split-sentences", action="store_true", help="one sequence for each sentence (NLTK)"
    )
    data.add_argument(
        "--lang", default="english", help="language of the sentence model (%(default)s)"
    )
    data.add_argument(
        "--keep-newlines", action="store_true", help="keep white space between sentences"
    )
    data.add_argument(
        "--skip-bad-lines", action="store_true", help="leave faulty documents out and count them"
    )

    text = parser.add_argument_group("tokenizer")
    text.add_argument(
        "--tokenizer-type", required=True, metavar="TYPE", help=", ".join(tokenizer_types)
    )
    text.add_argument("--tokenizer-model", help="file, folder or name of the model")
    text.add_argument("--vocab-file", help="vocabulary of GPT2BPETokenizer")
    text.add_argument("--merge-file", help="merges of GPT2BPETokenizer")
    text.add_argument("--vocab-size", type=int, help="ids of NullTokenizer, limit of TikTokenizer")
    text.add_argument("--vocab-extra-ids", type=int, default=0, help="added <extra_id_N> tokens")
    text.add_argument("--tiktoken-pattern", help="v1, v2, or a regular expression")
    text.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        help="ids reserved before the ranks of a list (1000, or what its file says)",
    )
    text.add_argument("--tiktoken-special-tokens", nargs="+", help="names of the first of them")
    text.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run Python code that comes with a tokenizer",
    )
    text.add_argument(
        "--tokenizer-backend",
        choices=backends,
        default="auto",
        help="auto takes gigatoken where it is installed and gives the same ids",
    )
    text.add_argument("--append-eod", action="store_true", help="end every document with a token")

    middle = parser.add_argument_group("fill in the middle")
    middle.add_argument(
        "--fim-rate",
        type=float,
        default=0.0,
        help="share of documents cut in three (%(default)s: none)",
    )
    middle.add_argument(
        "--fim-spm-rate", type=float, default=0.5, help="of those, suffix first (%(default)s)"
    )
    middle.add_argument("--fim-seed", type=int, default=1234, help="names the cuts (%(default)s)")
    middle.add_argument(
        "--fim-tokens",
        nargs=3,
        metavar=("PREFIX", "MIDDLE", "SUFFIX"),
        help="tokens of the vocabulary; the usual names if not given",
    )

    chat = parser.add_argument_group("conversations")
    chat.add_argument(
        "--sft",
        action="store_true",
        help="documents are lists of messages, under --json-keys (by default 'messages'); a loss "
        "mask is written beside the tokens",
    )
    add_template_flags(chat, default="the tokenizer's own")
    chat.add_argument(
        "--pack-length", type=int, help="pack conversations into samples of this many tokens"
    )

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
        "--workers",
        type=int,
        default=usable_cores(),
        help="processes that tokenize; 0: this one (one for each core: %(default)s)",
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
    run.add_argument(
        "--log-interval",
        type=int,
        default=1000,
        help="documents between two lines of progress (%(default)s)",
    )
    run.add_argument(
        "--journal-interval",
        type=float,
        default=5.0,
        help="seconds of work a kill can cost (%(default)s)",
    )
    run.add_argument(
        "--find-optimal-num-workers",
        action="store_true",
        help="measure --workers-to-check on the first --max-documents and write nothing",
    )
    run.add_argument(
        "--workers-to-check",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        help="numbers of workers to measure (1 2 4 8 16)",
    )
    run.add_argument("--max-documents", type=int, default=100_000, help="measured on (%(default)s)")
    args = parser.parse_args(argv)
    if args.json_keys is None:
        args.json_keys = ["messages" if args.sft else "text"]
    return args


def usable_cores() -> int:
    """Return the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_flags(args: argparse.Namespace, files: Sequence[InputFile]) -> None:
    """Refuse flags that cannot work together, all of them in one message."""
    problems = []
    if args.workers < 0:
        problems.append(
            ConfigError(
                f"--workers {args.workers}.", rule="0 (this process) or more", flags=["--workers"]
            )
        )
    for flag, is_given in (
        ("--split-sentences", args.split_sentences),
        ("--fim-rate", args.fim_rate),
        ("--json-keys", len(args.json_keys) > 1),
    ):
        if args.sft and is_given:
            problems.append(
                ConfigError(
                    f"--sft with {flag}{' of several keys' if flag == '--json-keys' else ''}.",
                    rule="conversations are written by their template, from one key",
                    flags=["--sft", flag],
                    fix=f"leave out {flag}",
                )
            )
    if args.pack_length is not None and (not args.sft or args.pack_length < 2):
        problems.append(
            ConfigError(
                f"--pack-length {args.pack_length}{'' if args.sft else ' without --sft'}.",
                rule="conversations are packed, into 2 tokens or more; plain text is cut into "
                "samples when it is read",
                flags=["--pack-length", "--sft"],
            )
        )
    is_text = [f for f in files if f.format in (InputFormat.text, InputFormat.text_lines)]
    if is_text and (len(args.json_keys) > 1 or args.sft):
        given = "--sft" if args.sft else f"--json-keys {' '.join(args.json_keys)}"
        problems.append(
            ConfigError(
                f"{given}, and {is_text[0].path} is plain text.",
                rule="plain text has one key, and no messages",
                flags=["--json-keys", "--sft", "--input-format"],
                fix="give one key, which names the output",
            )
        )
    raise_together(problems, summary="this command line")
