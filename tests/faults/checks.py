"""What a job has left: processes, files, sockets, checkpoints, and whether training continues."""

import contextlib
import json
import re
import shutil
import threading
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megatron.core.dist_checkpointing import commit
from megatron.core.dist_checkpointing.verify import verify_checkpoint
from tests.faults.job import FATAL, NUM_STEPS, SAVE_INTERVAL, Job, model_words
from tests.faults.processes import all_listening
from tests.faults.promises import Kept, Promise
from tests.harness.distributed import DistributedFailure, run_distributed
from tests.parity.training_run import train_with_flags
from tools.checkpoint.state_digest import checkpoint_digest

_POOL = threading.Lock()
"""The harness' ranks do one thing at a time."""
EXPECTED_FILES = re.compile(
    r"iter_\d{7}|latest_checkpointed_iteration\.txt|\.lease|failure(\.previous)?\.json"
    r"|failures\.jsonl|progress\.txt"
)
INTERRUPTED = re.compile(r"iter_\d{7}\.(tmp|deleting|replaced)-\w+|\..*\.tmp-?\w*")
"""What a process that is killed during a save may leave, until the next run removes it."""
FILES_OF_TORCH = re.compile(r"torchelastic_\w+|torchinductor_\w+")
"""torchrun makes a directory for logs, torch one for compiled code, and neither removes it."""
SOCKETS_OF_WORKERS = re.compile(r"pymp-\w+")
"""Python's multiprocessing removes this directory at the end of a process that is not killed."""

AXES = {
    "--tensor-model-parallel-size": "tp", "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp", "--expert-model-parallel-size": "ep",
}  # fmt: skip
"""Flag -> the axis of process groups that it sizes."""
_OF_TIME = re.compile(r"time|tokens-per|-share$")

Metrics = dict[int, dict[str, list[float]]]
"""Iteration -> what --metrics-jsonl says of it, times left out; a last step may be evaluated both
for its number and for being the last."""


def read_metrics(path: Path) -> list[tuple[int, dict[str, float]]]:
    """Return the lines of a metrics file; one that was cut off at the end is left out."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            fields = json.loads(line)
            kept = {k: v for k, v in fields.items() if not _OF_TIME.search(k)}
            found.append((int(fields["iteration"]), kept))
    return found


@dataclass(frozen=True)
class Curve:
    """A whole run: all that was measured, and the state at its end."""

    metrics: Metrics
    digest: str


def train_in_harness(
    save: Path,
    metrics: Path,
    num_ranks: int,
    *flags: str,
    num_steps: int = NUM_STEPS,
    model: str = "",
) -> None:
    """Train, or continue, on the ranks of the test harness, which start at once.

    Args:
        model: flags of the model and its layout beside those of all runs.
    Raises:
        DistributedFailure: it failed.
    """
    words = [*model_words(model), "--num-workers", "0", "--train-iters", str(num_steps)]
    words += ["--save-interval", str(SAVE_INTERVAL), "--save", str(save), "--load", str(save)]
    words += ["--metrics-jsonl", str(metrics), *flags]
    groups: dict[str, int | bool] = {
        axis: int(words[words.index(flag) + 1]) for flag, axis in AXES.items() if flag in words
    }
    if "--hybrid-context-parallel" in words:
        groups["hybrid_cp"] = True
    with _POOL:
        run_distributed(train_with_flags, num_ranks, words, timeout_s=600.0 + num_steps, **groups)


class References:
    """Undisturbed runs, each done once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.RLock()

    @cache  # noqa: B019  lives as long as the program
    def _curve(self, num_ranks: int, num_steps: int, layout: str) -> Curve:
        name = layout.replace(" ", "").replace("/", "")
        place = self.folder / f"reference-{num_ranks}-{num_steps}{name}"[:200]
        train_in_harness(
            place / "save", place / "metrics", num_ranks,
            "--save-interval", str(num_steps), num_steps=num_steps, model=layout,
        )  # fmt: skip
        return Curve(joined(place / "metrics"), state_at(place / "save", num_steps))

    def curve(self, num_ranks: int, num_steps: int = NUM_STEPS, layout: str = "") -> Curve:
        """Return what a run without faults measures; `layout` is more of its flags."""
        with self._lock:
            return self._curve(num_ranks, num_steps, layout)

    @cache  # noqa: B019
    def _begun(self, num_ranks: int) -> Path:
        place = self.folder / f"begun-{num_ranks}"
        train_in_harness(
            place / "save", place / "metrics", num_ranks, "--exit-interval", str(SAVE_INTERVAL)
        )
        return place

    def copy_of_a_begun_run(self, num_ranks: int, folder: Path) -> None:
        """Put a run that has saved once into `folder`."""
        with self._lock:
            place = self._begun(num_ranks)
        shutil.copytree(place / "save", folder / "save")
        shutil.copy(place / "metrics", folder / "metrics")


def joined(*files: Path) -> Metrics:
    """Return all lines of metrics files by iteration."""
    found: Metrics = {}
    for file in files:
        for iteration, fields in read_metrics(file):
            for key, value in fields.items():
                found.setdefault(iteration, {}).setdefault(key, []).append(value)
    return found


def state_at(save: Path, iteration: int) -> str:
    """Return the digest of all that a checkpoint holds."""
    return checkpoint_digest(save / commit.iteration_directory(iteration))


def newest(save: Path) -> int | None:
    """Return the iteration of the newest complete checkpoint."""
    if not save.is_dir():
        return None
    found = [c.iteration for c in commit.list_checkpoints(save).checkpoints]
    return max((i for i in found if isinstance(i, int)), default=None)


# Each check returns what is wrong ----------------------------------------------------------------


def check_remains(job: Job, promise: Promise) -> list[str]:
    """Look for what a job has left outside its save directory."""
    problems = [f"left in /dev/shm: {path.name}" for path in job.shared_memory.iterdir()]
    problems += [
        f"left in TMPDIR: {path.name}"
        for path in job.temporary.iterdir()
        if not FILES_OF_TORCH.fullmatch(path.name)
        and (promise.is_clean or not SOCKETS_OF_WORKERS.fullmatch(path.name))
    ]
    problems += [f"still listening: {address}" for address in _still_listening(job)]
    return problems


def _still_listening(job: Job) -> list[str]:
    """Return ports that stay open; a process that ends loses its memory before its files."""
    deadline = time.monotonic() + 5.0
    while True:
        listening = all_listening()
        found = [address for inode, address in job.sockets.items() if inode in listening]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


def check_save_directory(save: Path, *, is_clean: bool) -> list[str]:
    """Look for files that do not belong there, and for damage."""
    problems = []
    for path in save.iterdir() if save.is_dir() else ():
        may_be = INTERRUPTED.fullmatch(path.name) and not is_clean
        if not (EXPECTED_FILES.fullmatch(path.name) or may_be):
            problems.append(f"left in the save directory: {path.name}")
    for found in commit.list_checkpoints(save).checkpoints if save.is_dir() else ():
        damage = verify_checkpoint(found.path).problems
        problems += [f"{found.path.name} is damaged: {damage[0]}"] if damage else []
    return problems


def check_message(job: Job, promise: Promise) -> list[str]:
    """Look at what the job says at its end."""
    problems, text = [], job.text()
    classes = FATAL.findall(text)
    if promise.classes and (len(classes) != 1 or classes[0] not in promise.classes):
        wanted = " or ".join(sorted(promise.classes))
        problems.append(f"FATAL lines {classes} instead of one {wanted}")
    if len(classes) > 1:
        problems.append(f"{len(classes)} FATAL lines: {classes}")
    status = job.process.returncode
    if promise.is_success is not None and (status == 0) is not promise.is_success:
        problems.append(f"exit status {status}")
    return problems


def check_newest(
    save: Path, promise: Promise, saved_before: int | None, last_step: int | None, num_steps: int
) -> list[str]:
    """Look whether the newest checkpoint is as new as promised."""
    found = newest(save)
    wanted = {
        Kept.LAST_SAVE: saved_before,
        Kept.LAST_STEP: last_step,
        Kept.END: num_steps,
    }[promise.kept]
    if (found or 0) < (wanted or 0):
        return [f"the newest checkpoint is {found}, not {wanted}: {promise.kept.value}"]
    return []


def check_resume(
    folder: Path, reference: Curve, num_ranks: int, num_steps: int = NUM_STEPS
) -> list[str]:
    """Let the run continue to its end, and compare it with an undisturbed one to the bit."""
    save, started_from = folder / "save", newest(folder / "save") or 0
    try:
        train_in_harness(save, folder / "resumed", num_ranks, num_steps=num_steps)
    except DistributedFailure as error:
        return [f"it does not resume: {str(error)[-1500:]}"]
    steps = [i for i, fields in read_metrics(folder / "resumed") if "lm loss" in fields]
    problems = []
    if steps != list(range(started_from + 1, num_steps + 1)):
        problems.append(f"resumed with steps {steps}, not from {started_from + 1}")
    return problems + check_curve(folder, reference, num_steps)


def check_curve(folder: Path, reference: Curve, num_steps: int) -> list[str]:
    """Compare every logged number and the last state with the undisturbed run's."""
    problems, seen = [], set()
    for name in ("metrics", "resumed"):
        for iteration, fields in read_metrics(folder / name):
            seen.add(iteration)
            expected = reference.metrics.get(iteration, {})
            different = [k for k, v in fields.items() if v not in expected.get(k, [])]
            if different:
                shown = ", ".join(f"{k} {fields[k]!r} not {expected.get(k)!r}" for k in different)
                problems.append(f"{name}, step {iteration}: {shown}")
    if missing := sorted(set(range(1, num_steps + 1)) - seen):
        problems.append(f"no metrics of steps {missing}")
    if state_at(folder / "save", num_steps) != reference.digest:
        problems.append("the state at the end differs")
    return problems[:5]
