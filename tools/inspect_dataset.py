"""Inspect token files: verify, statistics, decode documents, compare, find duplicates.

    python tools/inspect_dataset.py verify data/a data/b --vocab-size 50257 --eod 50256
    python tools/inspect_dataset.py stats data/a
    python tools/inspect_dataset.py show data/a --documents 0 17 --tokenizer-type ByteTokenizer
    python tools/inspect_dataset.py compare data/a data/b
    python tools/inspect_dataset.py duplicates data/a data/b --list duplicates.jsonl
    python tools/inspect_dataset.py blend 0.7 data/a 0.3 data/b --samples 100000 --seq-length 4096
    python tools/inspect_dataset.py audit runs/audit

A name is a corpus without .bin and .idx, or a folder of corpora. The exit status is 0 without
findings (`compare`: equal), 1 with findings or if a corpus cannot be read, 2 if the command itself
is wrong.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from megatron.core.datasets.blended_megatron_dataset_config import SAMPLE_ORDERS
from megatron.core.datasets.corpus import inspection
from megatron.core.datasets.corpus.files import MASK_SUFFIX
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.exit_status import tool
from megatron.core.foundation.pictures import check_picture_name
from megatron.core.settings.command_line import Subcommand, run_subcommand
from megatron.core.settings.flags import flag, positional
from megatron.core.tokenizers.megatron_tokenizer import TOKENIZER_TYPES, make_tokenizer


@dataclass(frozen=True, kw_only=True)
class VerifyFlags:
    """Check that index and tokens fit, and that the tokens are allowed."""

    corpora: tuple[str, ...] = positional()
    vocab_size: int | None = None
    """Every id must be below this."""
    eod: int | None = None
    """Every document must end with this id."""


@dataclass(frozen=True, kw_only=True)
class StatsFlags:
    """Lengths and sizes."""

    corpora: tuple[str, ...] = positional()
    json: bool = False
    """One JSON object per corpus."""
    report: str | None = flag(None, metavar="FILE")
    """Draw the lengths: .html or .png."""


@dataclass(frozen=True, kw_only=True)
class ShowFlags:
    """Print documents."""

    corpus: str = positional()
    documents: tuple[int, ...] = flag((0,), metavar="NUMBER")
    tokens: int = 200
    """Number of tokens printed per document."""
    ids: bool = False
    """Print ids in addition to the text."""
    tokenizer_type: str | None = flag(
        None, metavar="TYPE", help=f"Decode with it: {', '.join(TOKENIZER_TYPES)}."
    )
    tokenizer_model: str | None = None
    """File, folder or name of the model."""
    vocab_file: str | None = None
    """Vocabulary of GPT2BPETokenizer."""
    merge_file: str | None = None
    """Merges of GPT2BPETokenizer."""
    vocab_size: int | None = None
    """Ids of NullTokenizer."""


@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """Compare the documents of two corpora."""

    corpora: tuple[str, str] = positional()


@dataclass(frozen=True, kw_only=True)
class DuplicatesFlags:
    """Find documents that equal an earlier one exactly."""

    corpora: tuple[str, ...] = positional()
    list: str | None = flag(None, metavar="FILE")
    """Write each copy and its original."""


@dataclass(frozen=True, kw_only=True)
class BlendFlags:
    """Samples, share and epochs of each corpus of a blend."""

    corpora: tuple[str, ...] = positional()
    samples: int | None = None
    """Number of samples of the run; without it, one epoch."""
    seq_length: int
    """Tokens of a sample."""
    split: str = "1"
    """Split of the run; the share of training is shown."""
    sample_order: str = flag("megatron", choices=SAMPLE_ORDERS)
    mid_level_dataset_surplus: float = 0.005
    json: bool = False
    """One JSON object per corpus."""


@dataclass(frozen=True, kw_only=True)
class AuditFlags:
    """Verify the samples that a run consumed."""

    folder: str = positional()
    """Folder of --data-audit-path."""


def corpora_of(names: Sequence[str]) -> list[str]:
    """Return the prefixes of the named corpora and folders."""
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


def verify(flags: VerifyFlags) -> int:
    """Check corpora, and name every faulty corpus."""
    faulty = 0
    for prefix in corpora_of(flags.corpora):
        try:
            problems = _problems_of(IndexedDataset(prefix), flags)
        except DataError as error:
            problems = [str(error)]
        faulty += bool(problems)
        print(f"{prefix}: {'ok' if not problems else 'FAULTY'}")
        for problem in problems:
            print(f"  {problem}")
    return int(faulty > 0)


def _problems_of(corpus: IndexedDataset, flags: VerifyFlags) -> list[str]:
    problems = []
    if flags.vocab_size is not None:
        for bad in inspection.tokens_outside(corpus, flags.vocab_size):
            problems.append(
                f"token {bad.token} at position {bad.position} of document {bad.document} is "
                f"outside the vocabulary of {flags.vocab_size}"
            )
    if flags.eod is not None:
        missing = inspection.documents_without_end(corpus, flags.eod)
        if missing:
            problems.append(f"{missing} documents do not end with {flags.eod} (--append-eod)")
    return problems


def stats(flags: StatsFlags) -> int:
    """Print lengths and sizes; draw the lengths if `report` is set."""
    if flags.report is not None:
        check_picture_name(flags.report, flag="--report")
    prefixes, lines = corpora_of(flags.corpora), []
    for prefix in prefixes:
        found = inspection.statistics(IndexedDataset(prefix))
        if flags.json:
            print(json.dumps({"corpus": prefix, **dataclasses.asdict(found)}))
        else:
            print(described(prefix, found))
        lines.append(described(prefix, found))
    if flags.report is not None:
        lengths = {prefix: IndexedDataset(prefix).document_lengths() for prefix in prefixes}
        title = f"lengths of {', '.join(map(os.path.basename, prefixes))}"
        inspection.write_report(flags.report, lengths, title=title, summary="\n".join(lines))
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


def show(flags: ShowFlags) -> int:
    """Print documents as ids, and as text if a tokenizer is named."""
    (prefix,) = corpora_of([flags.corpus])
    corpus = IndexedDataset(prefix)
    has_mask = IndexedDataset.exists(prefix + MASK_SUFFIX)
    mask = IndexedDataset(prefix + MASK_SUFFIX) if has_mask else None
    tokenizer = None
    if flags.tokenizer_type is not None:
        tokenizer = make_tokenizer(
            flags.tokenizer_type,
            tokenizer_model=flags.tokenizer_model,
            vocab_file=flags.vocab_file,
            merge_file=flags.merge_file,
            vocab_size=flags.vocab_size,
        )
    count = len(corpus.document_indices) - 1
    for number in flags.documents:
        if not 0 <= number < count:
            raise DataError(
                f"{prefix} has no document {number}.",
                rule=f"it holds documents 0 to {count - 1}",
                flags=["--documents"],
            )
        tokens = corpus.document_tokens(number)
        shown = [int(token) for token in tokens[: flags.tokens]]
        rest = f" (the first {len(shown)})" if len(shown) < len(tokens) else ""
        print(f"document {number}: {len(tokens)} tokens{rest}")
        if tokenizer is not None:
            print(readable(tokenizer.detokenize(shown)))
        if tokenizer is None or flags.ids:
            print(f"  ids   {' '.join(map(str, shown))}")
        if mask is not None:  # conversations
            is_learned = mask.document_tokens(number) == 1
            learned = tokens[: flags.tokens][is_learned[: flags.tokens]]
            print(f"  of these {len(learned)} are learned{'' if tokenizer is None else ':'}")
            if tokenizer is not None:
                print(readable(tokenizer.detokenize(learned.tolist())))
    return 0


def readable(text: str) -> str:
    """Return text as indented lines, with control and invisible characters escaped."""
    shown = "".join(
        c if c.isprintable() or c in "\t\n" else c.encode("unicode_escape").decode() for c in text
    )
    return "\n".join(f"  | {line}" for line in shown.split("\n"))


class _AnyTokens:
    """A tokenizer without tokens, for a caller that reads none."""

    vocab_size = 1 << 31
    unique_identifiers: ClassVar[dict[str, str]] = {"class": "any"}


def blend(flags: BlendFlags) -> int:
    """Print the samples of each corpus of a blend, as a run would build it."""
    from megatron.core.datasets.blended_dataset import lines_of, shares_of
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    with tempfile.TemporaryDirectory() as cache:
        config = GPTDatasetConfig(
            random_seed=1234,
            sequence_length=flags.seq_length,
            blend=get_blend_from_list(list(flags.corpora)),
            split=flags.split,
            path_to_cache=cache,
            sample_order=flags.sample_order,
            mid_level_dataset_surplus=flags.mid_level_dataset_surplus,
            tokenizer=_AnyTokens(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
        )
        parts = BlendedMegatronDatasetBuilder(
            GPTDataset, [flags.samples, 0, 0], lambda: True, config
        ).build()
        shares = shares_of(parts[0])
        num_samples = len(parts[0])
    if flags.json:
        for share in shares:
            print(json.dumps(dataclasses.asdict(share)))
        return 0
    print(f"{num_samples:,} samples of {flags.seq_length:,} tokens")
    for line in lines_of(shares, max_lines=len(shares)):
        print(f"  {line}")
    return 0


def compare(flags: CompareFlags) -> int:
    """Print the first difference between two corpora."""
    names = [name.removesuffix(".idx").removesuffix(".bin") for name in flags.corpora]
    first, second = (IndexedDataset(name) for name in names)
    found = inspection.compare(first, second)
    if found is None:
        print(f"equal: {len(first.document_indices) - 1:,} documents")
        return 0
    print(f"different: {found.what}: {found.first} in {names[0]}, {found.second} in {names[1]}")
    return 1


def duplicates(flags: DuplicatesFlags) -> int:
    """Print the number of copies, and list them if `list` is set."""
    prefixes = corpora_of(flags.corpora)
    found = inspection.find_duplicates([IndexedDataset(prefix) for prefix in prefixes])
    print(
        f"{len(found.copies):,} of {found.num_documents:,} documents equal an earlier one "
        f"({found.num_tokens_of_copies:,} tokens)"
    )
    if flags.list is not None:
        with open(flags.list, "w") as file:
            for copy, original in zip(found.copies.tolist(), found.originals.tolist(), strict=True):
                line = {
                    "corpus": prefixes[copy[0]],
                    "document": copy[1],
                    "original": {"corpus": prefixes[original[0]], "document": original[1]},
                }
                file.write(json.dumps(line) + "\n")
    return int(len(found.copies) > 0)


def audit(flags: AuditFlags) -> int:
    """Print consumed, repeated and missing samples from the records of a run."""
    from megatron.training.datasets.audit import read_audit

    found = read_audit(flags.folder)
    print(
        f"{found.num_samples:,} samples consumed, {found.num_repeated:,} of them again with the "
        "same tokens"
    )
    for first, last in found.missing[:10]:
        print(f"  samples {first} to {last} are missing")
    for number in found.contradictions[:10]:
        print(f"  sample {number} had other tokens the second time")
    for path in sorted(Path(flags.folder).glob("blend-*.txt")):
        print(path.read_text(), end="")
    return int(bool(found.missing or found.contradictions))


COMMANDS: Mapping[str, Subcommand[Any]] = {
    "verify": Subcommand(VerifyFlags, verify),
    "stats": Subcommand(StatsFlags, stats),
    "show": Subcommand(ShowFlags, show),
    "compare": Subcommand(CompareFlags, compare),
    "duplicates": Subcommand(DuplicatesFlags, duplicates),
    "blend": Subcommand(BlendFlags, blend),
    "audit": Subcommand(AuditFlags, audit),
}


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status."""
    return run_subcommand(COMMANDS, argv, description="Look into token files.", allow_abbrev=False)


if __name__ == "__main__":
    sys.exit(main())
