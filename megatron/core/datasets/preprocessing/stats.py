"""Counts of a run: what the progress line, the summary and the report are made of.

No torch import.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, TextIO

import numpy as np

from megatron.core.datasets.corpus.inspection import document_lengths
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.encoder import EncodedUnit

BUCKETS_PER_DOUBLING = 4
"""Lengths of documents are counted in buckets, each 19 % wider than the one before."""


@dataclass(kw_only=True)
class CorpusTally:
    """Counts of one output corpus."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    cut: int = 0
    shortest: int = 0
    longest: int = 0
    buckets: list[int] = field(default_factory=list)
    """Documents by floor(4 log2(tokens))."""

    @classmethod
    def of(cls, corpus: IndexedDataset) -> CorpusTally:
        """Count a corpus that exists; empty documents have no bucket."""
        lengths = document_lengths(corpus)
        found = cls(documents=len(lengths), sequences=len(corpus), tokens=int(lengths.sum()))
        found.empty = int((lengths == 0).sum())
        found.add_lengths(lengths[lengths > 0])
        return found

    def add_lengths(self, lengths: np.ndarray) -> None:
        """Count the lengths of documents, all above zero."""
        if not len(lengths):
            return
        low, high = int(lengths.min()), int(lengths.max())
        self.shortest = min(self.shortest, low) if self.longest else low
        self.longest = max(self.longest, high)
        of_bucket = np.floor(np.log2(lengths) * BUCKETS_PER_DOUBLING).astype(np.int64)
        counted = np.bincount(of_bucket, minlength=len(self.buckets))
        counted[: len(self.buckets)] += np.array(self.buckets, np.int64)
        self.buckets = counted.tolist()


@dataclass(kw_only=True)
class CorpusStats:
    """What was done so far."""

    lines: int = 0
    file: int = 0
    """The file that was read last."""
    lines_of_file: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> documents left out as faulty."""
    corpora: dict[str, CorpusTally] = field(default_factory=dict)
    seconds: float = 0.0
    """Of all runs that worked on it."""

    def add(self, unit: EncodedUnit) -> None:
        """Count one unit."""
        if unit.file != self.file:
            self.file, self.lines_of_file = unit.file, 0
        self.lines += unit.num_lines
        self.lines_of_file += unit.num_lines
        self.skipped.update(bad.reason for bad in unit.bad)
        for name, part in unit.parts.items():
            corpus = self.corpora.setdefault(name, CorpusTally())
            corpus.documents += len(part.sequences.per_document)
            corpus.sequences += len(part.sequences.lengths)
            corpus.tokens += len(part.sequences.tokens)
            corpus.text_bytes += part.text_bytes
            corpus.empty += part.num_empty
            corpus.cut += part.num_cut
            corpus.add_lengths(part.sequences.document_lengths())

    @property
    def num_bad(self) -> int:
        """Documents left out as faulty."""
        return self.skipped.total()

    @property
    def documents(self) -> int:
        """Documents of all corpora together."""
        return sum(corpus.documents for corpus in self.corpora.values())

    @property
    def tokens(self) -> int:
        """Tokens of all corpora together."""
        return sum(corpus.tokens for corpus in self.corpora.values())

    @property
    def text_bytes(self) -> int:
        """Bytes of text of all corpora together."""
        return sum(corpus.text_bytes for corpus in self.corpora.values())

    def as_json(self) -> dict[str, Any]:
        """Return the counts as plain values."""
        corpora = {name: asdict(corpus) for name, corpus in self.corpora.items()}
        return {**vars(self), "skipped": dict(self.skipped), "corpora": corpora}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> CorpusStats:
        """Read what `as_json` returned."""
        corpora = {name: CorpusTally(**counts) for name, counts in values["corpora"].items()}
        return cls(**{**values, "skipped": Counter(values["skipped"]), "corpora": corpora})


_SILENT_SECONDS = 10.0


class Progress:
    """Say how far a run is: a bar on a terminal, else a line every so many documents or 10 s.

    Args:
        interval: documents between two lines.
        total_bytes: of the input as stored; 0 if that is not known.
        begun_with: what an earlier run had done already.
    """

    def __init__(
        self,
        interval: int,
        total_bytes: int,
        begun_with: CorpusStats,
        *,
        stream: TextIO | None = None,
    ) -> None:
        self.interval = max(1, interval)
        self.total_bytes = total_bytes
        self.stream = stream or sys.stderr
        self.is_terminal = self.stream.isatty()
        self._begun = time.perf_counter()
        self._before = (begun_with.documents, begun_with.text_bytes, begun_with.tokens)
        self._first_consumed: int | None = None
        self._next_report = (begun_with.documents // self.interval + 1) * self.interval
        self._drawn = 0.0
        self._said = self._begun

    def __call__(self, tally: CorpusStats, consumed: int) -> None:
        """Report if it is time to.

        Args:
            consumed: bytes of the input that have been read, as stored.
        """
        if self._first_consumed is None:
            self._first_consumed = consumed
        now = time.perf_counter()
        if self.is_terminal:
            if now - self._drawn > 0.2:
                self._drawn = now
                self._draw(tally, consumed)
        elif tally.documents >= self._next_report or now - self._said > _SILENT_SECONDS:
            self._said = now
            self._next_report = (tally.documents // self.interval + 1) * self.interval
            print(self._line(tally, consumed), file=self.stream, flush=True)

    def _line(self, tally: CorpusStats, consumed: int) -> str:
        seconds = max(time.perf_counter() - self._begun, 1e-9)
        now = (tally.documents, tally.text_bytes, tally.tokens)
        documents, size, tokens = (a - b for a, b in zip(now, self._before, strict=True))
        line = (
            f"Processed {tally.documents} documents ({documents / seconds:.1f} docs/s, "
            f"{size / seconds / 1e6:.2f} MB/s, {tokens / seconds:.0f} tokens/s)"
        )
        if self.total_bytes:
            line += f", {100 * min(consumed / self.total_bytes, 1):.1f} %"
            fresh = consumed - (self._first_consumed or 0)
            if fresh > 0:
                left = (self.total_bytes - consumed) * seconds / fresh
                line += f", ETA {duration(left)}"
        if tally.num_bad:
            line += f", {tally.num_bad} faulty"
        return line + "."

    def _draw(self, tally: CorpusStats, consumed: int) -> None:
        width = shutil.get_terminal_size().columns
        line = self._line(tally, consumed)
        if self.total_bytes:
            filled = round(20 * min(consumed / self.total_bytes, 1))
            line = f"[{'#' * filled}{'-' * (20 - filled)}] {line}"
        self.stream.write("\r" + line[: width - 1].ljust(width - 1))
        self.stream.flush()

    def close(self) -> None:
        """Leave the line of the bar."""
        if self.is_terminal and self._drawn:
            self.stream.write("\n")


def duration(seconds: float) -> str:
    """Write seconds as 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"


PERCENTILES = (50, 90, 99)


def percentiles_of(prefix: str) -> list[int]:
    """Return the lengths below which half, 90 % and 99 % of the documents of a corpus are.

    From its index, exactly, and as `inspect_dataset.py stats` gives them: lengths that occur.
    """
    lengths = document_lengths(IndexedDataset(prefix))
    if not len(lengths):
        return [0] * len(PERCENTILES)
    found: list[int] = np.percentile(lengths, PERCENTILES, method="lower").astype(int).tolist()
    return found


def summary(
    tally: CorpusStats,
    prefixes: dict[str, str],
    dtypes: dict[str, str],
    seconds: float,
    percentiles: dict[str, list[int]],
) -> str:
    """Return documents, tokens, lengths, bytes per token, what was left out, and the rate.

    Args:
        prefixes: name of a corpus -> its path without suffix.
        dtypes: name of a corpus -> type of its tokens.
        seconds: of this run.
        percentiles: name of a corpus -> `percentiles_of`.
    """
    lines = []
    for name, prefix in prefixes.items():
        corpus = tally.corpora.get(name, CorpusTally())
        lines += [
            f"{prefix}.bin/.idx",
            f"  documents         {corpus.documents:>14,}",
        ]
        if corpus.sequences != corpus.documents:
            lines.append(f"  sequences         {corpus.sequences:>14,}")
        lines.append(f"  tokens            {corpus.tokens:>14,}  ({dtypes[name]})")
        if corpus.documents:
            shown = ", ".join(
                f"{percent} %: {length:,}"
                for percent, length in zip(PERCENTILES, percentiles[name], strict=True)
            )
            if corpus.text_bytes:  # a mask holds none
                per_token = corpus.text_bytes / max(corpus.tokens, 1)
                lines.append(f"  bytes per token   {per_token:>14.3f}")
            lines += [
                f"  tokens/document   {corpus.tokens / corpus.documents:>14.1f}  "
                f"({shown}; longest {corpus.longest:,})",
            ]
        if corpus.cut:
            lines.append(f"  cut to a pack     {corpus.cut:>14,}")
        if corpus.empty:
            lines.append(f"  empty, left out   {corpus.empty:>14,}")
    for reason, count in sorted(tally.skipped.items()):
        lines.append(f"skipped lines, {reason}: {count:,} of {tally.lines:,}")
    rate = max(seconds, 1e-9)
    lines.append(
        f"{tally.seconds:.1f} s"
        + (f" in all, {seconds:.1f} s in this run" if tally.seconds > seconds + 0.1 else "")
        + f", {tally.text_bytes / max(tally.seconds, rate) / 1e6:.2f} MB/s, "
        f"{tally.tokens / max(tally.seconds, rate):,.0f} tokens/s"
    )
    return "\n".join(lines)
