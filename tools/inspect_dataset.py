"""Look into token files: verify, statistics, decode documents, compare, find duplicates.

    python tools/inspect_dataset.py verify data/a data/b --vocab-size 50257 --eod 50256
    python tools/inspect_dataset.py stats data/a
    python tools/inspect_dataset.py show data/a --documents 0 17 --tokenizer-type ByteTokenizer
    python tools/inspect_dataset.py compare data/a data/b
    python tools/inspect_dataset.py duplicates data/a data/b --list duplicates.jsonl
    python tools/inspect_dataset.py blend 0.7 data/a 0.3 data/b --samples 100000 --seq-length 4096
    python tools/inspect_dataset.py audit runs/audit

A name is a corpus without .bin and .idx, or a folder of corpora. The exit status is 0 if all is
well (of `compare`: equal), 1 if something was found or a corpus could not be read, 2 if the command
itself is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from megatron.core.datasets.blended_megatron_dataset_config import SAMPLE_ORDERS
from megatron.core.datasets.corpus import inspection
from megatron.core.datasets.corpus.paths import MASK_SUFFIX
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.length_report import check_report_name, write_report
from megatron.core.datasets.preprocessing.stats import CorpusStats, CorpusTally, percentiles_of
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.exit_status import tool
from megatron.core.tokenizers.megatron_tokenizer import TOKENIZER_TYPES, make_tokenizer

_SHOWN_TOKENS = 200


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Look into token files.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, text: str, corpora: str = "+") -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.add_argument("corpora", nargs=corpora if corpora == "+" else int(corpora))
        return made

    verify = command("verify", "check that index and tokens fit, and that the tokens are allowed")
    verify.add_argument("--vocab-size", type=int, help="every id must be below this")
    verify.add_argument("--eod", type=int, help="every document must end with this id")
    stats = command("stats", "lengths and sizes")
    stats.add_argument("--json", action="store_true", help="one JSON object per corpus")
    stats.add_argument("--report", metavar="FILE", help="draw the lengths: .html or .png")
    show = command("show", "print documents", "1")
    show.add_argument("--documents", type=int, nargs="+", default=[0], metavar="NUMBER")
    show.add_argument("--tokens", type=int, default=_SHOWN_TOKENS, help="print so many of each")
    show.add_argument("--ids", action="store_true", help="print ids beside the text")
    show.add_argument(
        "--tokenizer-type", metavar="TYPE", help=f"decode with it: {', '.join(TOKENIZER_TYPES)}"
    )
    show.add_argument("--tokenizer-model", help="file, folder or name of the model")
    show.add_argument("--vocab-file", help="vocabulary of GPT2BPETokenizer")
    show.add_argument("--merge-file", help="merges of GPT2BPETokenizer")
    show.add_argument("--vocab-size", type=int, help="ids of NullTokenizer")
    command("compare", "say whether two corpora hold the same documents", "2")
    duplicates = command("duplicates", "find documents that equal an earlier one exactly")
    duplicates.add_argument("--list", metavar="FILE", help="write each copy and its original")
    blend = command("blend", "samples, share and epochs of each corpus of a blend")
    blend.add_argument("--samples", type=int, help="that a run asks for; without it, one epoch")
    blend.add_argument("--seq-length", type=int, required=True, help="tokens of a sample")
    blend.add_argument("--split", default="1", help="as of the run; the share of training is shown")
    blend.add_argument("--sample-order", default="megatron", choices=SAMPLE_ORDERS)
    blend.add_argument("--mid-level-dataset-surplus", type=float, default=0.005)
    blend.add_argument("--json", action="store_true", help="one JSON object per corpus")
    audit = commands.add_parser("audit", help="what a run consumed", allow_abbrev=False)
    audit.add_argument("folder", help="of --data-audit-path")
    return parser.parse_args(argv)


def corpora_of(names: Sequence[str]) -> list[str]:
    """Return the prefixes that the arguments stand for."""
    prefixes: list[str] = []
    for name in names:
        if os.path.isdir(name):
            found = sorted(entry[:-4] for entry in os.listdir(name) if entry.endswith(".idx"))
            if not found:
                raise DataError(f"{name} holds no corpus.", rule="a folder of .bin/.idx pairs")
            prefixes += [os.path.join(name, entry) for entry in found]
        else:
            prefixes.append(name.removesuffix(".idx").removesuffix(".bin"))
    return prefixes


def verify(args: argparse.Namespace) -> int:
    """Check corpora; every faulty one is named."""
    faulty = 0
    for prefix in corpora_of(args.corpora):
        try:
            corpus = IndexedDataset(prefix, check=False)
            corpus.check()
            problems = _problems_of(corpus, args)
        except DataError as error:
            problems = [str(error)]
        faulty += bool(problems)
        print(f"{prefix}: {'ok' if not problems else 'FAULTY'}")
        for problem in problems:
            print(f"  {problem}")
    return int(faulty > 0)


def _problems_of(corpus: IndexedDataset, args: argparse.Namespace) -> list[str]:
    problems = []
    if args.vocab_size is not None:
        for bad in inspection.tokens_outside(corpus, args.vocab_size):
            problems.append(
                f"token {bad.token} at position {bad.position} of document {bad.document} is "
                f"outside the vocabulary of {args.vocab_size}"
            )
    if args.eod is not None:
        missing = inspection.documents_without_end(corpus, args.eod)
        if missing:
            problems.append(f"{missing} documents do not end with {args.eod} (--append-eod)")
    return problems


def stats(args: argparse.Namespace) -> int:
    """Print lengths and sizes, and draw the lengths if asked to."""
    if args.report is not None:
        check_report_name(args.report)
    prefixes, told = corpora_of(args.corpora), []
    for prefix in prefixes:
        found = inspection.statistics(IndexedDataset(prefix))
        if args.json:
            print(json.dumps({"corpus": prefix, **dataclasses.asdict(found)}))
        else:
            print(described(prefix, found))
        told.append(described(prefix, found))
    if args.report is not None:
        tally = CorpusStats(
            corpora={prefix: CorpusTally.of(IndexedDataset(prefix)) for prefix in prefixes}
        )
        percentiles = {prefix: percentiles_of(prefix) for prefix in prefixes}
        title = f"lengths of {', '.join(map(os.path.basename, prefixes))}"
        write_report(args.report, tally, percentiles, title=title, summary="\n".join(told))
    return 0


def described(prefix: str, found: inspection.Statistics) -> str:
    """Return the statistics of a corpus as lines."""
    shares = ", ".join(f"{percent} %: {n:,}" for percent, n in found.percentiles.items())
    lines = [
        f"{prefix}: {found.num_documents:,} documents, {found.num_tokens:,} tokens",
        f"  token file            {found.num_bytes:,} bytes of {found.dtype}",
        f"  tokens per document   mean {found.mean:,.1f}, {found.shortest:,} to {found.longest:,}; "
        f"{found.num_empty_documents:,} documents are empty",
        f"  percentiles           {shares}",
    ]
    if found.num_sequences != found.num_documents:
        lines.insert(2, f"  sequences             {found.num_sequences:,}")
    most = max(found.histogram.values(), default=1)
    for length, count in found.histogram.items():
        lines.append(f"  {length:>12,}+ {count:>14,} {'#' * -(-40 * count // most)}")
    return "\n".join(lines)


def show(args: argparse.Namespace) -> int:
    """Print documents as ids, and as text if a tokenizer is named."""
    (prefix,) = corpora_of(args.corpora)
    corpus = IndexedDataset(prefix)
    has_mask = IndexedDataset.exists(prefix + MASK_SUFFIX)
    mask = IndexedDataset(prefix + MASK_SUFFIX) if has_mask else None
    tokenizer = None
    if args.tokenizer_type is not None:
        tokenizer = make_tokenizer(
            args.tokenizer_type,
            tokenizer_model=args.tokenizer_model,
            vocab_file=args.vocab_file,
            merge_file=args.merge_file,
            vocab_size=args.vocab_size,
        )
    count = len(corpus.document_indices) - 1
    for number in args.documents:
        if not 0 <= number < count:
            raise DataError(
                f"{prefix} has no document {number}.",
                rule=f"it holds documents 0 to {count - 1}",
                flags=["--documents"],
            )
        tokens = inspection.document_tokens(corpus, number)
        shown = [int(token) for token in tokens[: args.tokens]]
        rest = f" (the first {len(shown)})" if len(shown) < len(tokens) else ""
        print(f"document {number}: {len(tokens)} tokens{rest}")
        if tokenizer is not None:
            print(readable(tokenizer.detokenize(shown)))
        if tokenizer is None or args.ids:
            print(f"  ids   {' '.join(map(str, shown))}")
        if mask is not None:  # conversations
            is_learned = inspection.document_tokens(mask, number) == 1
            learned = tokens[: args.tokens][is_learned[: args.tokens]]
            print(f"  of these {len(learned)} are learned{'' if tokenizer is None else ':'}")
            if tokenizer is not None:
                print(readable(tokenizer.detokenize(learned.tolist())))
    return 0


def readable(text: str) -> str:
    """Return text as indented lines; what a terminal would obey or not show is escaped."""
    shown = "".join(
        c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "\n".join(f"  | {line}" for line in shown.split("\n"))


class _AnyTokens:
    """Stands for a tokenizer where no token is read."""

    vocab_size = 1 << 31
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "any"}


def blend(args: argparse.Namespace) -> int:
    """Print what each corpus gives to a blend, as a run would make it."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.blends.report import lines_of, shares_of
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    with tempfile.TemporaryDirectory() as cache:
        config = GPTDatasetConfig(
            random_seed=1234,
            sequence_length=args.seq_length,
            blend=get_blend_from_list(args.corpora),
            split=args.split,
            path_to_cache=cache,
            sample_order=args.sample_order,
            mid_level_dataset_surplus=args.mid_level_dataset_surplus,
            tokenizer=_AnyTokens(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        parts = BlendedMegatronDatasetBuilder(
            GPTDataset, [args.samples, 0, 0], lambda: True, config
        ).build()
        shares = shares_of(parts[0])
        num_samples = len(parts[0])
    if args.json:
        for share in shares:
            print(json.dumps(dataclasses.asdict(share)))
        return 0
    print(f"{num_samples:,} samples of {args.seq_length:,} tokens")
    for line in lines_of(shares, max_lines=len(shares)):
        print(f"  {line}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Print the first difference between two corpora."""
    names = [name.removesuffix(".idx").removesuffix(".bin") for name in args.corpora]
    first, second = (IndexedDataset(name) for name in names)
    found = inspection.compare(first, second)
    if found is None:
        print(f"equal: {len(first.document_indices) - 1:,} documents")
        return 0
    print(f"different: {found.what}: {found.first} in {names[0]}, {found.second} in {names[1]}")
    return 1


def duplicates(args: argparse.Namespace) -> int:
    """Print how many documents are copies, and list them if asked."""
    prefixes = corpora_of(args.corpora)
    found = inspection.find_duplicates([IndexedDataset(prefix) for prefix in prefixes])
    print(
        f"{len(found.copies):,} of {found.num_documents:,} documents equal an earlier one "
        f"({found.num_tokens_of_copies:,} tokens)"
    )
    if args.list is not None:
        with open(args.list, "w") as file:
            for copy, original in zip(found.copies.tolist(), found.originals.tolist(), strict=True):
                line = {
                    "corpus": prefixes[copy[0]],
                    "document": copy[1],
                    "original": {"corpus": prefixes[original[0]], "document": original[1]},
                }
                file.write(json.dumps(line) + "\n")
    return int(len(found.copies) > 0)


def audit(args: argparse.Namespace) -> int:
    """Print what the records of a run prove."""
    from megatron.training.datasets.audit import read_audit

    found = read_audit(args.folder)
    print(
        f"{found.num_samples:,} samples consumed, {found.num_repeated:,} of them again with the "
        "same tokens"
    )
    for first, last in found.missing[:10]:
        print(f"  samples {first} to {last} are missing")
    for number in found.contradictions[:10]:
        print(f"  sample {number} had other tokens the second time")
    for path in sorted(Path(args.folder).glob("blend-*.txt")):
        print(path.read_text(), end="")
    return int(bool(found.missing or found.contradictions))


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    args = parse_args(argv)
    commands = {
        "verify": verify,
        "stats": stats,
        "show": show,
        "compare": compare,
        "duplicates": duplicates,
        "blend": blend,
        "audit": audit,
    }
    return commands[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
