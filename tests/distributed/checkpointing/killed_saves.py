"""Stop or fail every call of a save: python -m tests.distributed.checkpointing.killed_saves

Two ranks save: a first, a later, a repeated save, one that retires old checkpoints, and one in the
background. A library below Python (it needs gcc) counts each call of either rank that creates,
writes, syncs, renames, removes or cuts a file. Then, for each of them:

    kill        the calling process dies before the call; the other rank continues by itself
    torn        it dies after half of the bytes, where the call is a write
    full disk   from this call on, nothing can be created or written (ENOSPC)
    bad disk    from this call on, writes and syncs fail (EIO)
    one EIO     this call fails, and no other
    read-only   from this call on, nothing can be changed (EROFS)

After a death two new ranks must find all of the old or all of the new checkpoint, sweep up, and
save. After an error both ranks must raise the same message, which names the error, the path and the
bytes; what was saved before must be whole, and once the disk is well the save must succeed.

`--sample N` takes every N-th call. `--strace` shows that strace, which watches the kernel's door,
counts the same calls. Prints a table; exits 1 if one point fails.
"""

import contextlib
import errno
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from megatron.core.foundation.errors import CheckpointError
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.harness.file_calls import (
    Action,
    Call,
    FileCalls,
    Kind,
    is_loaded,
    run_again_with_calls_counted,
)
from tests.unit.dist_checkpointing.runs import SAVES, load, prepare, save

RANKS = 2
CASES = SAVES | {"a save in the background": ((5,), 10, {"async_save": True})}
STRACED = (
    "write,pwrite64,writev,pwritev,pwritev2,fsync,fdatasync,truncate,ftruncate,fallocate,sendfile,"
    "copy_file_range,rename,renameat,renameat2,link,linkat,symlink,symlinkat,unlink,unlinkat,"
    "mkdir,mkdirat,mknod,mknodat,rmdir,open,openat,creat"
)
"""Every call of Linux that changes a file or a directory; some machines have only part of them."""


@dataclass(frozen=True)
class Trouble:
    """What happens at a call."""

    action: Action
    error: int = 0
    kinds: tuple[Kind, ...] = tuple(Kind)

    @property
    def is_deadly(self) -> bool:
        """Whether a process dies of it."""
        return self.action in (Action.KILL, Action.TEAR)

    def concerns(self, call: Call) -> bool:
        """Whether it is worth a try at this call."""
        return call.kind is Kind.WRITE if self.action is Action.TEAR else call.kind in self.kinds


GROWING = (Kind.CREATE, Kind.WRITE, Kind.MKDIR, Kind.RENAME)
TROUBLES = {
    "kill": Trouble(Action.KILL),
    "torn": Trouble(Action.TEAR),
    "full disk": Trouble(Action.FAIL_FROM, errno.ENOSPC, GROWING),
    "bad disk": Trouble(Action.FAIL_FROM, errno.EIO, (Kind.WRITE, Kind.FSYNC)),
    "one EIO": Trouble(Action.FAIL_ONCE, errno.EIO),
    "read-only": Trouble(Action.FAIL_FROM, errno.EROFS),
}


# Jobs of a rank ------------------------------------------------------------------------------


def save_or_say_why(groups, directory: Path, iteration: int, settings: dict[str, Any]) -> str:
    """Save; return the text of the error, or nothing."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            save(directory, iteration, groups=groups, **settings)
        except CheckpointError as error:
            return str(error)
    return ""


def go_on(groups, directory: Path, iteration: int, settings: dict[str, Any]) -> int | None:
    """Do what a run does that is started again: load, and save. Returns what was loaded."""
    with contextlib.redirect_stdout(io.StringIO()):
        found = load(directory, groups=groups)
        save(directory, iteration, groups=groups, **settings)
    return found


# ---------------------------------------------------------------------------------------------


class Saves:
    """One kind of save, repeated from the same beginning."""

    def __init__(self, calls: FileCalls, root: Path, name: str) -> None:
        self.calls, self.root = calls, root
        self.before, self.iteration, self.settings = CASES[name]
        self.directory = root / "work" / "run"
        with contextlib.redirect_stdout(io.StringIO()):
            prepare(root / "source", self.before)

    def begin_again(self) -> None:
        """Put the directory in the state before the save."""
        shutil.rmtree(self.root / "work", ignore_errors=True)
        shutil.copytree(self.root / "source", self.root / "work")

    def run(self, job: Any) -> list[Any]:
        """Run a job on both ranks."""
        arguments = (self.directory, self.iteration, self.settings)
        return run_distributed(job, RANKS, *arguments, timeout_s=90.0)

    def count(self, action: Action = Action.COUNT) -> list[Call]:
        """Return the calls of an undisturbed save (or of one with short writes)."""
        self.begin_again()
        self.calls.watch(self.root / "work", action)
        said = self.run(save_or_say_why)
        done = self.calls.end()
        assert said == [""] * RANKS, said
        self.check_whole(self.iteration)
        return done

    def check_whole(self, wanted: int | None) -> None:
        """Check that a fresh process finds the checkpoint, and no damage in any."""
        with contextlib.redirect_stdout(io.StringIO()):
            found = load(self.directory)
        assert found == wanted, f"found {found} instead of {wanted}"
        for checkpoint in commit.list_checkpoints(self.directory).checkpoints:
            problems = verify_checkpoint(checkpoint.path).problems
            assert not problems, problems[0]

    def try_at(self, number: int, trouble: Trouble) -> str:
        """Bring trouble at one call; return what came of it: died, raised, or nothing.

        Raises:
            AssertionError: something is lost, or a message lacks a fact.
        """
        self.begin_again()
        self.calls.watch(
            self.root / "work",
            trouble.action,
            at=number,
            error=trouble.error,
            kinds=trouble.kinds,
        )
        said: list[str] = []
        try:
            said = self.run(save_or_say_why)
        except DistributedFailure as failure:
            if not trouble.is_deadly or "killed by signal SIGKILL" not in str(failure):
                raise
        finally:
            done = self.calls.end()
        old = max(self.before, default=None)
        if said:
            self._check_message(said, trouble, done[min(number, len(done) - 1)])
            with contextlib.redirect_stdout(io.StringIO()):
                assert load(self.directory) in (
                    {old, self.iteration} if said[0] else [self.iteration]
                )
        found = self.run(go_on)
        assert found in ([old] * RANKS, [self.iteration] * RANKS), f"ranks found {found}"
        self.check_whole(self.iteration)
        assert commit.read_tracker(self.directory) == self.iteration
        leftovers = commit.list_checkpoints(self.directory).leftovers
        assert not leftovers, f"left behind: {leftovers}"
        if said == [""] * RANKS:
            return "saved"
        return ("died" if not said else "raised") + (", old" if found[0] == old else ", new")

    def _check_message(self, said: list[str], trouble: Trouble, call: Call) -> None:
        assert len(set(said)) == 1, f"the ranks say different things: {said}"
        if not said[0]:
            return
        assert errno.errorcode[trouble.error] in said[0], said[0]
        assert str(self.directory) in said[0], f"no path: {said[0]}"
        is_of_bytes = call.kind is Kind.WRITE and ".lease" not in call.path
        assert not is_of_bytes or re.search(r"\d+ bytes", said[0]), f"no bytes: {said[0]}"


def count_with_strace(log: Path) -> int:
    """Return how many calls under a directory named `work` strace has seen."""
    found = 0
    for line in log.read_text(errors="replace").splitlines():
        call = re.match(r"\d+ +(\w+)\((.*)", line)
        if call is None or "/watched/work" not in line or "/watched/source" in line:
            continue
        found += not call[1].startswith(("open", "creat")) or "O_CREAT" in line
    return found


def compare_with_strace(calls: FileCalls, result: Path) -> int:
    """Do one save for strace to watch; write how many calls the library saw."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "watched"
        root.mkdir()
        saves = Saves(calls, root, "a save that retires old ones")
        # Both renames are seen by strace, and not part of the save.
        os.rename(root / "source", root / "work")
        calls.watch(root / "work")
        saves.run(save_or_say_why)
        result.write_text(str(len(calls.end())))
        os.rename(root / "work", root / "source")
    return 0


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    sample: int = 1
    """Try every N-th call."""
    only: str = ""
    """The saves whose name has this text."""
    directory: str | None = None
    """Where to save; a temporary one."""
    strace: bool = False
    """Compare the count with strace's."""
    count_into: Path | None = flag(None, is_hidden=True)


def check_all(arguments: Flags) -> int:
    """Bring every trouble at every call and print the table."""
    calls, started_at, num_points, failures = FileCalls(), time.monotonic(), 0, []
    for name in CASES:
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            saves = Saves(calls, Path(directory), name)
            counted = saves.count()
            saves.count(Action.SHORT)
            kinds = Counter(call.kind.name.lower() for call in counted)
            facts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            print(f"{name}: {len(counted)} calls ({facts})", flush=True)
            for kind, trouble in TROUBLES.items():
                outcomes, since = Counter[str](), time.monotonic()
                points = [point for point in enumerate(counted) if trouble.concerns(point[1])]
                for number, call in points[:: arguments.sample]:
                    num_points += 1
                    try:
                        outcomes[saves.try_at(number, trouble)] += 1
                    except Exception as error:
                        outcomes["FAILED"] += 1
                        failures.append(f"{name}, {kind} at call {number} ({call}): {error}")
                        print(failures[-1], flush=True)
                shown = ", ".join(f"{what}: {n}" for what, n in sorted(outcomes.items()))
                taken = time.monotonic() - since
                print(
                    f"  {kind:12}{outcomes.total():5} points {taken:5.0f} s   {shown}", flush=True
                )
    print(f"{num_points} points, {len(failures)} failed, {time.monotonic() - started_at:.0f} s")
    return int(bool(failures))


def main() -> int:
    """Run all points."""
    arguments = read_command_line(Flags, description=__doc__)
    module = "tests.distributed.checkpointing.killed_saves"
    if is_loaded():
        if arguments.count_into is not None:
            return compare_with_strace(FileCalls(), arguments.count_into)
        return check_all(arguments)
    if not arguments.strace:
        return run_again_with_calls_counted(module)
    with tempfile.TemporaryDirectory() as name:
        log, result = Path(name) / "strace.log", Path(name) / "count"
        sys.argv[1:] = ["--count-into", str(result)]
        known = ",".join(f"?{name}" for name in STRACED.split(","))
        watch = ["strace", "-f", "-y", "-s", "0", "-o", str(log), "-e", f"trace={known}"]
        status = run_again_with_calls_counted(module, watch)
        ours, theirs = int(result.read_text()), count_with_strace(log)
        print(f"calls of one save: {ours} counted, {theirs} seen by strace")
    return status or int(ours != theirs)


if __name__ == "__main__":
    sys.exit(main())
