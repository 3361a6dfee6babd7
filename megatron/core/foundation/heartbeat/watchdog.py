"""A process beside the ranks of a machine that sees when they do not go on, and ends the job.

    python -m megatron.core.foundation.heartbeat.watchdog < settings.json

It outlives a rank that is stopped and needs no lock of it: it reads the rank's notes from shared
memory, the state of its process from /proc, and its Python stack from what `faulthandler` writes
at a signal. It ends with the last of the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from megatron.core.foundation.failure_file import write_failure
from megatron.core.foundation.heartbeat.diagnosis import Finding, RankView, describe_place, diagnose
from megatron.core.foundation.heartbeat.layout import MESSAGE_BYTES, MESSAGE_OFFSET, Word
from megatron.core.foundation.heartbeat.reading import Heartbeat
from megatron.core.foundation.heartbeat.stacks import StackRequest, kernel_state, python_stacks
from megatron.core.foundation.process_identity import ProcessIdentity, stat_of
from megatron.core.foundation.processes import STOP_SIGNALS

POLL_S = 0.25
LOOK_S = 5.0
"""How often the operations of the ranks are compared while all goes on."""
END_S = 2.0
"""How long to wait for ranks to end by themselves."""
EXIT_CODES = {"HANG": 20, "DEADLOCK": 21, "COLLECTIVE_MISMATCH": 22}


@dataclass(frozen=True)
class WatchedRank:
    """What a rank tells of itself; see `megatron/training/resilience/hangs.py`."""

    rank: int
    identity: str
    """A packed `ProcessIdentity`, in hexadecimal."""
    heartbeat: int
    """Descriptor of its notes."""
    stacks: int
    """Descriptor of the file that `faulthandler` writes."""
    generation: int = 0
    """Of its process groups: when it counts on, this watchdog has done."""


@dataclass(frozen=True)
class Settings:
    """What the first rank of the machine asks for."""

    ranks: tuple[WatchedRank, ...]
    timeout_s: float
    num_ranks: int
    """Of the job."""
    stack_signal: int
    restarts: bool
    """Whether the ranks go on without one that is stuck: then it alone is ended."""
    instructions: Mapping[int, str]
    save_directory: str | None
    hosts: Mapping[int, str]
    """Global rank -> host name."""

    @staticmethod
    def read(text: str) -> Settings:
        """Return the settings that a JSON text says."""
        said = json.loads(text)
        ranks = tuple(WatchedRank(**rank) for rank in said.pop("ranks"))
        names = {int(number): name for number, name in said.pop("instructions").items()}
        size, hosts = said.pop("ranks_of_machine"), said.pop("hosts")
        hosts = {int(r) + i: host for r, host in hosts.items() for i in range(size)}
        return Settings(ranks=ranks, instructions=names, hosts=hosts, **said)


@dataclass
class _Watched:
    """A rank, and since when something about it has not changed, in seconds of `Watchdog`."""

    rank: int
    process: int
    start: int
    memory: Heartbeat
    stacks: int
    generation: int
    words: tuple[int, ...] = ()
    letter: str = "S"
    moved_at: float = 0.0
    beaten_at: float = 0.0
    ran_at: float = 0.0
    longest_s: float = 0.0
    has_ended: bool = False

    @staticmethod
    def open(said: WatchedRank) -> _Watched:
        identity = ProcessIdentity.unpack(bytes.fromhex(said.identity))
        stacks = os.open(f"/proc/{identity.number}/fd/{said.stacks}", os.O_RDONLY)
        memory = Heartbeat(identity.number, said.heartbeat)
        process = identity.number
        return _Watched(said.rank, process, identity.start, memory, stacks, said.generation)

    def look(self, now: float) -> None:
        """Note what has changed."""
        words = self.memory.words()
        has_beaten = not self.words or words[Word.BEATS] != self.words[Word.BEATS]
        letter = "S" if has_beaten else self._state()
        if letter is None:
            self.has_ended, self.words = True, words
            return
        self.letter = letter
        if has_beaten:
            self.beaten_at = now
        if not self.words or _progress(words) != _progress(self.words):
            if words[Word.IS_TRAINING] and words[Word.NUM_STEPS]:
                self.longest_s = max(self.longest_s, now - self.moved_at)
            self.moved_at = now
        if self.letter not in "Tt":
            self.ran_at = now
        self.words = words

    def _state(self) -> str | None:
        """Return the letter of the process' state; None if it has ended."""
        try:
            stat = stat_of(self.process)
        except OSError:
            return None
        return None if stat.start != self.start or stat.has_ended else stat.letter

    def view(self, now: float) -> RankView:
        """Return what is seen of it, all notes included."""
        return RankView(
            self.rank,
            self.memory.notes(),
            "X" if self.has_ended else self.letter,
            now - self.moved_at,
            now - self.beaten_at,
            now - self.ran_at,
            self.longest_s,
        )

    def tell(self, code: int, line: str) -> None:
        """Let it end with an exit code, and say why."""
        text = line.encode()[: MESSAGE_BYTES - 1]
        self.memory.write_text(MESSAGE_OFFSET, text.ljust(MESSAGE_BYTES, b"\0"))
        self.memory.write(Word.VERDICT, code)

    def send(self, number: int) -> None:
        """Send a signal, if it is there to take it."""
        with contextlib.suppress(OSError):
            os.kill(self.process, number)


_progress = itemgetter(
    Word.NUM_RECORDS, Word.WAITS_IN, Word.INSTRUCTION, Word.ITERATION, Word.BLOCKED_ON,
    Word.NUM_STEPS, Word.IS_TRAINING,
)  # fmt: skip
"""Of the words those of which one changes whenever the training thread goes on."""


class Watchdog:
    """Watches until the ranks of this machine have ended, or ends them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ranks = [_Watched.open(rank) for rank in settings.ranks]
        self._now = 0.0  # seconds in which this process ran: a machine that slept does not count
        self._warned: tuple[int, ...] = ()
        self._looked_at = 0.0

    def run(self) -> None:
        """Watch."""
        last = time.monotonic()
        while True:
            time.sleep(POLL_S)
            self._now += min(time.monotonic() - last, 4 * POLL_S)
            last = time.monotonic()
            for rank in self._ranks:
                rank.look(self._now)
            if any(r.words and r.words[Word.GENERATION] != r.generation for r in self._ranks):
                return
            open_ranks = [rank for rank in self._ranks if not rank.words[Word.CLOSED]]
            living = [rank for rank in open_ranks if not rank.has_ended]
            if not living:
                return
            if self._is_time_to_compare(living):
                found = self._diagnose(open_ranks)
                if found is not None and found.ends_job:
                    self._end(found, open_ranks)
                    return
                self._answer(living)
                if found is not None:
                    self._warn(found)

    def _answer(self, living: list[_Watched]) -> None:
        """Tell those that ask that the ranks were in the same operations."""
        for rank in living:
            if rank.words[Word.ASKS]:
                rank.memory.write(Word.ANSWERED, 1)

    def _is_time_to_compare(self, living: list[_Watched]) -> bool:
        if any(r.words[Word.ASKS] and not r.words[Word.ANSWERED] for r in living):
            return True
        quiet = max(self._now - min(r.moved_at, r.beaten_at, r.ran_at) for r in living)
        if quiet >= self._settings.timeout_s or self._now - self._looked_at >= LOOK_S:
            self._looked_at = self._now
            return True
        return False

    def _diagnose(self, ranks: list[_Watched]) -> Finding | None:
        """Return what two looks agree on: a note may be seen while it is written."""
        found = self._look(ranks)
        if found is not None and found.ends_job:
            time.sleep(POLL_S / 2)
            again = self._look(ranks)
            if again is None or (again.kind, again.ranks) != (found.kind, found.ranks):
                return None
        return found

    def _look(self, ranks: list[_Watched]) -> Finding | None:
        settings = self._settings
        views = [rank.view(self._now) for rank in ranks]
        sees_all = len(views) == settings.num_ranks
        return diagnose(
            views,
            settings.timeout_s,
            settings.instructions,
            sees_all=sees_all,
            hosts=settings.hosts,
        )

    def _warn(self, found: Finding) -> None:
        """Say once who is late."""
        if found.ranks != self._warned:
            self._warned = found.ranks
            _print(f"WARNING: {'; '.join((found.text, *found.waiting))}")

    # The end --------------------------------------------------------------------------------

    def _end(self, found: Finding, open_ranks: list[_Watched]) -> None:
        """Say what was found and end the ranks of this machine."""
        record = self._record(found, open_ranks)
        line = self._line(found, record)
        living = [rank for rank in open_ranks if not rank.has_ended]
        record["stacks"] = stacks = self._stacks(found, living)
        stuck = [rank for rank in living if rank.rank in found.ranks and found.kind == "HANG"]
        if self._settings.restarts and stuck:
            shown = "".join(f"\nrank {rank}:\n{stack}" for rank, stack in stacks.items())
            _print(f"{shown}\n{line.replace('FATAL', 'RESTART', 1)}")
            for rank in stuck:
                rank.send(signal.SIGKILL)
            return
        # One rank must be told: it tells the launcher and the ranks of other machines.
        told = [rank for rank in living if rank not in stuck] or stuck
        for rank in told:
            rank.tell(EXIT_CODES[found.kind], line)
            if rank.letter == "T":
                rank.send(signal.SIGCONT)
        shown = "".join(f"\nrank {rank}:\n{stack}" for rank, stack in stacks.items())
        _print(f"{shown}\n{line}")
        if self._settings.save_directory is not None:
            with contextlib.suppress(OSError):
                write_failure(record, self._settings.save_directory)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and not all(rank.has_ended for rank in told):
            time.sleep(0.05)
            for rank in told:
                rank.look(self._now)
        for rank in living:
            rank.send(signal.SIGKILL)

    def _record(self, found: Finding, ranks: list[_Watched]) -> dict[str, Any]:
        views = {rank.rank: rank.view(self._now) for rank in ranks}
        first = views[found.ranks[0]].notes
        checkpoint = max(view.notes.word(Word.CHECKPOINT) for view in views.values())
        return {
            "class": found.kind,
            "exit_code": EXIT_CODES[found.kind],
            "iteration": first.word(Word.ITERATION),
            "rank": found.ranks[0],
            "ranks": list(found.ranks),
            "host": socket.gethostname(),
            "where": describe_place(views[found.ranks[0]], self._settings.instructions),
            "last_good_ckpt": checkpoint - 1 if checkpoint else None,
            "action": self._action(checkpoint),
            "message": found.text,
            "waiting": list(found.waiting),
            "places": {r: describe_place(v, self._settings.instructions) for r, v in views.items()},
            "kernel": {r.rank: kernel_state(r.process) for r in ranks if r.rank in found.ranks},
            "time": time.time(),
        }

    def _action(self, checkpoint: int) -> str:
        if checkpoint and self._settings.save_directory is not None:
            return f"resume with --load {self._settings.save_directory}"
        return "start again"

    def _line(self, found: Finding, record: Mapping[str, Any]) -> str:
        last = record["last_good_ckpt"]
        fields = {
            "iter": record["iteration"],
            "rank": ",".join(map(str, found.ranks)),
            "host": record["host"],
            "where": found.text,
            "waiting": "; ".join(found.waiting) or "nobody",
            "last_good_ckpt": "none" if last is None else last,
            "action": record["action"],
        }
        return f"FATAL[{found.kind}] " + " ".join(f"{key}={value}" for key, value in fields.items())

    def _stacks(self, found: Finding, living: list[_Watched]) -> dict[int, str]:
        """Return Python stacks of those who are the cause, and of one that waits.

        A stopped process writes its own as soon as it continues, and is stopped again.
        """
        cause = [rank for rank in living if rank.rank in found.ranks]
        asked = cause + [rank for rank in living if rank.rank not in found.ranks][:1]
        requests = [StackRequest(r.process, r.stacks, r.letter == "T") for r in asked]
        stacks = python_stacks(requests, self._settings.stack_signal)
        return {rank.rank: stack for rank, stack in zip(asked, stacks, strict=True)}


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def main() -> None:
    """Watch as standard input says."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    settings = Settings.read(sys.stdin.read())
    with contextlib.suppress(OSError):  # ranks that have ended, or that this one may not look into
        Watchdog(settings).run()


if __name__ == "__main__":
    main()
