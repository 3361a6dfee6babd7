"""The same shards whatever makes them: datatrove's executors, array tasks, one of them killed.

    python -m tests.parity.preprocessing_shards [--input FILE] [--ray PYTHON] [-- FLAGS]

One process writes the shards; then datatrove's executors on this machine and (with `--ray`, an
interpreter that has it) on Ray, and array tasks of which one is killed by signal when half of its
tokens are written, and run again. Prints a row for each; exits non-zero if a byte differs from the
shards of one process, or from one run over everything once they are joined.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional
from tests.parity.preprocessing_kills import ROOT, command, write_input

SHARDS = 2


def shards(output: Path) -> list[bytes]:
    """Return the files of all shards; none where one is missing."""
    names = [f"{output}-{i:05d}-of-{SHARDS:05d}_text_document" for i in range(SHARDS)]
    paths = [Path(name + end) for name in names for end in (".bin", ".idx")]
    return [path.read_bytes() for path in paths] if all(p.exists() for p in paths) else []


def on_cluster(python: str, executor: str, source: str, output: Path, flags: Sequence[str]) -> str:
    """Make the shards through datatrove; return what went wrong."""
    _, script, *rest = command(source, output, flags)
    done = subprocess.run(
        [python, str(ROOT / "tools/preprocess_on_cluster.py"), "--executor", executor,
         "--tasks", str(SHARDS), "--logging-dir", f"{output}-logs", "--", *rest],
        capture_output=True, text=True, env={**os.environ, "RAY_DEDUP_LOGS": "0"},
    )  # fmt: skip
    return done.stderr[-2000:] if done.returncode else ""


def array_task(
    source: str, output: Path, flags: Sequence[str], task: int
) -> "subprocess.Popen[bytes]":
    """Start one task as a scheduler would."""
    return subprocess.Popen(
        [*command(source, output, flags), "--num-shards", str(SHARDS)],
        env={**os.environ, "SLURM_ARRAY_TASK_ID": str(task)},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def array_with_a_kill(source: str, output: Path, flags: Sequence[str], expected: int) -> str:
    """Run both tasks, the second killed when `expected` / 2 bytes are written, then again."""
    begun = array_task(source, output, flags, 1)
    growing = Path(f"{output}-00001-of-{SHARDS:05d}_text_document.bin.unfinished")
    while begun.poll() is None:
        if growing.exists() and growing.stat().st_size > expected // 2:
            begun.send_signal(signal.SIGKILL)
            break
        time.sleep(0.002)
    if begun.wait() != -signal.SIGKILL:
        return "the task ended before it was killed"
    if shards(output):
        return "a final name after the kill"
    statuses = [array_task(source, output, flags, task).wait() for task in (1, 0)]
    return "" if statuses == [0, 0] else f"exit statuses {statuses}"


def joined(output: Path, flags: Sequence[str], source: str) -> str:
    """Compare the shards joined with one run over everything."""
    parts = [f"{output}-{i:05d}-of-{SHARDS:05d}_text_document" for i in range(SHARDS)]
    merge = [sys.executable, str(ROOT / "tools/merge_datasets.py"), "--input", *parts]
    subprocess.run([*merge, "--output-prefix", f"{output}-all"], check=True, capture_output=True)
    subprocess.run(command(source, Path(f"{output}-one"), flags), check=True, capture_output=True)
    for end in (".bin", ".idx"):
        one = Path(f"{output}-one_text_document{end}").read_bytes()
        if Path(f"{output}-all{end}").read_bytes() != one:
            return f"{end} differs"
    return ""


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    input: str | None = None
    """JSON lines; made up if not given."""
    ray: str | None = None
    """Interpreter of an environment that has Ray."""
    flags: tuple[str, ...] = positional(("--tokenizer-type", "ByteTokenizer"))


def main() -> int:
    """Run the table."""
    args = read_command_line(Flags, description="Make the same shards in several ways.")
    with tempfile.TemporaryDirectory() as name:
        folder, source, flags = Path(name), args.input, args.flags
        if source is None:
            source = str(folder / "in.jsonl")
            write_input(Path(source), 20.0)
        plain = folder / "plain"
        alone = [*command(source, plain, flags), "--num-shards", str(SHARDS)]
        subprocess.run(alone, check=True, capture_output=True)
        expected = shards(plain)
        ways = {"datatrove, local": (sys.executable, "local")}
        if args.ray:
            ways["datatrove, Ray"] = (args.ray, "ray")
        results = {}
        for number, (title, (python, executor)) in enumerate(ways.items()):
            output = folder / f"way{number}"
            problem = on_cluster(python, executor, source, output, flags)
            results[title] = problem or ("" if shards(output) == expected else "a shard differs")
        array = folder / "array"
        problem = array_with_a_kill(source, array, flags, len(expected[2]))
        results["array tasks, one killed"] = problem or (
            "" if shards(array) == expected else "a shard differs"
        )
        results["joined, against one run"] = joined(plain, flags, source)
    for title, problem in results.items():
        print(f"{title:<28} {problem or 'identical'}")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main())
