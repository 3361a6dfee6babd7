"""A stand-in for SLURM on one machine: sbatch, srun, scontrol, squeue and scancel.

    scheduler = Slurm(tmp_path, nodes=["127.0.0.1", "127.0.0.2"])
    with scheduler.running():
        ...                                   # PATH begins with scheduler.bin
        scheduler.end_of_time_comes(job)      # --signal, then the limit
        scheduler.wait(job)

It does what the manual pages say, and SLURM 22.05.8 did, of the options below, and refuses all
others, so that a script cannot pass by an option that nobody looked at. Nodes are names; all of
them are this machine. Time does not pass by itself: a test says when the end of an allocation is
near.

* `sbatch` reads the options of a script, gives a job its number and queues it.
* A job runs in a session of its own, in the directory of sbatch, its output appended to --output.
* --signal=B:SIG@N goes to the batch shell alone; without B to the tasks of steps, not the shell.
* A preemption sends SIGTERM to the tasks and the shell; after the grace time what is left is killed
  and the job queued again.
* `scontrol requeue` ends the job and queues it again, with SLURM_RESTART_COUNT one higher.
* `scancel --signal` signals every process of the steps, not the batch shell.
* `srun` starts one task on each node. SIGTERM to srun itself kills the tasks. Its status is
  the highest of the tasks'. --wait=N ends the others N seconds after the first task has ended, 0
  never; --kill-on-bad-exit=1 ends them at once if it failed. A node that is down gets no task: with
  --no-kill the others run, without it the step fails.
* An array runs its tasks in order, at most as many at a time as `%N` says.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

POLL_S = 0.02
COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel")
SBATCH_OPTIONS = (
    "job-name", "partition", "account", "nodes", "ntasks-per-node", "gpus-per-node",
    "cpus-per-task", "mem", "time", "output", "open-mode", "requeue", "signal", "no-kill", "array",
    "qos",
)  # fmt: skip
SRUN_OPTIONS = (
    "nodes", "ntasks", "ntasks-per-node", "nodelist", "kill-on-bad-exit", "label", "no-kill",
    "wait", "cpus-per-task", "container-image", "container-mounts", "container-workdir",
)  # fmt: skip


class Slurm:
    """The controller, in the process of the test.

    Args:
        folder: where its state is.
        nodes: names; the ranks of a job meet at the first, so addresses of this machine serve.
    """

    def __init__(self, folder: Path, nodes: Sequence[str]) -> None:
        self.nodes, self.state, self.bin = list(nodes), folder / "slurm", folder / "bin"
        self.state.mkdir(parents=True)
        self.bin.mkdir()
        for name in COMMANDS:
            script = self.bin / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} -S {__file__} {name} "$@"\n')
            script.chmod(0o755)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._is_over = threading.Event()

    def environment(self) -> dict[str, str]:
        """Return what must be set for the commands to be found."""
        path = f"{self.bin}{os.pathsep}{os.environ['PATH']}"
        return {"PATH": path, "SLURM_STAND_IN": str(self.state)}

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start queued jobs as long as the block lasts; kill what is left at its end."""
        controller = threading.Thread(target=self._control)
        controller.start()
        try:
            yield
        finally:
            self._is_over.set()
            controller.join()
            for process in self._running.values():
                _signal_session(process.pid, signal.SIGKILL)
                process.wait()

    def job(self, number: str) -> dict[str, Any]:
        """Return what is known of a job; an array's task is `NUMBER_TASK`."""
        return read(self.state / f"job-{number}.json")

    def wait(self, number: str, *states: str, within_s: float = 120.0) -> dict[str, Any]:
        """Wait until a job is in one of some states, at its end without them."""
        wanted = states or ("COMPLETED", "FAILED", "CANCELLED")
        deadline = time.monotonic() + within_s
        while (job := self.job(number))["state"] not in wanted:
            assert time.monotonic() < deadline, f"{job}\n{self.log(number)}"
            time.sleep(POLL_S)
        return job

    def log(self, number: str) -> str:
        """Return what a job has printed."""
        path = Path(self.job(number)["log"])
        return path.read_text() if path.exists() else ""

    def wait_for_text(self, number: str, text: str, within_s: float = 120.0) -> None:
        """Wait until a job has printed something."""
        deadline = time.monotonic() + within_s
        while text not in self.log(number):
            assert time.monotonic() < deadline, self.log(number)
            time.sleep(POLL_S)

    def goes_down(self, node: str) -> None:
        """Let a node start no more tasks."""
        (self.state / f"down-{node}").touch()

    def end_of_time_comes(self, number: str) -> None:
        """Send what --signal says to whom it says."""
        job = self.job(number)
        spec, _, _ = job["options"]["signal"].partition("@")
        to, _, name = spec.rpartition(":")
        which = signal.Signals[f"SIG{name}"]
        if to == "B":
            os.kill(job["pid"], which)
        else:
            signal_steps(number, which)

    def preempt(self, number: str, grace_s: float = 60.0) -> None:
        """Take the nodes away: SIGTERM, the grace time, SIGKILL; and queue the job again."""
        job = self.job(number)
        signal_steps(number, signal.SIGTERM)
        os.kill(job["pid"], signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self.job(number)["pid"] == job["pid"] and time.monotonic() < deadline:
            time.sleep(POLL_S)
        if self.job(number)["pid"] == job["pid"]:
            requeue(self.state, number)

    # The controller -------------------------------------------------------------------------

    def _control(self) -> None:
        while not self._is_over.wait(POLL_S):
            for path in sorted(self.state.glob("job-*.json")):
                number = path.stem.removeprefix("job-")
                job = read(path)
                if job["state"] == "PENDING" and self._may_start(job):
                    self._start(number, job)
                elif number in self._running:
                    self._look_at(number, job)

    def _may_start(self, job: dict[str, Any]) -> bool:
        busy = [read(self.state / f"job-{n}.json") for n in self._running]
        siblings = sum(other["array"] == job["array"] != "" for other in busy)
        return siblings < job["at_a_time"]

    def _start(self, number: str, job: dict[str, Any]) -> None:
        nodes = self.nodes[: int(job["options"].get("nodes", 1))]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
        environment |= {
            **self.environment(),
            "SLURM_JOB_ID": str(job["id"]), "SLURM_JOB_NAME": job["options"]["job-name"],
            "SLURM_JOB_NODELIST": ",".join(nodes), "SLURM_NNODES": str(len(nodes)),
            "SLURM_JOB_NUM_NODES": str(len(nodes)), "SLURM_STAND_IN_JOB": number,
        }  # fmt: skip
        if job["restarts"]:
            environment["SLURM_RESTART_COUNT"] = str(job["restarts"])
        if job["array"]:
            environment |= {"SLURM_ARRAY_JOB_ID": job["array"], "SLURM_ARRAY_TASK_ID": job["task"]}
        with open(job["log"], "ab") as log:
            process = subprocess.Popen(
                ["bash", job["script"]], cwd=job["directory"], env=environment, stdout=log,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._running[number] = process
        update(self.state, number, state="RUNNING", pid=process.pid)

    def _look_at(self, number: str, job: dict[str, Any]) -> None:
        process = self._running[number]
        if job["state"] == "REQUEUED":
            _signal_session(process.pid, signal.SIGKILL)
        if process.poll() is None:
            return
        del self._running[number]
        _signal_session(process.pid, signal.SIGKILL)
        if job["state"] == "REQUEUED":
            update(self.state, number, state="PENDING", pid=0, restarts=job["restarts"] + 1)
        else:
            state = "COMPLETED" if process.returncode == 0 else "FAILED"
            update(self.state, number, state=state, status=process.returncode, pid=0)


def read(path: Path) -> dict[str, Any]:
    """Read a record, which is always replaced as a whole."""
    return json.loads(path.read_text())


def update(folder: Path, number: str, **values: Any) -> None:
    """Change the record of a job."""
    path = folder / f"job-{number}.json"
    record = (read(path) if path.exists() else {}) | values
    draft = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    draft.write_text(json.dumps(record))
    draft.replace(path)


def requeue(state: Path, number: str) -> None:
    """End a job and queue it again, if it was submitted with --requeue."""
    assert "requeue" in read(state / f"job-{number}.json")["options"], "not requeueable"
    update(state, number, state="REQUEUED")


def signal_steps(number: str, which: signal.Signals) -> None:
    """Signal every process of the steps of a job."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.read_bytes().split(b"\0")
            is_of_step = any(word.startswith(b"SLURM_PROCID=") for word in words)
            if is_of_step and f"SLURM_STAND_IN_JOB={number}".encode() in words:
                os.kill(int(path.parent.name), which)
        except OSError:
            continue


def _signal_session(leader: int, which: signal.Signals) -> None:
    """Signal every process of a session: the batch shell, its steps and their tasks."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                os.kill(int(path.parent.name), which)
        except (OSError, IndexError):
            continue


def options_of(words: Sequence[str], known: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split `--name=value` words off the front."""
    found, rest = {}, list(words)
    while rest and rest[0].startswith("--"):
        name, _, value = rest.pop(0)[2:].partition("=")
        if name not in known:
            raise SystemExit(f"error: unrecognized option '--{name}'")
        found[name] = value
    return found, rest


def sbatch(state: Path, words: list[str]) -> int:
    """Queue a script."""
    given, (script,) = options_of(words, SBATCH_OPTIONS)
    options: dict[str, str] = {}
    for line in Path(script).read_text().splitlines()[1:]:
        if line.startswith("#SBATCH "):
            options |= options_of(line.split()[1:], SBATCH_OPTIONS)[0]
        elif line and not line.startswith("#"):
            break
    options |= given
    first = 1 + max((int(p.stem.split("-")[1].split("_")[0]) for p in state.glob("job-*.json")),
                    default=40)  # fmt: skip
    tasks, at_a_time = [""], 1
    if "array" in options:
        interval, _, limit = options["array"].partition("%")
        low, _, high = interval.partition("-")
        tasks = [str(n) for n in range(int(low), int(high) + 1)]
        at_a_time = int(limit) if limit else len(tasks)
    for offset, task in enumerate(tasks):
        number = f"{first}_{task}" if task else str(first)
        log = options.get("output", "slurm-%j.out").replace("%j", str(first + offset))
        log = log.replace("%A", str(first)).replace("%a", task)
        update(
            state, number, id=first + offset, state="PENDING", script=str(Path(script).resolve()),
            directory=os.getcwd(), log=str(Path(log).absolute()), options=options, restarts=0,
            pid=0, array=str(first) if task else "", task=task, at_a_time=at_a_time,
        )  # fmt: skip
    print(f"Submitted batch job {first}")
    return 0


def srun(state: Path, words: list[str]) -> int:
    """Run a command once on each of some nodes of the job."""
    options, command = options_of(words, SRUN_OPTIONS)
    allocated = os.environ["SLURM_JOB_NODELIST"].split(",")
    wanted = options.get("nodelist", "").split(",") if "nodelist" in options else allocated
    if set(wanted) - set(allocated) or int(options["nodes"]) != len(wanted):
        print(f"srun: error: Requested nodes {wanted} of {allocated}", file=sys.stderr)
        return 1
    down = [node for node in wanted if (state / f"down-{node}").exists()]
    if down:
        print(f"srun: error: Node failure on {','.join(down)}", file=sys.stderr)
        if "no-kill" not in options:
            return 1
    tasks = {}
    for rank, node in enumerate(wanted):
        if node in down:
            continue
        environment = os.environ | {
            "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0",
            "SLURM_NTASKS": options["ntasks"], "SLURMD_NODENAME": node,
            "SLURM_STEP_NODELIST": ",".join(wanted), "SLURM_STEP_NUM_NODES": str(len(wanted)),
        }  # fmt: skip
        tasks[rank] = subprocess.Popen(
            command, env=environment, process_group=0, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def end(_which: int, _frame: object) -> None:
        print("srun: forcing job termination", file=sys.stderr)
        for task in tasks.values():
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)

    def copy(rank: int, task: subprocess.Popen[str]) -> None:
        for line in task.stdout or ():
            sys.stdout.write(f"{rank}: {line}" if "label" in options else line)
            sys.stdout.flush()

    copies = [threading.Thread(target=copy, args=item) for item in tasks.items()]
    for thread in copies:
        thread.start()
    wait_s = float(options.get("wait", 0)) or math.inf
    first_end = None
    while any(task.poll() is None for task in tasks.values()):
        if first_end is None and any(task.poll() is not None for task in tasks.values()):
            first_end = time.monotonic()
        is_late = first_end is not None and time.monotonic() - first_end > wait_s
        has_failed = any(task.poll() for task in tasks.values())
        if is_late or (has_failed and options.get("kill-on-bad-exit") == "1"):
            for task in tasks.values():
                if task.poll() is None:
                    os.killpg(task.pid, signal.SIGTERM)
        time.sleep(POLL_S)
    for thread in copies:
        thread.join()
    return max((128 - t.returncode if t.returncode < 0 else t.returncode) for t in tasks.values())


def scontrol(state: Path, words: list[str]) -> int:
    """Expand names of nodes, or queue a job again."""
    if words[:2] == ["show", "hostnames"]:
        print("\n".join(words[2].split(",")))
        return 0
    if words[0] == "requeue":
        for path in state.glob("job-*.json"):
            if str(read(path)["id"]) == words[1]:
                requeue(state, path.stem.removeprefix("job-"))
                return 0
    raise SystemExit(f"scontrol: error: {words}")


def squeue(state: Path, words: list[str]) -> int:
    """List jobs that have not ended."""
    assert not words, words
    for path in sorted(state.glob("job-*.json")):
        job = read(path)
        if job["state"] in ("PENDING", "RUNNING", "REQUEUED"):
            print(path.stem.removeprefix("job-"), job["options"]["job-name"], job["state"])
    return 0


def scancel(state: Path, words: list[str]) -> int:
    """Cancel the jobs of an array that are in a state, or signal the steps of a job."""
    options, (number,) = options_of(words, ("state", "signal"))
    if "signal" in options:
        for path in state.glob("job-*.json"):
            if str(read(path)["id"]) == number:
                number = path.stem.removeprefix("job-")
                signal_steps(number, signal.Signals[f"SIG{options['signal']}"])
        return 0
    for path in state.glob(f"job-{number}*.json"):
        if read(path)["state"] == options["state"]:
            update(state, path.stem.removeprefix("job-"), state="CANCELLED")
    return 0


if __name__ == "__main__":
    command = {"sbatch": sbatch, "srun": srun, "scontrol": scontrol, "squeue": squeue,
               "scancel": scancel}[sys.argv[1]]  # fmt: skip
    sys.exit(command(Path(os.environ["SLURM_STAND_IN"]), sys.argv[2:]))
