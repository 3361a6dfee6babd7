"""One run of preprocessing, from its input files to the final names; new or continued.

A run writes `PREFIX.bin.unfinished`, and next to it the lengths of its sequences and documents. At
intervals it notes the position in the input and the length of each file in
`PREFIX.preprocessed.json`. After a kill at any moment the same command cuts the files back to the
last note and continues; the output equals the output of an undisturbed run to the byte. The files
get their final names when they are complete; a run that was killed between two renames continues as
well. The note of a finished run records its input, settings and counts.

Worker processes encode the units; the results are written in the order of the input. The memory
held does not grow with the corpus. No torch import.
"""

from __future__ import annotations

import fcntl
import gc
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.core.datasets.preprocessing.documents import BadDocument
from megatron.core.datasets.preprocessing.encoder import EncodedUnit
from megatron.core.datasets.preprocessing.inputs import InputFile, InputFormat
from megatron.core.datasets.preprocessing.stats import CorpusStats, Progress
from megatron.core.datasets.preprocessing.unfinished import (
    UnfinishedCorpus,
    finish_corpus,
    open_to_append,
    write_whole,
)
from megatron.core.datasets.preprocessing.units import (
    UNIT_BYTES,
    Unit,
    lines_before,
    read_units,
)
from megatron.core.foundation.errors import DataError, MegatronError
from megatron.core.foundation.processes import die_with_parent

FORMAT_VERSION = 2
"""Incremented if the same input and settings give other bytes than before."""

Work = Callable[[Unit], EncodedUnit]


@dataclass(kw_only=True)
class Job:
    """The input, the settings and the output of a run.

    Args:
        files: the input, or one shard's share of it.
        keys: members or columns that hold text.
        encoder: turns a unit into tokens; see `encoder.Encoder`.
        settings: plain values that decide the output, in addition to the files; a run continues
            only with the settings it began with.
        corpora: name of an output -> (prefix, type of its tokens).
        output: prefix of the note.
        num_workers: processes that tokenize; 0 works in this process.
        skip_bad: leave faulty documents out and count them instead of stopping.
        restart: ignore an unfinished run and a finished output.
        log_interval: documents between two progress lines.
        journal_interval_s: seconds of work that a kill can cost.
        unit_bytes: size of the pieces that a process works on.
    """

    files: Sequence[InputFile]
    keys: Sequence[str]
    encoder: Work
    settings: Mapping[str, Any]
    corpora: Mapping[str, tuple[str, type[np.number]]]
    output: str
    num_workers: int
    skip_bad: bool = False
    restart: bool = False
    log_interval: int = 1000
    journal_interval_s: float = 5.0
    unit_bytes: int = UNIT_BYTES
    tally: CorpusStats = field(default_factory=CorpusStats)
    was_finished: bool = False
    """The output of the same settings and files existed already."""

    @property
    def note_path(self) -> str:
        """The note of the unfinished or finished run."""
        return f"{self.output}.preprocessed.json"

    def run(self) -> CorpusStats:
        """Do all of the work, or the remaining work of an unfinished run.

        Raises:
            DataError: a faulty document, a damaged input, a full disk, or an unfinished run with
                other settings. The next run uses the files written so far.
        """
        with only_writer(self.output):
            note, signature = None if self.restart else self._read_note(), self._signature()
            if note is not None and "bytes" in note:
                self.was_finished = (
                    note["signature"] == signature and note["bytes"] == self._sizes()
                )
                if self.was_finished:
                    self.tally = CorpusStats.from_json(note["tally"])
                    return self.tally
                note = None  # another input or other settings: a new run replaces the output
            if note is None:
                with suppress(FileNotFoundError):
                    os.unlink(self.note_path)
            else:
                self._continue_from(note, signature)
                signature = note["signature"]
            if note is None or not note["finished"]:
                self._work(note, signature)
            for prefix, dtype in self.corpora.values():
                finish_corpus(prefix, dtype)
            self._write_note({"signature": signature, "bytes": self._sizes()})
        return self.tally

    def _work(self, note: dict[str, Any] | None, signature: object) -> None:
        """Tokenize from `note` to the end of the input."""
        sizes: dict[str, list[int]] = note["sizes"] if note else {}
        start = (note["file"], note["place"]) if note else (0, 0)
        begun, earlier_s = time.perf_counter(), self.tally.seconds
        outputs: dict[str, UnfinishedCorpus] = {}

        def write_note(finished: bool = False) -> None:
            self.tally.seconds = earlier_s + time.perf_counter() - begun
            self._write_note(
                {
                    "signature": signature,
                    "file": start[0],
                    "place": start[1],
                    "sizes": {name: output.flush_to_disk() for name, output in outputs.items()},
                    "finished": finished,
                }
            )

        is_known = all(file.size > 0 or os.path.isfile(file.path) for file in self.files)
        total = sum(file.size for file in self.files) if is_known else 0
        progress = Progress(self.log_interval, total, self.tally)
        is_noted = note is not None
        try:
            for name, (prefix, dtype) in self.corpora.items():
                outputs[name] = UnfinishedCorpus(prefix, dtype, sizes.get(name))
            units = read_units(self.files, keys=self.keys, start=start, unit_bytes=self.unit_bytes)
            next_note = time.perf_counter() + self.journal_interval_s
            with closing(encode_in_order(units, self.encoder, self.num_workers)) as encoded:
                for unit, result in encoded:
                    if result.bad and not self.skip_bad:
                        raise self._bad_document(unit.file, result.bad[0])
                    for name, part in result.parts.items():
                        outputs[name].add(part)
                    self.tally.add(unit.file, result)
                    start = unit.next_position
                    progress(self.tally, unit.consumed)
                    if time.perf_counter() > next_note:
                        write_note()
                        is_noted = True
                        next_note = time.perf_counter() + self.journal_interval_s
            write_note(finished=True)
        except BaseException as error:
            for output in outputs.values():
                output.close(discard=not is_noted)
            if is_noted and isinstance(error, DataError):
                print(
                    f"{self.output}: the work so far is kept; the same command continues.",
                    file=sys.stderr,
                )
            raise
        for output in outputs.values():
            output.close()

    # --- continuing -------------------------------------------------------------------------

    def _signature(self) -> dict[str, Any]:
        files = [
            [f.path, f.format.value, f.size, f.modified_ns, f.first_byte, f.end_byte]
            for f in self.files
        ]
        plain = {**self.settings, "version": FORMAT_VERSION, "files": files}
        signature: dict[str, Any] = json.loads(json.dumps(plain))  # as it will be read back
        return signature

    def _read_note(self) -> dict[str, Any] | None:
        try:
            with open(self.note_path, encoding="utf-8") as file:
                note: dict[str, Any] = json.load(file)
            return note if {"signature", "tally"} <= {*note} else None
        except (OSError, ValueError, TypeError):
            return None

    def _write_note(self, fields: Mapping[str, Any]) -> None:
        text = json.dumps({**fields, "tally": self.tally.as_json()}).encode()
        write_whole(self.note_path, lambda file: file.write(text))

    def _continue_from(self, note: Mapping[str, Any], signature: Mapping[str, Any]) -> None:
        """Check that an unfinished run belongs to this job, and restore its counts."""
        earlier = note["signature"]
        # Files that the run had not begun may have changed since.
        num_read = len(self.files) if note["finished"] else note["file"] + (note["place"] > 0)
        other = [key for key in signature if key != "files" and signature[key] != earlier.get(key)]
        if signature["files"][:num_read] != earlier["files"][:num_read] or (
            [f[0] for f in signature["files"]] != [f[0] for f in earlier["files"]]
        ):
            other.append("files")
        if other:
            key, shown = other[0], ""
            if key != "files":
                shown = f": {signature[key]!r:.80}, it began with {earlier.get(key)!r:.80}"
            raise DataError(
                f"{self.note_path}: an unfinished run with other {', '.join(other)}{shown}.",
                rule="a run continues with the settings and the files it began with",
                flags=["--output-prefix", "--restart"],
                fix="give the same command again, or pass --restart to begin anew",
            )
        self.tally = CorpusStats.from_json(note["tally"])
        print(
            f"{self.output}: continuing after {self.tally.documents:,} documents, "
            f"{self.tally.tokens:,} tokens.",
            file=sys.stderr,
        )

    def _sizes(self) -> list[int]:
        """Return the bytes of all outputs; -1 for a missing file."""
        names = [
            f"{prefix}{end}" for prefix, _ in self.corpora.values() for end in (".bin", ".idx")
        ]
        return [os.path.getsize(name) if os.path.exists(name) else -1 for name in names]

    def _bad_document(self, number: int, bad: BadDocument) -> DataError:
        file = self.files[number]
        position = ""
        if file.format is InputFormat.parquet:
            position = f", row {bad.number:,}"
        elif bad.number:
            before = self.tally.lines_of_file if self.tally.file == number else 0
            # A shard may begin in the middle of the file.
            position = f", line {lines_before(file) + before + bad.number}"
        detail = f" ({bad.detail})" if bad.detail else ""
        return DataError(
            f"{bad.path}{position}: {bad.reason}{detail}.",
            rule="each document is a JSON object in UTF-8 (or a row) that holds text under every "
            "key of --json-keys",
            flags=["--input", "--json-keys", "--skip-bad-lines"],
            fix="correct it, or pass --skip-bad-lines to leave such documents out and count them",
        )


@contextmanager
def only_writer(output: str) -> Iterator[None]:
    """Hold the lock of an output until this process ends; forked workers do not hold it.

    Raises:
        DataError: another process holds it, or the folder cannot be written.
    """
    path = f"{output}.lock"
    while True:
        file = open_to_append(path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise DataError(
                f"another process is writing {output}.",
                rule="an output has one writer",
                flags=["--output-prefix"],
                fix="wait for it, or choose another prefix",
            ) from error
        if os.path.exists(path) and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            break
        file.close()  # the run that held it has just finished and removed it
    with file:
        try:
            yield
        finally:
            with suppress(FileNotFoundError):
                os.unlink(path)


# --- worker processes ---------------------------------------------------------------------------


def encode_in_order(
    units: Iterable[Unit], work: Work, num_workers: int
) -> Generator[tuple[Unit, EncodedUnit], None, None]:
    """Encode units on several processes and yield them, with the results, in order.

    Args:
        work: an `Encoder` or the like; forked workers share its loaded tokenizer.
        num_workers: processes in addition to this one; 0 works in this process.
    Raises:
        DataError: a worker died.
    """
    if num_workers == 0:
        for unit in units:
            yield unit, _explained(work, unit)
        return
    # Forked children share the loaded tokenizer; this process has no threads and no torch.
    start = "fork" if sys.platform == "linux" else "spawn"
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context(start),
        initializer=_begin_work,
        initargs=(work, os.getpid()),
    )
    under_way: deque[tuple[Unit, Future[EncodedUnit]]] = deque()
    try:
        for unit in units:
            under_way.append((unit, pool.submit(_work_on, unit)))
            # Enough units to keep all workers busy while the oldest unit is slow.
            if len(under_way) > 3 * num_workers:
                yield _result(*under_way.popleft())
        while under_way:
            yield _result(*under_way.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _result(unit: Unit, future: Future[EncodedUnit]) -> tuple[Unit, EncodedUnit]:
    try:
        return unit, future.result()
    except BrokenProcessPool as error:
        raise DataError(
            f"a worker process died; the oldest unfinished work was {_place(unit)} of {unit.path}.",
            rule="a worker that is killed (most often for memory) cannot be replaced",
            flags=["--workers"],
            fix="start again with fewer --workers (the run continues where it stopped), or look "
            "for an oversized document there",
        ) from error


_work: Work | None = None
"""The work of this process; set once, when it starts."""


def _begin_work(work: Work, parent: int) -> None:
    global _work
    _work = work
    die_with_parent(parent)
    # Ctrl-C reaches the whole process group; only the parent handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Lists of numbers form no cycles, and garbage collections that scan all of them cost time.
    gc.collect()
    gc.freeze()
    gc.disable()


def _work_on(unit: Unit) -> EncodedUnit:
    assert _work is not None
    return _explained(_work, unit)


def _explained(work: Work, unit: Unit) -> EncodedUnit:
    """Work on a unit; an unexpected error names its place in the input."""
    try:
        return work(unit)
    except (MegatronError, KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        raise DataError(
            f"{_place(unit)} of {unit.path}: {type(error).__name__}: {error}.",
            rule="every text of the input is encoded, or refused by its line",
            flags=["--input", "--tokenizer-backend"],
            fix="look for an odd document there; --tokenizer-backend library may take it",
        ) from error


def _place(unit: Unit) -> str:
    kind = "rows" if unit.rows is not None else "bytes"
    return f"{kind} {unit.start:,} to {unit.end:,}"
