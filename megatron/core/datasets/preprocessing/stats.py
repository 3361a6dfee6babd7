"""Counts of a run, and its progress lines.

No torch import.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from datetime import timedelta
from typing import Any

from megatron.core.datasets.preprocessing.encoder import EncodedUnit


@dataclass(kw_only=True)
class CorpusTally:
    """Counts of one output corpus."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    text_bytes: int = 0
    empty: int = 0
    cut: int = 0


@dataclass(kw_only=True)
class CorpusStats:
    """Counts of the work done so far."""

    lines: int = 0
    file: int = 0
    """Number of the last file read."""
    lines_of_file: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> documents left out as faulty."""
    corpora: dict[str, CorpusTally] = field(default_factory=dict)
    seconds: float = 0.0
    """Seconds of all runs that worked on the output."""

    def add(self, file: int, unit: EncodedUnit) -> None:
        """Count one unit of a file."""
        if file != self.file:
            self.file, self.lines_of_file = file, 0
        self.lines += unit.num_lines
        self.lines_of_file += unit.num_lines
        self.skipped.update(bad.reason for bad in unit.bad)
        for name, part in unit.parts.items():
            corpus = self.corpora.setdefault(name, CorpusTally())
            corpus.documents += len(part.per_document)
            corpus.sequences += len(part.lengths)
            corpus.tokens += len(part.tokens)
            corpus.text_bytes += part.text_bytes
            corpus.empty += part.num_empty
            corpus.cut += part.num_cut

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
        known = {one.name for one in fields(CorpusTally)}  # earlier versions counted more
        corpora = {
            name: CorpusTally(**{key: count for key, count in counts.items() if key in known})
            for name, counts in values["corpora"].items()
        }
        return cls(**{**values, "skipped": Counter(values["skipped"]), "corpora": corpora})


_SILENT_SECONDS = 10.0


class Progress:
    """Print the rate and the time left, every so many documents or 10 s.

    Args:
        interval: documents between two lines.
        total_bytes: stored size of the input; 0 if unknown.
        begun_with: counts of an earlier run that this run continues.
    """

    def __init__(self, interval: int, total_bytes: int, begun_with: CorpusStats) -> None:
        self.interval = max(1, interval)
        self.total_bytes = total_bytes
        self._begun = time.perf_counter()
        self._before = (begun_with.documents, begun_with.text_bytes, begun_with.tokens)
        self._first_consumed: int | None = None
        self._next_report = (begun_with.documents // self.interval + 1) * self.interval
        self._reported = self._begun

    def __call__(self, tally: CorpusStats, consumed: int) -> None:
        """Print a line if it is time to.

        Args:
            consumed: bytes of the input that have been read, as stored.
        """
        if self._first_consumed is None:
            self._first_consumed = consumed
        now = time.perf_counter()
        if tally.documents < self._next_report and now - self._reported <= _SILENT_SECONDS:
            return
        self._reported = now
        self._next_report = (tally.documents // self.interval + 1) * self.interval
        seconds = max(now - self._begun, 1e-9)
        counts = (tally.documents, tally.text_bytes, tally.tokens)
        documents, size, tokens = (a - b for a, b in zip(counts, self._before, strict=True))
        line = (
            f"Processed {tally.documents} documents ({documents / seconds:.1f} docs/s, "
            f"{size / seconds / 1e6:.2f} MB/s, {tokens / seconds:.0f} tokens/s)"
        )
        if self.total_bytes:
            line += f", {100 * min(consumed / self.total_bytes, 1):.1f} %"
            fresh = consumed - self._first_consumed
            if fresh > 0:
                left = (self.total_bytes - consumed) * seconds / fresh
                line += f", ETA {timedelta(seconds=round(left))}"
        if tally.num_bad:
            line += f", {tally.num_bad} faulty"
        print(line + ".", file=sys.stderr, flush=True)
