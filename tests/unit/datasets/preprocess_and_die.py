"""Preprocess in a process that dies at its n-th file operation, then again; for every n.

    python -m tests.unit.datasets.preprocess_and_die FOLDER

Prints how many deaths were survived; exits non-zero at the first output that differs.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from megatron.core.datasets.preprocessing import job
from tools import preprocess_data

DYING = ("fsync", "replace", "unlink")
"""Operations of `os` around which a kill could leave something half done."""


def write_input(path: Path) -> None:
    """Write a few units of JSON lines, and one faulty line."""
    lines = [
        json.dumps({"text": f"document {i} " * (i % 40), "b": "x" * (i % 7)}) for i in range(60)
    ]
    path.write_text("\n".join([*lines, "not JSON", *lines[:5]]))


def preprocess(folder: Path, output: str, *flags: str) -> int:
    """Run the tool quietly in this process."""
    command = [
        "--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / output),
        "--json-keys", "text", "b", "--tokenizer-type", "ByteTokenizer", "--append-eod",
        "--workers", "0", "--journal-interval", "0", "--skip-bad-lines",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return preprocess_data.main([*command, *flags])


def die_at(number: int, before: bool) -> None:
    """Let this process end at once at the n-th of the operations."""
    count = 0
    for name in DYING:
        real = getattr(os, name)

        def dying(*args, real=real, **kwargs):
            nonlocal count
            count += 1
            if count == number and before:
                os._exit(9)
            result = real(*args, **kwargs)
            if count == number:
                os._exit(9)
            return result

        setattr(os, name, dying)


def in_child(work) -> int:
    """Fork, do the work, return the exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def outputs(folder: Path, output: str) -> dict[str, bytes]:
    """Return the token files and indices, by what follows the prefix."""
    ends = (".bin", ".idx")
    files = [path for path in folder.glob(f"{output}*") if path.name.endswith(ends)]
    return {path.name.removeprefix(output): path.read_bytes() for path in files}


def main() -> int:
    """Die at every operation in turn."""
    folder = Path(sys.argv[1])
    os.fsync = lambda descriptor: None  # slow, and a killed process does not need it
    real = job.read_units
    job.read_units = lambda *a, **k: real(*a, **{**k, "unit_bytes": 16384})
    write_input(folder / "in.jsonl")
    assert in_child(lambda: preprocess(folder, "whole")) == 0
    expected, deaths = outputs(folder, "whole"), 0
    assert len(expected) == 4
    for before in (True, False):
        for number in range(1, 1000):

            def die(number: int = number, before: bool = before) -> int:
                die_at(number, before)
                return preprocess(folder, "again")

            if in_child(die) == 0:
                break
            deaths += 1
            assert in_child(lambda: preprocess(folder, "again")) == 0, number
            left = [p.name for p in folder.glob("again*") if p.suffix in (".unfinished", ".lock")]
            if outputs(folder, "again") != expected or left:
                print(f"operation {number}: other output, or files left: {left}")
                return 1
            for path in folder.glob("again*"):
                path.unlink()
        for path in folder.glob("again*"):
            path.unlink()
    print(f"{deaths} deaths survived")
    return 0


if __name__ == "__main__":
    sys.exit(main())
