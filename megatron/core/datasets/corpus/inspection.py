"""Statistics, pictures, exact duplicates and differences of corpora.

Each check reads the token file in order, a block at a time, and holds a few bytes per document.
No torch import.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.foundation.pictures import new_figure, save_figure

_BLOCK_TOKENS = 1 << 22
PERCENTILES = (50, 90, 99)


def percentiles_of(lengths: np.ndarray, wanted: Sequence[int] = PERCENTILES) -> list[int]:
    """Return the lengths below which so many percent of the documents are; 0 without any."""
    if not len(lengths):
        return [0] * len(wanted)
    # "lower" keeps to lengths that occur.
    found: list[int] = np.percentile(lengths, wanted, method="lower").astype(int).tolist()
    return found


@dataclass(kw_only=True)
class Statistics:
    """Figures of a corpus, in tokens unless stated otherwise."""

    num_documents: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    num_bytes: int = 0
    """Size of the token file."""
    dtype: str = ""
    num_empty_documents: int = 0
    shortest: int = 0
    longest: int = 0
    mean: float = 0.0
    percentiles: dict[int, int] = field(default_factory=dict)
    """Percentage -> length of a document; so many percent of the documents are shorter."""
    histogram: dict[int, int] = field(default_factory=dict)
    """Power of two p -> number of documents with length in [p, 2 p); 0 -> empty documents."""


def statistics(corpus: IndexedDataset) -> Statistics:
    """Return the figures of a corpus from its index; the tokens are not read."""
    lengths = corpus.document_lengths()
    num_tokens = int(lengths.sum())
    found = Statistics(
        num_documents=len(lengths),
        num_sequences=len(corpus),
        num_tokens=num_tokens,
        num_bytes=num_tokens * np.dtype(corpus.dtype).itemsize,
        dtype=np.dtype(corpus.dtype).name,
    )
    if len(lengths):
        found.num_empty_documents = int((lengths == 0).sum())
        found.shortest, found.longest = int(lengths.min()), int(lengths.max())
        found.mean = num_tokens / len(lengths)
        wanted = (1, 5, 25, 50, 75, 95, 99)
        found.percentiles = dict(zip(wanted, percentiles_of(lengths, wanted), strict=True))
        exponents = np.frexp(lengths.astype(np.float64))[1]
        for exponent, count in zip(*np.unique(exponents, return_counts=True), strict=True):
            found.histogram[1 << (int(exponent) - 1) if exponent else 0] = int(count)
    return found


@dataclass(frozen=True)
class BadToken:
    """A token outside the vocabulary."""

    document: int
    position: int
    token: int


def blocks(corpus: IndexedDataset) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (number of the first token, tokens) over the whole token file."""
    total = int(corpus.sequence_lengths.sum(dtype=np.int64))
    for first in range(0, total, _BLOCK_TOKENS):
        yield first, corpus.read_tokens(first, min(_BLOCK_TOKENS, total - first))


def tokens_outside(corpus: IndexedDataset, vocab_size: int, max_found: int = 10) -> list[BadToken]:
    """Return the first tokens below 0 or not below `vocab_size`; reads every token."""
    found: list[BadToken] = []
    ends = np.cumsum(corpus.document_lengths())
    for first, tokens in blocks(corpus):
        # The extremes are cheap to compute, and most corpora have no bad token.
        if int(tokens.max()) < vocab_size and int(tokens.min()) >= 0:
            continue
        for at in np.flatnonzero((tokens < 0) | (tokens >= vocab_size)).tolist():
            document = int(np.searchsorted(ends, first + at, side="right"))
            begin = int(ends[document - 1]) if document else 0
            found.append(BadToken(document, first + at - begin, int(tokens[at])))
            if len(found) == max_found:
                return found
    return found


def documents_without_end(corpus: IndexedDataset, eod: int) -> int:
    """Return how many documents do not end with `eod`."""
    lengths = corpus.document_lengths()
    missing = int((lengths == 0).sum())
    lasts = np.cumsum(lengths)[lengths > 0] - 1
    for first, tokens in blocks(corpus):
        begin, end = np.searchsorted(lasts, [first, first + len(tokens)])
        missing += int((tokens[lasts[begin:end] - first] != eod).sum())
    return missing


@dataclass(frozen=True)
class Duplicates:
    """Documents that equal an earlier one, token by token; empty documents are left out."""

    copies: np.ndarray
    """int64 [C, 2]: corpus and document of each."""
    originals: np.ndarray
    """int64 [C, 2]: the first document with these tokens."""
    num_documents: int
    num_tokens_of_copies: int


def find_duplicates(corpora: Sequence[IndexedDataset]) -> Duplicates:
    """Find exact duplicates within and between corpora.

    A document is stored as 128 bits of BLAKE2b over its tokens as int64, so that corpora of
    different token types are comparable; each document takes 32 bytes of memory.
    """
    counts = [len(corpus.document_indices) - 1 for corpus in corpora]
    digests = np.empty((sum(counts), 2), np.uint64)
    lengths = np.concatenate(
        [np.empty(0, np.int64), *(corpus.document_lengths() for corpus in corpora)]
    )
    row = 0
    for corpus, count in zip(corpora, counts, strict=True):
        for document in range(count):
            tokens = corpus.document_tokens(document).astype(np.int64)
            digest = hashlib.blake2b(tokens.data, digest_size=16).digest()
            digests[row] = np.frombuffer(digest, np.uint64)
            row += 1
    positions = np.flatnonzero(lengths > 0)
    in_order = positions[np.lexsort((positions, digests[positions, 1], digests[positions, 0]))]
    sorted_digests = digests[in_order]
    begins_group = np.ones(len(in_order), bool)
    begins_group[1:] = (sorted_digests[1:] != sorted_digests[:-1]).any(axis=1)
    heads = in_order[np.flatnonzero(begins_group)]
    originals = heads[np.cumsum(begins_group) - 1]
    copies, firsts = in_order[~begins_group], originals[~begins_group]
    by_place = np.argsort(copies, kind="stable")
    copies, firsts = copies[by_place], firsts[by_place]
    starts = np.cumsum([0, *counts])

    def named(rows: np.ndarray) -> np.ndarray:
        corpus = np.searchsorted(starts, rows, side="right") - 1
        return np.stack([corpus, rows - starts[corpus]], 1)

    return Duplicates(named(copies), named(firsts), len(lengths), int(lengths[copies].sum()))


@dataclass(frozen=True)
class Difference:
    """The first difference of two corpora."""

    what: str
    first: str
    second: str


def compare(first: IndexedDataset, second: IndexedDataset) -> Difference | None:
    """Return the first difference between the documents of two corpora, or None.

    Tokens are compared by value: their dtypes may differ.
    """
    sizes = [len(corpus.document_indices) - 1 for corpus in (first, second)]
    lengths = [corpus.document_lengths() for corpus in (first, second)]
    common = min(sizes)
    apart = np.flatnonzero(lengths[0][:common] != lengths[1][:common])
    until = int(apart[0]) if len(apart) else common
    end = int(lengths[0][:until].sum())
    ends = np.cumsum(lengths[0][:until])
    for begin in range(0, end, _BLOCK_TOKENS):
        count = min(_BLOCK_TOKENS, end - begin)
        here, there = first.read_tokens(begin, count), second.read_tokens(begin, count)
        unequal = np.flatnonzero(here.astype(np.int64) != there.astype(np.int64))
        if len(unequal):
            at = begin + int(unequal[0])
            document = int(np.searchsorted(ends, at, side="right"))
            position = at - (int(ends[document - 1]) if document else 0)
            tokens = f"token {here[unequal[0]]}", f"token {there[unequal[0]]}"
            return Difference(f"document {document}, position {position}", *tokens)
    if len(apart):
        tokens = f"{lengths[0][until]} tokens", f"{lengths[1][until]} tokens"
        return Difference(f"length of document {until}", *tokens)
    if sizes[0] != sizes[1]:
        return Difference("number of documents", str(sizes[0]), str(sizes[1]))
    if not np.array_equal(first.sequence_lengths, second.sequence_lengths):
        return Difference(
            "sequences within documents", f"{len(first)} sequences", f"{len(second)} sequences"
        )
    return None


def write_report(path: str, lengths: Mapping[str, np.ndarray], *, title: str, summary: str) -> None:
    """Draw histograms of document lengths, one for each corpus.

    Args:
        lengths: name of a corpus -> tokens of each document.
        path: `.html` (a page with the summary) or `.png`.
    """
    count = max(1, len(lengths))
    figure = new_figure(9, 3.2 * count, purpose="--report")
    axes = figure.subplots(count, 1, squeeze=False)[:, 0]
    for axis, (name, all_lengths) in zip(axes, lengths.items(), strict=False):
        filled = all_lengths[all_lengths > 0]
        axis.set_title(f"{name}: {len(all_lengths):,} documents, {all_lengths.sum():,} tokens")
        axis.set_xlabel("tokens of a document")
        axis.set_ylabel("documents")
        if not len(filled):
            continue
        # Four bins per doubling of the length.
        first, last = (int(4 * np.log2(end)) for end in (filled.min(), filled.max()))
        axis.hist(filled, bins=2 ** (np.arange(first, last + 2) / 4), alpha=0.7)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(lambda length, _: f"{length:,.0f}")
        styles = zip(PERCENTILES, percentiles_of(all_lengths), ("-", "--", ":"), strict=True)
        for percent, at, style in styles:
            label = f"{percent} %: {at:,}"
            axis.axvline(at, linestyle=style, color="black", linewidth=1, label=label)
        axis.legend()
    save_figure(figure, path, title=title, text=summary)
