"""Run the checks of one stage on a machine with a GPU, within a time limit.

    python3 tools/gpu_session.py A --seconds 190 --out OUT
    python3 tools/gpu_session.py A --seconds 190 --out OUT --rehearse     # on the CPU, tiny sizes
    python3 tools/gpu_session.py D --out OUT --only layouts --cases ZeRO-3 FSDP2   # some again

Stages: A, correct values; D, every layout on NCCL; B, speed; C, profile of the time. This file
imports only the standard library, so that it starts on any machine. Each check has its own
processes and its own limit: a crash or a hang costs that check only. In stages B and C one check
uses the GPU at a time, while the next one imports its modules and waits for its turn. After each
check, OUT/STAGE.json and OUT/STAGE.log.gz are complete. The table is printed last and is short,
because only the end of the output may be visible. The exit status is 0 if every check passed.

A check prints its results as lines `ROW: {json}`. Wheels in `.whl/` (`make gpu-wheels`) are
unpacked first and added to the checks' PYTHONPATH.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gzip
import importlib.metadata
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
STAGE_S = 190
"""Seconds of one stage: the limits of its checks plus `PREPARE_S`."""
PREPARE_S = {"A": 12, "D": 30, "B": 8, "C": 8}
"""Seconds before and between the checks; stage D also installs another NCCL."""
_REHEARSAL_LIMITS = 5
_LEAST_S = 10
"""A check with a longer limit starts if at least this much time remains."""
_PRINTED = 11_000
"""Maximum characters of the table: only the last 12,000 of the output may be visible."""
_LOG_BYTES = 4 << 20
"""Bytes that are read at each end of a log."""
_TOKEN = "LATTICE_GPU_CHECK"
_TURN = "LATTICE_GPU_CHECK_TURN"
"""Environment variable of a check: a file that exists when the check may use the GPU. It contains
the time of the check's end (monotonic, the same clock in all processes)."""
_MEMORY = "PYTORCH_ALLOC_CONF=expandable_segments:True"
_PEERS = "python3 -m benchmarks.gpu.peers"
_PYTEST = "python3 -m pytest -q -p no:cacheprovider -W default"
_ON_DEVICE = f"LATTICE_TEST_KERNELS_ON_DEVICE=1 {_PYTEST}"
_NUMERICS = "$(ls tests/gpu_without_gpu/triton_kernels/numerics*.py)"


@dataclass(frozen=True)
class Check:
    """One check of a stage.

    Attributes:
        command: bash command, run in the repository; `{rehearse}` becomes `--rehearse` or nothing.
        limit_s: seconds until its processes are killed.
        beside: consecutive checks with the same word run at the same time.
        rehearsal: command of a rehearsal, if it differs.
    """

    name: str
    command: str
    limit_s: float
    beside: str = ""
    rehearsal: str = ""


STAGES: dict[str, list[Check]] = {
    "A": [
        Check("machine", "nvidia-smi; nproc; free -g; df -h /tmp /dev/shm; python3 -m"
              " benchmarks.gpu.probes --names machine {rehearse}", 25,
              rehearsal="python3 -m benchmarks.gpu.probes --names machine {rehearse}"),
        Check("probes", "python3 -m benchmarks.gpu.probes {rehearse}", 50),
        Check("first step", "python3 -m benchmarks.gpu.first_step {rehearse}", 80, "right"),
        Check("paths", "python3 -m benchmarks.gpu.paths {rehearse}", 100, "right"),
        Check("tests", f"{_PYTEST} -n 2 tests/gpu", 100, "right",
              rehearsal=f"{_PYTEST} --collect-only tests/gpu"),
        Check("numerics", f"{_ON_DEVICE} -n 8 {_NUMERICS}", 103, "right",
              rehearsal=f"if python3 -c 'import triton'; then {_ON_DEVICE} --collect-only"
              f" {_NUMERICS}; else python3 -m py_compile {_NUMERICS}; fi"),
    ],
    "D": [
        Check("layouts", "python3 -m benchmarks.gpu.layouts {rehearse}", 145),
        Check("rates", "python3 -m benchmarks.gpu.collectives {rehearse}", 14),
    ],
    "B": [
        Check("ours", f"{_MEMORY} python3 -m benchmarks.gpu.speed {{rehearse}}", 36),
        Check("plain", f"{_MEMORY} {_PEERS} plain-compiled {{rehearse}}", 40),
        Check("ours again", f"{_MEMORY} python3 -m benchmarks.gpu.speed", 26, rehearsal="true"),
        Check("hf-liger", f"{_MEMORY} {_PEERS} hf-liger {{rehearse}}", 34),
        Check("megatron-core", f"{_MEMORY} {_PEERS} megatron-core {{rehearse}}", 46),
    ],
    "C": [
        Check("profile", f"{_MEMORY} python3 -m benchmarks.gpu.profile_step {{rehearse}}", 26),
        Check("kernels", "python3 -m benchmarks.gpu.kernels {rehearse}", 45),
        Check("variants", f"{_MEMORY} python3 -m benchmarks.gpu.variants --limit 20", 96,
              rehearsal="python3 -m benchmarks.gpu.variants {rehearse}"),
        Check("ncu", "if command -v ncu; then ncu --clock-control none --set basic -c 6 -k"
              " 'regex:softmax|backward' python3 -m benchmarks.gpu.kernels --once; else echo"
              """ 'ROW: {"not run": "ncu is not here"}'; fi""", 15,
              rehearsal="python3 -m benchmarks.gpu.kernels --once {rehearse}"),
    ],
}  # fmt: skip
"""Every check by stage. B and C measure time: one check at a time uses the GPU."""
STAGES_WITH_TURNS = ("B", "C")
"""Stages whose checks wait for their turn after their imports, which take 14 s on such machines."""
NCCL_STAGES = ("D",)
"""Stages that replace torch's NCCL by `.whl/nccl.xz`: ranks share one GPU."""


def limits_s(checks: Sequence[Check]) -> float:
    """Return the seconds of checks that all run until their limit."""
    return sum(max(each.limit_s for each in group) for group in groups(checks))


def groups(checks: Sequence[Check]) -> Iterator[list[Check]]:
    """Yield groups of checks that run at the same time."""
    for _, members in groupby(enumerate(checks), key=lambda pair: pair[1].beside or pair[0]):
        yield [each for _, each in members]


@dataclass
class Running:
    """A check with running processes.

    Attributes:
        token: the value of `_TOKEN` in the environment of its processes.
        turn: the file of `_TURN`.
        begin: time (monotonic) when its turn began.
        end: time when they are killed.
    """

    check: Check
    token: str
    turn: Path
    child: subprocess.Popen[bytes]
    begin: float = 0.0
    end: float = 0.0


@dataclass
class Session:
    """State of one running stage, and its result files."""

    stage: str
    out: Path
    end: float
    is_rehearsal: bool
    patience: float
    """Factor of the limits."""
    cases: str
    """Flags that choose cases of the checks, or nothing."""
    scratch: Path
    environment: dict[str, str]
    about: dict[str, Any]
    found: list[dict[str, Any]] = field(default_factory=list)
    running: list[Running] = field(default_factory=list)
    waiting: list[Running] = field(default_factory=list)
    """Started checks whose turn has not begun: at most one."""

    def log_of(self, name: str) -> Path:
        """Return the file with the output of a check."""
        return self.scratch / f"{name}.log"

    def note(self, name: str, status: int | str, seconds: float = 0.0, **more: object) -> None:
        """Record a check's result, and write the files."""
        rows, errors = read_log(self.log_of(name))
        result = {"check": name, "status": status, "seconds": round(seconds, 1), "rows": rows}
        self.found.append(result | {"errors": errors if status != 0 else []} | more)
        self.write()

    def write(self) -> None:
        """Write STAGE.json and STAGE.log.gz, each atomically."""
        whole = {"stage": self.stage, "rehearsal": self.is_rehearsal} | self.about
        whole["checks"] = self.found
        partial = self.out / f"{self.stage}.partial"
        partial.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        os.replace(partial, self.out / f"{self.stage}.json")
        with gzip.open(partial, "wb", compresslevel=4) as logs:
            for each in self.found:
                logs.write(f"==== {each['check']}: {each['status']}\n".encode())
                logs.write(ends_of(self.log_of(str(each["check"]))))
        os.replace(partial, self.out / f"{self.stage}.log.gz")

    def start(self, check: Check) -> Running:
        """Start a check's processes in their own process group; they wait for their turn."""
        command = (check.rehearsal if self.is_rehearsal else "") or check.command
        command = command.replace("{rehearse}", "--rehearse" if self.is_rehearsal else "")
        command += self.cases
        token = f"{os.getpid()}-{time.monotonic_ns()}"
        turn = self.scratch / f"{token}.turn"
        with self.log_of(check.name).open("wb") as log:
            child = subprocess.Popen(
                ["bash", "-c", command], cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=_die_with_parent,
                env=self.environment | {_TOKEN: token, _TURN: str(turn)},
            )  # fmt: skip
        return Running(check, token, turn, child)

    def begin_turn(self, each: Running) -> None:
        """Let a started check use the GPU, from now until its limit."""
        each.begin = time.monotonic()
        each.end = min(each.begin + each.check.limit_s * self.patience, self.end)
        partial = each.turn.with_suffix(".partial")
        partial.write_text(str(each.end), encoding="ascii")
        os.replace(partial, each.turn)
        self.running.append(each)

    def run_group(self, checks: Sequence[Check], following: Check | None = None) -> None:
        """Run checks at the same time, and record each result when its check ends.

        Args:
            following: the next check, which starts now and waits for its turn.
        """
        waiting = {each.check.name: each for each in self.waiting}
        self.waiting = []
        for check in checks:
            left, started = self.end - time.monotonic(), waiting.get(check.name)
            if left < min(check.limit_s, _LEAST_S):
                if started is not None:
                    kill_all(started)
                self.note(check.name, "no time")
                continue
            try:
                self.begin_turn(started or self.start(check))
            except OSError as error:
                self.note(check.name, f"not started: {error}")
        if following is not None:
            with suppress(OSError):  # it is started again at its turn
                self.waiting = [self.start(following)]
        while self.running:
            for each in list(self.running):
                status = each.child.poll()
                if status is None and time.monotonic() < each.end:
                    continue
                self.running.remove(each)
                self.close(each, "time out" if status is None else status)
            time.sleep(0.05)

    def close(self, each: Running, status: int | str) -> None:
        """Kill the remaining processes of a check, and record its result."""
        left = kill_all(each)
        more = {"processes left over": left} if left else {}
        self.note(each.check.name, status, time.monotonic() - each.begin, **more)

    def stop(self, signal_number: int, _frame: object) -> None:
        """Kill the running checks and exit, when this process receives a signal."""
        for each in self.waiting:
            kill_all(each)
        for each in self.running:
            self.close(each, f"runner ended by signal {signal_number}")
        print_table(self)
        os._exit(128 + signal_number)


def _die_with_parent() -> None:
    """Make the kernel kill this child when the runner is killed (prctl PR_SET_PDEATHSIG)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def kill_all(each: Running, wait_s: float = 5.0) -> int:
    """Kill a check's processes, wait for their end, and return the number of leftover processes.

    Launchers start workers in sessions of their own, so processes are found by an environment
    variable that they inherit. Device memory is freed when its process ends.
    """
    end = time.monotonic() + wait_s
    seen: set[int] = set()
    while True:
        found = [pid for pid in processes_with(each.token) if pid != each.child.pid]
        seen.update(found)
        with suppress(OSError):
            os.killpg(each.child.pid, signal.SIGKILL)
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        each.child.poll()
        if (not found and each.child.returncode is not None) or time.monotonic() > end:
            return len(seen)
        time.sleep(0.02)


def processes_with(token: str) -> list[int]:
    """Return the processes that were started with a token, except dead ones."""
    wanted = f"{_TOKEN}={token}".encode()
    found = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if wanted in file.read_bytes().split(b"\0"):
                found.append(int(file.parent.name))
    return found


def ends_of(log: Path) -> bytes:
    """Return a log; if it is very long, without its middle."""
    if not log.exists():
        return b""
    with log.open("rb") as file:
        head, left_out = file.read(_LOG_BYTES), log.stat().st_size - 2 * _LOG_BYTES
        file.seek(max(left_out, 0), os.SEEK_CUR)
        return head + b"\n... cut ...\n" * (left_out > 0) + file.read()


_ERRORS = re.compile(
    r"\w*(Error|Exception|Interrupt)\b.*:|CUDA error|NCCL WARN|FAILED |ERROR |Segmentation|Killed"
    r"|core dumped|not found|No such file|Fatal|terminate called|out of memory|^E  "
)


def read_log(log: Path) -> tuple[list[object], list[str]]:
    """Return the rows of a log, and its first error lines and last lines."""
    lines = ends_of(log).decode("utf-8", errors="replace").splitlines()
    rows: list[object] = []
    for line in lines:
        if line.startswith("ROW: "):
            try:
                rows.append(json.loads(line[5:], parse_constant=str))
            except (ValueError, RecursionError):
                rows.append({"malformed": line[5:205]})
    others = [line[:240] for line in lines if line.strip() and not line.startswith("ROW: ")]
    errors = [line for line in others if _ERRORS.search(line)][:6]
    return rows, errors + [line for line in others[-3:] if line not in errors]


def output_of(*command: str, limit_s: float = 5.0) -> str | None:
    """Return the output of a command; None if it fails or exceeds the limit."""
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True,
                              timeout=limit_s, check=True).stdout.strip()  # fmt: skip
    return None


def commit() -> str | None:
    """Return the commit of these files.

    A machine may have the files of a newer commit than its git knows; `make gpu-wheels` writes the
    newer commit to `.whl/commit`.
    """
    known, carried = output_of("git", "rev-parse", "HEAD"), output_of("cat", ".whl/commit")
    return carried if carried and output_of("git", "status", "--porcelain") != "" else known


def gpus() -> list[dict[str, str]]:
    """Return cards, driver, clocks, power and memory in use, with nvidia-smi's names."""
    asks = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,"
    asks += "temperature.gpu,memory.used,memory.total,compute_mode,mig.mode.current"
    text = output_of("nvidia-smi", f"--query-gpu={asks}", "--format=csv,noheader")
    lines = text.splitlines() if text else []
    return [dict(zip(asks.split(","), line.split(", "), strict=False)) for line in lines]


def about_machine() -> dict[str, Any]:
    """Return the versions and hardware that results depend on, without importing torch."""

    def version(package: str) -> str | None:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
        return None

    packages = ("torch", "triton", "numpy", "transformers", "nvidia-nccl-cu13", "nvidia-cudnn-cu13")
    return {
        "began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(), "gpus": gpus(), "cpus": os.cpu_count(),
        "python": sys.version.split()[0], **{name: version(name) for name in packages},
    }  # fmt: skip


def unpack_wheels(wheels: Path, into: Path) -> dict[str, str]:
    """Unpack `wheels/*.whl` as pip would; return the variables that add them to checks.

    A package with our name (megatron-core) gets its own folder, LATTICE_PEER_SITE: the checks that
    compare with it put that folder first on their path.
    """
    folders = {"PYTHONPATH": into / "site", "LATTICE_PEER_SITE": into / "peer"}
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            is_peer = any(name.startswith("megatron/") for name in archive.namelist())
            archive.extractall(folders["LATTICE_PEER_SITE" if is_peer else "PYTHONPATH"])
    return {name: str(folder) for name, folder in folders.items() if folder.exists()}


def choose_nccl(*, shared: bool) -> str:
    """Make torch load `.whl/nccl.xz` or its own NCCL; return a description of the result."""
    tool = (sys.executable, "tools/slim_cuda_library.py")
    found = output_of(*tool, "--put", ".whl/nccl.xz", limit_s=60) if shared else None
    return found or f"{output_of(*tool, '--back', limit_s=20)}"


def print_table(session: Session) -> None:
    """Print each check, the first errors of failed checks, then as many rows as fit."""
    name = session.about["gpus"][0]["name"] if session.about["gpus"] else "no GPU"
    text = f"stage {session.stage}, {name}"
    text += ": REHEARSAL, figures mean nothing" * session.is_rehearsal
    num_failed = sum(each["status"] != 0 for each in session.found)
    for each in session.found:
        text += f"\n{each['check']:16s} {each['status']!s:>10s} {each['seconds']:7} s"
        text += f" {len(each['rows']):4d} rows"
        if each["errors"]:
            text += "\n" + "\n".join(f"    {x}" for x in each["errors"])[: 4000 // num_failed]
    with_rows = [each for each in session.found if each["rows"]]
    budget = max(_PRINTED - len(text) - 60 * len(with_rows), 0) // max(len(with_rows), 1)
    for each in with_rows:
        rows = "\n".join(json.dumps(row, separators=(",", ":")) for row in each["rows"])
        cut = f"\n... {len(rows) - budget} characters more" * (len(rows) > budget)
        text += f"\n-- {each['check']}\n{rows[:budget]}{cut}"
    print(text[:_PRINTED], flush=True)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    shown = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("gpu_session.py", description=__doc__, formatter_class=shown)
    parser.add_argument("stage", choices=[*STAGES])
    parser.add_argument("--seconds", type=float, default=STAGE_S, help="default %(default)s")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--only", action="append", default=[], help="name of a check; repeatable")
    parser.add_argument("--cases", nargs="+", default=[], help="cases of the checks of --only")
    found = parser.parse_args(argv)
    if found.cases and not found.only:
        parser.error("--cases needs --only")
    unknown = {*found.only} - {each.name for each in STAGES[found.stage]}
    if unknown:
        parser.error(f"stage {found.stage} has no check {sorted(unknown)}")
    return found


def environment(out: Path, scratch: Path, wheels: dict[str, str], *, rehearse: bool) -> dict:
    """Return the environment of the checks; `python3` is the Python of this process."""
    found = {k: v for k, v in os.environ.items() if k != "LATTICE_DEVICE"} | wheels
    paths = [str(REPOSITORY), wheels.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    found |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}",
        "PYTHONPATH": ":".join(path for path in paths if path),
        "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OUT": str(out.resolve()),
        "TRITON_CACHE_DIR": str(scratch.parent / "lattice-gpu-session-triton"),
    }  # fmt: skip
    return found | ({"LATTICE_DEVICE": "cpu"} if rehearse else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage."""
    flags = options(argv)
    end = time.monotonic() + flags.seconds
    flags.out.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="lattice-gpu-session-"))
    uses_nccl = not flags.rehearse and (REPOSITORY / ".whl" / "nccl.xz").exists()
    if uses_nccl:
        choose_nccl(shared=False)  # from a stage that was killed
    about = about_machine()
    try:
        wheels = unpack_wheels(REPOSITORY / ".whl", scratch)
    except (OSError, zipfile.BadZipFile) as error:
        wheels, about["wheels"] = {}, f"{type(error).__name__}: {error}"
    if uses_nccl and flags.stage in NCCL_STAGES:
        about["shared NCCL"] = choose_nccl(shared=True)
    # Figures of a rehearsal are meaningless, and its machine is busy with other work.
    patience = _REHEARSAL_LIMITS if flags.rehearse else max(1.0, flags.seconds / STAGE_S)
    cases = f" --only {shlex.join(flags.cases)}" if flags.cases else ""
    session = Session(flags.stage, flags.out, end, flags.rehearse, patience, cases, scratch,
                      environment(flags.out, scratch, wheels, rehearse=flags.rehearse),
                      about)  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, session.stop)
    chosen = [each for each in STAGES[flags.stage] if not flags.only or each.name in flags.only]
    has_turns = flags.stage in STAGES_WITH_TURNS
    following = [*chosen[1:], None] if has_turns else [None] * len(chosen)
    for group in groups(chosen):
        session.run_group(group, following[chosen.index(group[-1])])
    about["gpus at the end"] = gpus()
    session.write()
    if uses_nccl:
        choose_nccl(shared=False)
    print_table(session)
    shutil.rmtree(scratch, ignore_errors=True)
    return 0 if all(each["status"] == 0 for each in session.found) else 1


if __name__ == "__main__":
    sys.exit(main())
