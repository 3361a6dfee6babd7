"""Kill preprocessing at random moments until it gets through; the output is that of a quiet run.

    python -m tests.parity.preprocessing_kills [--kills 50] [--seed 0] [--input FILE] [-- FLAGS]

Prints each kill (when, and how many bytes stood in the unfinished file), then the comparison; exits
non-zero if the output differs, a final name appears early, or a worker outlives its parent.
"""

import json
import os
import random
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

ROOT = Path(__file__).parents[2]


def write_input(path: Path, megabytes: float) -> None:
    """Write JSON lines of many lengths, the same every time."""
    source = random.Random(7)
    words = ["to", "be", "or", "not", "that", "is", "the", "question", "naïve", "漢字"]
    with open(path, "w") as file:
        while file.tell() < megabytes * 1e6:
            text = " ".join(source.choices(words, k=source.choice([0, 3, 50, 800])))
            file.write(json.dumps({"text": text}) + "\n")


def command(source: str, output: Path, flags: Sequence[str]) -> list[str]:
    """Return the command line of a run that journals after every unit."""
    return [
        sys.executable, str(ROOT / "tools/preprocess_data.py"), "--input", source,
        "--output-prefix", str(output), "--append-eod", "--workers", "2",
        "--journal-interval", "0", *flags,
    ]  # fmt: skip


def is_running(group: int) -> bool:
    """Whether a process of the group is left (dead ones that wait for init do not count)."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] not in "ZX":
            return True
    return False


def wait_for_moment(
    run: "subprocess.Popen[bytes]",
    unfinished: Path,
    moments: random.Random,
    seconds: float,
    num_bytes: int,
    *,
    by_bytes: bool,
) -> bool:
    """Wait for a random time, or for a random size of the output; False if the run ends first."""
    delay, size = moments.uniform(0.0, seconds), moments.uniform(0.0, num_bytes)
    began = time.perf_counter()
    while run.poll() is None:
        if by_bytes:
            if unfinished.exists() and unfinished.stat().st_size >= size:
                return True
        elif time.perf_counter() - began > delay:
            return True
        time.sleep(0.004)
    return False


def run_until_through(
    folder: Path, source: str, flags: Sequence[str], kills: int, seed: int
) -> tuple[int, list[str]]:
    """Kill a run `kills` times, beginning again whenever it got through.

    Returns:
        (kills done, problems).
    """
    quiet = folder / "quiet"
    begun = time.perf_counter()
    subprocess.run(command(source, quiet, flags), check=True, capture_output=True)
    seconds = time.perf_counter() - begun
    expected = [Path(f"{quiet}_text_document{end}").read_bytes() for end in (".bin", ".idx")]
    print(f"undisturbed: {seconds:.2f} s, {len(expected[0]):,} bytes of tokens", flush=True)
    moments = random.Random(seed)
    done, rounds, problems = 0, 0, []
    while done < kills or rounds == 0:
        output = folder / f"round{rounds}"
        final = [Path(f"{output}_text_document{end}") for end in (".bin", ".idx")]
        while True:
            started = time.perf_counter()
            with open(folder / "errors", "w") as errors:
                run = subprocess.Popen(
                    command(source, output, flags),
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    start_new_session=True,
                )
            left = Path(f"{output}_text_document.bin.unfinished")
            if is_to_die := done < kills and wait_for_moment(
                run, left, moments, seconds, len(expected[0]), by_bytes=done % 2 == 1
            ):
                size = left.stat().st_size if left.exists() else 0
                delay = time.perf_counter() - started
                os.kill(run.pid, signal.SIGKILL)
            run.wait()
            if is_to_die and run.returncode == -signal.SIGKILL:
                done += 1
                print(f"kill {done:>3} after {delay:5.2f} s, {size:>10,} bytes written", flush=True)
                deadline = time.monotonic() + 10
                while is_running(run.pid) and time.monotonic() < deadline:
                    time.sleep(0.05)
                if is_running(run.pid):
                    problems.append(f"kill {done}: a worker outlived its parent")
                if final[1].exists() and not final[0].exists():
                    problems.append(f"kill {done}: an index without its tokens")
                continue
            if run.returncode:
                problems.append((folder / "errors").read_text())
            break
        if not all(p.exists() for p in final) or [p.read_bytes() for p in final] != expected:
            problems.append(f"round {rounds}: the output differs")
        rounds += 1
    print(f"{done} kills, {rounds} finished runs compared")
    return done, problems


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    kills: int = 50
    seed: int = 0
    input: str | None = None
    """JSON lines; made up if not given."""
    megabytes: float = 20.0
    """Of made-up input."""
    flags: tuple[str, ...] = positional(("--tokenizer-type", "ByteTokenizer"))


def main() -> int:
    """Run the table."""
    args = read_command_line(Flags, description="Kill preprocessing and resume it.")
    with tempfile.TemporaryDirectory() as name:
        source = args.input
        if source is None:
            source = str(Path(name) / "in.jsonl")
            write_input(Path(source), args.megabytes)
        _, problems = run_until_through(Path(name), source, args.flags, args.kills, args.seed)
    for problem in problems:
        print(problem)
    print("FAILED" if problems else "identical to the undisturbed run")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
