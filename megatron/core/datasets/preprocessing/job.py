"""One run of preprocessing, from its input files to the final names; begun, or gone on with.

No torch import.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.core.datasets.corpus.token_file import WholeFile
from megatron.core.datasets.preprocessing.documents import BadDocument
from megatron.core.datasets.preprocessing.inputs import InputFile, InputFormat
from megatron.core.datasets.preprocessing.resume import (
    Journal,
    UnfinishedCorpus,
    finish_corpus,
)
from megatron.core.datasets.preprocessing.stats import CorpusStats, Progress
from megatron.core.datasets.preprocessing.units import (
    UNIT_BYTES,
    lines_before,
    read_units,
    sizes_are_known,
)
from megatron.core.datasets.preprocessing.workers import Work, encode_in_order
from megatron.core.foundation.errors import DataError

FORMAT_VERSION = 2
"""Raised when the same input and settings would give other bytes than before."""


@dataclass(kw_only=True)
class Job:
    """What is read, how, and where it goes.

    Args:
        files: the input, or one shard's share of it.
        keys: members or columns that hold text.
        encoder: a unit into tokens; see `encoder.Encoder`.
        settings: plain values that decide the output besides the files; a run goes on only
            with the settings it began with.
        corpora: name of an output -> (prefix, type of its tokens).
        output: prefix of the journal and of the record of what was done.
        num_workers: processes that tokenize; 0 works in this one.
        skip_bad: leave faulty documents out and count them instead of stopping.
        restart: forget an unfinished run and a finished output.
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
    """The output of the same settings and files was there already."""

    @property
    def journal_path(self) -> str:
        """The journal of the unfinished run."""
        return f"{self.output}.journal"

    @property
    def record_path(self) -> str:
        """What the finished output was made from."""
        return f"{self.output}.preprocessed.json"

    def run(self) -> CorpusStats:
        """Do all of it, or what is left of it.

        Raises:
            DataError: a faulty document, a damaged input, a full disk, or an unfinished run with
                other settings. What was written stays for the next run if it is worth it.
        """
        signature = self._signature()
        finished = None if self.restart else self._finished_record(signature)
        if finished is not None and not os.path.exists(self.journal_path):
            self.tally, self.was_finished = CorpusStats.from_json(finished["tally"]), True
            return self.tally
        journal = Journal(self.journal_path, restart=self.restart)
        with closing(journal):
            state = self._resumed(journal, signature)
            if journal.first is None:
                journal.write({"signature": signature})
            if state is None or not state.get("finished"):
                self._work(journal, state)
            for prefix, dtype in self.corpora.values():
                finish_corpus(prefix, dtype)
            record = WholeFile(self.record_path)
            found = {"signature": signature, "tally": self.tally.as_json(), "bytes": self._sizes()}
            record.write(json.dumps(found, indent=1).encode())
            record.commit()
            journal.remove()
        return self.tally

    def _work(self, journal: Journal, state: dict[str, Any] | None) -> None:
        """Tokenize from `state` to the end of the input."""
        sizes: dict[str, list[int]] = state["sizes"] if state else {}
        start = (state["file"], state["place"]) if state else (0, 0)
        begun, earlier_s = time.perf_counter(), self.tally.seconds
        outputs: dict[str, UnfinishedCorpus] = {}

        def note(finished: bool = False) -> None:
            self.tally.seconds = earlier_s + time.perf_counter() - begun
            journal.write(
                {
                    "file": start[0],
                    "place": start[1],
                    "sizes": {name: output.flush_to_disk() for name, output in outputs.items()},
                    "tally": self.tally.as_json(),
                    "finished": finished,
                }
            )

        total = sum(file.size for file in self.files) if sizes_are_known(self.files) else 0
        progress = Progress(self.log_interval, total, self.tally)
        is_noted = state is not None
        try:
            for name, (prefix, dtype) in self.corpora.items():
                outputs[name] = UnfinishedCorpus(prefix, dtype, sizes.get(name))
            units = read_units(self.files, keys=self.keys, start=start, unit_bytes=self.unit_bytes)
            next_note = time.perf_counter() + self.journal_interval_s
            with closing(encode_in_order(units, self.encoder, self.num_workers)) as encoded:
                for unit in encoded:
                    if unit.bad and not self.skip_bad:
                        raise self._bad_document(unit.file, unit.bad[0])
                    for name, part in unit.parts.items():
                        outputs[name].add(part.sequences)
                    self.tally.add(unit)
                    start = unit.next_position
                    progress(self.tally, unit.consumed)
                    if time.perf_counter() > next_note:
                        note()
                        is_noted = True
                        next_note = time.perf_counter() + self.journal_interval_s
            note(finished=True)
        except BaseException as error:
            for output in outputs.values():
                if is_noted:
                    output.close()
                else:
                    output.discard()
            if not is_noted:
                journal.remove()
            elif isinstance(error, DataError):
                print(
                    f"{self.output}: what was done so far is kept; the same command continues.",
                    file=sys.stderr,
                )
            raise
        finally:
            progress.close()
        for output in outputs.values():
            output.close()

    # --- going on ---------------------------------------------------------------------------

    def _signature(self) -> dict[str, Any]:
        files = [
            [f.path, f.format.value, f.size, f.modified_ns, f.first_byte, f.end_byte]
            for f in self.files
        ]
        plain = {**self.settings, "version": FORMAT_VERSION, "files": files}
        signature: dict[str, Any] = json.loads(json.dumps(plain))  # as it will be read back
        return signature

    def _resumed(self, journal: Journal, signature: dict[str, Any]) -> dict[str, Any] | None:
        """Return the last line of an earlier run, checked to be one of this job."""
        if journal.first is None or journal.last is None:
            return None
        earlier, state = journal.first["signature"], journal.last
        # Files that were not begun may have changed since.
        num_read = len(self.files) if state["finished"] else state["file"] + (state["place"] > 0)
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
                f"{journal.path}: an unfinished run with other {', '.join(other)}{shown}.",
                rule="a run continues with the settings and the files it began with",
                flags=["--output-prefix", "--restart"],
                fix="give the same command again, or pass --restart to begin anew",
            )
        self.tally = CorpusStats.from_json(state["tally"])
        print(
            f"{self.output}: going on after {self.tally.documents:,} documents, "
            f"{self.tally.tokens:,} tokens.",
            file=sys.stderr,
        )
        return state

    def _finished_record(self, signature: dict[str, Any]) -> dict[str, Any] | None:
        try:
            with open(self.record_path, encoding="utf-8") as file:
                record: dict[str, Any] = json.load(file)
            is_same = record["signature"] == signature and record["bytes"] == self._sizes()
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return record if is_same else None

    def _sizes(self) -> list[int]:
        """Return the bytes of all outputs."""
        names = [
            f"{prefix}{end}" for prefix, _ in self.corpora.values() for end in (".bin", ".idx")
        ]
        return [os.path.getsize(name) for name in names]

    # --- faults -----------------------------------------------------------------------------

    def _bad_document(self, number: int, bad: BadDocument) -> DataError:
        file = self.files[number]
        position = ""
        if file.format is InputFormat.parquet:
            position = f", row {bad.number:,}"
        elif bad.number:
            # The shard may have begun in the middle of the file.
            before = lines_before(file.path, file.first_byte) if file.first_byte else 0
            before += self.tally.lines_of_file if self.tally.file == number else 0
            if file.first_byte and file.first_byte != 0:
                before += _partial_line(file)
            position = f", line {before + bad.number}"
        detail = f" ({bad.detail})" if bad.detail else ""
        return DataError(
            f"{bad.path}{position}: {bad.reason}{detail}.",
            rule="each document is a JSON object in UTF-8 (or a row) that holds text under every "
            "key of --json-keys",
            flags=["--input", "--json-keys", "--skip-bad-lines"],
            fix="mend it, or pass --skip-bad-lines to leave such documents out and count them",
        )


def _partial_line(file: InputFile) -> int:
    """Return 1 if a shard's range begins within a line, which belongs to the shard before."""
    with open(file.path, "rb") as opened:
        opened.seek(file.first_byte - 1)
        return int(opened.read(1) != b"\n")
