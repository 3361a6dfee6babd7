"""From JSON lines to token files: parsing and tokenizing in worker processes, writing in order.

The output depends on the input alone, not on the number of workers: batches of lines go out and
come back in the order of the files. The memory is bounded: few batches are under way at a time.

No torch import.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.jsonl import BadLineError, LineBatch, parse_document
from megatron.core.errors import DataError


class BatchTokenizer(Protocol):
    """The part of a tokenizer that is needed here."""

    def tokenize_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of several texts."""


@dataclass(frozen=True)
class BadLine:
    """A line that was left out."""

    path: str
    number: int
    reason: str
    detail: str


@dataclass
class KeyTokens:
    """The documents of one JSON key in one batch, in the form the builder takes."""

    tokens: np.ndarray
    sequence_lengths: np.ndarray
    sequences_per_document: np.ndarray
    num_empty: int
    """Documents without a single token; they are left out."""
    text_bytes: int


@dataclass
class EncodedBatch:
    """What a worker returns for a `LineBatch`."""

    keys: dict[str, KeyTokens]
    num_lines: int
    bad_lines: list[BadLine]


@dataclass(kw_only=True)
class Encoder:
    """Turn lines into tokens. Picklable; made once, used by every worker.

    Args:
        tokenizer: does the work, one batch at a time.
        json_keys: members that hold text, see `jsonl.parse_document`.
        dtype: of the tokens.
        end_of_document: id appended to every document, or None.
        split: cuts a text into sequences; None keeps it whole.
    """

    tokenizer: BatchTokenizer
    json_keys: Sequence[str]
    dtype: type[np.number]
    end_of_document: int | None = None
    split: Callable[[str], list[str]] | None = None

    def __call__(self, batch: LineBatch) -> EncodedBatch:
        """Parse and tokenize; faulty lines are returned by name, not raised."""
        documents: list[dict[str, list[str]]] = []
        numbers: list[int] = []
        bad: list[BadLine] = []
        for line in batch.lines:
            try:
                documents.append(parse_document(line, self.json_keys))
                numbers.append(line.number)
            except BadLineError as error:
                bad.append(BadLine(batch.path, line.number, error.reason, error.detail))
        ids, rejected = self._tokenize(documents)
        for at, (reason, detail) in rejected.items():
            bad.append(BadLine(batch.path, numbers[at], reason, detail))
        kept = [at for at in range(len(documents)) if at not in rejected]
        keys = {
            key: self._pack([documents[at][key] for at in kept], [ids[at][key] for at in kept])
            for key in self.json_keys
        }
        bad.sort(key=lambda line: line.number)
        return EncodedBatch(keys, len(batch.lines), bad)

    def _tokenize(
        self, documents: list[dict[str, list[str]]]
    ) -> tuple[list[dict[str, list[list[int]]]], dict[int, tuple[str, str]]]:
        """Return the ids of each document and the documents that have none that fit."""
        if self.split is not None:
            for document in documents:
                for key, texts in document.items():
                    document[key] = [*chain.from_iterable(map(self.split, texts))]
        texts = [*chain.from_iterable(chain.from_iterable(d.values()) for d in documents)]
        rejected: dict[int, tuple[str, str]] = {}
        try:
            flat = iter(self.tokenizer.tokenize_batch(texts))
            ids = [{key: [next(flat) for _ in d[key]] for key in d} for d in documents]
        except Exception:  # whatever the library raises: find the text that it does not take
            ids = []
            for at, document in enumerate(documents):
                try:
                    ids.append({k: self.tokenizer.tokenize_batch(t) for k, t in document.items()})
                except Exception as error:
                    ids.append({key: [] for key in document})
                    rejected[at] = ("not tokenizable", f"{type(error).__name__}: {error}")
        return ids, rejected

    def _pack(self, texts: list[list[str]], ids: list[list[list[int]]]) -> KeyTokens:
        sequences: list[list[int]] = []
        per_document: list[int] = []
        for document in ids:
            filled = [sequence for sequence in document if sequence]
            if not filled:
                continue
            if self.end_of_document is not None:
                filled[-1].append(self.end_of_document)
            sequences += filled
            per_document.append(len(filled))
        lengths = np.array([len(sequence) for sequence in sequences], np.int32)
        total = int(lengths.sum(dtype=np.int64))
        return KeyTokens(
            tokens=np.fromiter(chain.from_iterable(sequences), self.dtype, count=total),
            sequence_lengths=lengths,
            sequences_per_document=np.array(per_document, np.int64),
            num_empty=len(ids) - len(per_document),
            text_bytes=sum(len(text.encode()) for document in texts for text in document),
        )


@dataclass
class Tally:
    """What was done so far, for progress lines and the summary."""

    lines: int = 0
    documents: Counter[str] = field(default_factory=Counter)
    sequences: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    text_bytes: Counter[str] = field(default_factory=Counter)
    empty: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    """Reason -> lines left out."""

    def add(self, batch: EncodedBatch) -> None:
        """Count one batch."""
        self.lines += batch.num_lines
        self.skipped.update(line.reason for line in batch.bad_lines)
        for key, part in batch.keys.items():
            self.documents[key] += len(part.sequences_per_document)
            self.sequences[key] += len(part.sequence_lengths)
            self.tokens[key] += len(part.tokens)
            self.text_bytes[key] += part.text_bytes
            self.empty[key] += part.num_empty


def write_corpora(
    encoded: Iterable[EncodedBatch],
    builders: Mapping[str, IndexedDatasetBuilder],
    *,
    skip_bad_lines: bool = False,
    on_progress: Callable[[Tally], None] = lambda tally: None,
) -> Tally:
    """Write batches in the order they come, each key into its own corpus.

    Args:
        encoded: from `encode_in_order`.
        builders: key -> corpus; neither finalized nor discarded here.
        skip_bad_lines: count faulty lines instead of stopping at the first.
        on_progress: called after each batch.
    Raises:
        DataError: a faulty line, with its file and number.
    """
    tally = Tally()
    for batch in encoded:
        if batch.bad_lines and not skip_bad_lines:
            raise _bad_line(batch.bad_lines[0])
        for key, part in batch.keys.items():
            builders[key].add_documents(
                part.tokens, part.sequence_lengths, part.sequences_per_document
            )
        tally.add(batch)
        on_progress(tally)
    return tally


def _bad_line(line: BadLine) -> DataError:
    detail = f" ({line.detail})" if line.detail else ""
    return DataError(
        f"{line.path}, line {line.number}: {line.reason}{detail}.",
        rule="each line is a JSON object in UTF-8 that holds text under every key of --json-keys; "
        "nothing was left under the output names",
        flags=["--input", "--json-keys", "--skip-bad-lines"],
        fix="mend the line, or pass --skip-bad-lines to leave such lines out and count them",
    )


def encode_in_order(
    batches: Iterable[LineBatch], encoder: Encoder, num_workers: int
) -> Iterator[EncodedBatch]:
    """Encode batches on several processes and yield the results in the order of the input.

    Args:
        num_workers: processes besides this one; 1 or less works in this one.
    Raises:
        DataError: a worker died.
    """
    if num_workers <= 1:
        yield from map(encoder, batches)
        return
    # Forked children share the loaded tokenizer; this process has no threads and no torch.
    start = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context(start),
        initializer=_remember,
        initargs=(encoder,),
    )
    under_way: deque[tuple[LineBatch, Future[EncodedBatch]]] = deque()
    try:
        for batch in batches:
            under_way.append((batch, pool.submit(_encode, batch)))
            # Enough to keep everybody busy while the oldest is slow; not the whole input.
            if len(under_way) > 4 * num_workers:
                yield _result(*under_way.popleft())
        while under_way:
            yield _result(*under_way.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(batch: LineBatch, future: Future[EncodedBatch]) -> EncodedBatch:
    try:
        return future.result()
    except BrokenProcessPool as error:
        first, last = batch.lines[0].number, batch.lines[-1].number
        raise DataError(
            f"a worker process died; the oldest unfinished work was lines {first} to {last} of "
            f"{batch.path}.",
            rule="a worker that is killed (most often for memory) cannot be replaced",
            flags=["--workers"],
            fix="start again with fewer --workers, or look for an oversized document there",
        ) from error


_encoder: Encoder | None = None
"""The encoder of this worker process; set once, when the process starts."""


def _remember(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _encode(batch: LineBatch) -> EncodedBatch:
    assert _encoder is not None
    return _encoder(batch)
