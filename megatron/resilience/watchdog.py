"""The watchdog process of a machine: it detects ranks that are stuck, and ends the job.

    python -m megatron.resilience.watchdog < settings.json

It needs neither the threads nor the locks of a rank: it reads the flight recorder of each rank from
shared memory, the state of the process from /proc, and the Python stacks that `faulthandler` writes
when it receives a signal. It ends with the last rank of the machine. It imports no torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from megatron.core.foundation.failure_file import write_failure
from megatron.core.foundation.flight_recorder import Field
from megatron.core.foundation.process_identity import ProcessIdentity, stat_of
from megatron.core.foundation.processes import STOP_SIGNALS
from megatron.resilience.diagnosis import Diagnosis, RankView, StuckRanks
from megatron.resilience.recorder_reader import RecorderReader

POLL_S = 0.25
LOOK_S = 5.0
"""Interval of comparisons while all ranks continue."""
END_S = 2.0
"""How long ranks may take to end before they are killed."""
STACK_S, STACK_POLL_S = 2.0, 0.005
"""Timeout for the stacks of ranks, and the interval between readings of their files."""
EXIT_CODES = {"HANG": 20, "DEADLOCK": 21, "COLLECTIVE_MISMATCH": 22, "PEER_LOST": 17}
_LAST_LINES = (b" in <module>\n", b" in _run_module_as_main\n", b"  ...\n")

_progress = itemgetter(
    Field.NUM_RECORDS, Field.WAITS_IN, Field.INSTRUCTION, Field.ITERATION, Field.BLOCKED_ON,
    Field.NUM_STEPS, Field.IS_TRAINING,
)  # fmt: skip
"""The fields that show the progress of the training thread: each of its actions changes one."""


@dataclass(frozen=True)
class Settings:
    """The settings that the first rank of the machine writes to standard input."""

    ranks: Sequence[Mapping[str, Any]]
    """The ranks of this machine (`heartbeat.start_heartbeat`): `rank`; `identity`, a packed
    `ProcessIdentity` in hexadecimal; descriptors of the flight `recorder` and of the file for
    `stacks`; `attempt`, the number of the set of process groups."""
    timeout_s: float
    num_ranks: int
    """Number of ranks of the job."""
    stack_signal: int
    restarts: bool
    """Whether the job continues without a stuck rank; then only the stuck rank is ended."""
    instructions: Mapping[int, str]
    save_directory: str | None
    hosts: Mapping[int, str]
    """Global rank -> host name."""

    @staticmethod
    def read(text: str) -> Settings:
        """Return the settings of a JSON text."""
        given = json.loads(text)
        names = {int(number): name for number, name in given.pop("instructions").items()}
        size, hosts = given.pop("ranks_of_machine"), given.pop("hosts")
        hosts = {int(r) + i: host for r, host in hosts.items() for i in range(size)}
        return Settings(instructions=names, hosts=hosts, **given)


class _Rank:
    """A rank, and the times of its last changes, by the clock of `Watchdog`."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        identity = ProcessIdentity.unpack(bytes.fromhex(given["identity"]))
        self.rank, self.process, self.start = given["rank"], identity.number, identity.start
        self.stacks = os.open(f"/proc/{self.process}/fd/{given['stacks']}", os.O_RDONLY)
        self.recorder = RecorderReader(self.process, given["recorder"])
        self.attempt = given["attempt"]
        self.fields: tuple[int, ...] = ()
        self.letter = "S"
        self.moved_at = self.beaten_at = self.ran_at = self.longest_s = 0.0
        self.has_ended = False
        self._stack_begins = 0

    def look(self, now: float) -> None:
        """Read the rank's fields and process state, and record the time of each change."""
        fields = self.recorder.fields()
        has_beaten = not self.fields or fields[Field.BEATS] != self.fields[Field.BEATS]
        letter = "S" if has_beaten else self._state()
        if letter is None:
            self.has_ended, self.fields = True, fields
            return
        self.letter = letter
        if has_beaten:
            self.beaten_at = now
        if not self.fields or _progress(fields) != _progress(self.fields):
            if fields[Field.IS_TRAINING] and fields[Field.NUM_STEPS]:
                self.longest_s = max(self.longest_s, now - self.moved_at)
            self.moved_at = now
        if letter not in "Tt":
            self.ran_at = now
        self.fields = fields

    def _state(self) -> str | None:
        """Return the letter of the process' state; None if it has ended."""
        try:
            stat = stat_of(self.process)
        except OSError:
            return None
        return None if stat.start != self.start or stat.has_ended else stat.letter

    def view(self, now: float) -> RankView:
        """Return the state of the rank with its whole flight record."""
        return RankView(
            self.rank,
            self.recorder.snapshot(),
            "X" if self.has_ended else self.letter,
            now - self.moved_at,
            now - self.beaten_at,
            now - self.ran_at,
            self.longest_s,
        )

    def send(self, number: int) -> None:
        """Send a signal, if the process still exists."""
        with contextlib.suppress(OSError):
            os.kill(self.process, number)

    def ask_stacks(self, number: int) -> None:
        """Make `faulthandler` write the Python stacks; a stopped process is continued for this."""
        self._stack_begins = os.fstat(self.stacks).st_size
        try:
            # To the main thread, so that its stack is written last: see `has_written_stacks`.
            ctypes.CDLL(None).tgkill(self.process, self.process, number)
        except AttributeError:  # the C library is older than the call
            self.send(number)
        if self.letter == "T":
            self.send(signal.SIGCONT)

    def written_stacks(self) -> bytes:
        """Return the stacks that `faulthandler` has written since `ask_stacks`."""
        size = os.fstat(self.stacks).st_size - self._stack_begins
        return os.pread(self.stacks, size, self._stack_begins)

    def has_written_stacks(self) -> bool:
        """Return whether the stacks are complete; the main thread's stack is written last."""
        text = self.written_stacks()
        return b"Current thread" in text and text.endswith(_LAST_LINES)


class Watchdog:
    """Watch the ranks of this machine until they have ended, or end them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ranks = [_Rank(rank) for rank in settings.ranks]
        self._now = 0.0  # running time of this process in seconds, without the machine's sleep
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
            if any(r.fields and r.fields[Field.ATTEMPT] != r.attempt for r in self._ranks):
                return
            open_ranks = [rank for rank in self._ranks if not rank.fields[Field.CLOSED]]
            living = [rank for rank in open_ranks if not rank.has_ended]
            if not living:
                return
            if not self._is_time_to_compare(living):
                continue
            found = self._diagnose(open_ranks)
            if found is not None and found.ends_job:
                self._end(found, open_ranks)
                return
            for rank in living:
                if rank.fields[Field.ASKS]:
                    rank.recorder.set_field(Field.ANSWERED, 1)
            if found is not None and found.ranks != self._warned:
                self._warned = found.ranks
                _print(f"WARNING: {'; '.join((found.text, *found.waiting))}")

    def _is_time_to_compare(self, living: list[_Rank]) -> bool:
        if any(r.fields[Field.ASKS] and not r.fields[Field.ANSWERED] for r in living):
            return True
        quiet = max(self._now - min(r.moved_at, r.beaten_at, r.ran_at) for r in living)
        if quiet >= self._settings.timeout_s or self._now - self._looked_at >= LOOK_S:
            self._looked_at = self._now
            return True
        return False

    def _diagnose(self, ranks: list[_Rank]) -> StuckRanks | None:
        """Return the stuck ranks if two looks agree, because a record may be read while written."""
        found = self._look(ranks).find()
        if found is not None and found.ends_job:
            time.sleep(POLL_S / 2)
            again = self._look(ranks).find()
            if again is None or (again.kind, again.ranks) != (found.kind, found.ranks):
                return None
        return found

    def _look(self, ranks: list[_Rank]) -> Diagnosis:
        settings = self._settings
        return Diagnosis(
            views={rank.rank: rank.view(self._now) for rank in ranks},
            timeout_s=settings.timeout_s,
            instructions=settings.instructions,
            sees_all=len(ranks) == settings.num_ranks,
            restarts=settings.restarts,
            hosts=settings.hosts,
        )

    def _end(self, found: StuckRanks, open_ranks: list[_Rank]) -> None:
        """Report the cause and end the ranks of this machine."""
        record = self._record(found, open_ranks)
        living = [rank for rank in open_ranks if not rank.has_ended]
        record["stacks"] = stacks = self._stacks(found, living)
        stuck = [rank for rank in living if rank.rank in found.ranks and found.kind == "HANG"]
        restarts = self._settings.restarts and bool(stuck)
        line = self._line(found, record)
        if not restarts:
            # At least one rank gets the verdict, to inform the launcher and the other machines.
            told = [rank for rank in living if rank not in stuck] or stuck
            for rank in told:
                rank.recorder.give_verdict(EXIT_CODES[found.kind], line)
                if rank.letter == "T":
                    rank.send(signal.SIGCONT)
        shown = "".join(f"\nrank {rank}:\n{stack}" for rank, stack in stacks.items())
        _print(f"{shown}\n{line.replace('FATAL', 'RESTART', 1) if restarts else line}")
        if restarts:
            for rank in stuck:
                rank.send(signal.SIGKILL)
            return
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

    def _record(self, found: StuckRanks, ranks: list[_Rank]) -> dict[str, Any]:
        look, first, directory = self._look(ranks), found.ranks[0], self._settings.save_directory
        fields = {rank: view.snapshot.fields for rank, view in look.views.items()}
        checkpoint = max(each[Field.CHECKPOINT] for each in fields.values())
        can_resume = checkpoint and directory is not None
        return {
            "class": found.kind,
            "exit_code": EXIT_CODES[found.kind],
            "iteration": fields[first][Field.ITERATION],
            "rank": first,
            "ranks": list(found.ranks),
            "host": socket.gethostname(),
            "where": look.describe(first),
            "last_good_ckpt": checkpoint - 1 if checkpoint else None,
            "action": f"resume with --load {directory}" if can_resume else "start again",
            "message": found.text,
            "waiting": list(found.waiting),
            "places": {rank: look.describe(rank) for rank in look.views},
            "kernel": {r.rank: kernel_state(r.process) for r in ranks if r.rank in found.ranks},
            "time": time.time(),
        }

    def _line(self, found: StuckRanks, record: Mapping[str, Any]) -> str:
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

    def _stacks(self, found: StuckRanks, living: list[_Rank]) -> dict[int, str]:
        """Return Python stacks of the ranks that are the cause, and of one waiting rank.

        A stopped process is continued to write its stacks, and then stopped again.
        """
        cause = [rank for rank in living if rank.rank in found.ranks]
        asked = cause + [rank for rank in living if rank.rank not in found.ranks][:1]
        for rank in asked:
            rank.ask_stacks(self._settings.stack_signal)
        waiting, deadline = list(asked), time.monotonic() + STACK_S
        while waiting:
            time.sleep(STACK_POLL_S)
            for rank in list(waiting):
                if rank.has_written_stacks() or time.monotonic() > deadline:
                    waiting.remove(rank)
                    if rank.letter == "T":
                        rank.send(signal.SIGSTOP)
        return {r.rank: r.written_stacks().decode(errors="replace").strip() for r in asked}


def kernel_state(process: int) -> dict[str, str]:
    """Return the state of each thread of a process, and the kernel function that blocks it."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in sorted(Path(f"/proc/{process}/task").iterdir(), key=lambda p: int(p.name)):
            with contextlib.suppress(OSError):
                where = (thread / "wchan").read_text().strip()
                found[thread.name] = f"{stat_of(f'{process}/task/{thread.name}').letter} {where}"
    return found


def _print(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def main() -> None:
    """Watch the ranks that standard input names."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    settings = Settings.read(sys.stdin.read())
    with contextlib.suppress(OSError):  # a rank has ended, or its memory may not be read
        Watchdog(settings).run()


if __name__ == "__main__":
    main()
