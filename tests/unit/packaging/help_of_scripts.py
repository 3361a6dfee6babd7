"""Ask scripts for --help, or a flag they lack, in forks of one process that has imported libraries.

Tools and examples are files, as in `python tools/doctor.py`, and must find their imports where the
package is installed and their own folder is all that is on the path. Benchmarks and the long
comparisons are modules: `python -m benchmarks.data`.
"""

import contextlib
import gc
import json
import os
import runpy
import sys
import traceback
from pathlib import Path

import peft  # noqa: F401
import torch._dynamo
import torch.distributed.fsdp  # noqa: F401
import transformers  # noqa: F401

import megatron.training.training  # noqa: F401
import pretrain_gpt  # noqa: F401
import pretrain_vlm  # noqa: F401
from megatron.training.cli.parser import build_parser

ROOT = Path(__file__).resolve().parents[3]
NOT_FOR_USERS = {
    "benchmarks/checkpoint_peer.py": "is started by benchmarks/checkpoint.py",
    "tests/architecture/picture.py": "draws again, of no arguments",
    "tests/change_it": "follows a document",
    "tests/cluster_schemas": "is started by tools/test_schemas.sh",
    "tests/gpu_without_gpu/triton_kernels": "is started by tools/test_triton.sh",
    "tests/harness": "is started by the harness",
    "tests/parity/interop_deepspeed_peer.py": "is started by interop_deepspeed.py",
    "tests/parity/interop_peer.py": "is started by interop.py",
    "tests/parity/random_layouts/corpus.py": "is started by its package",
    "tests/parity/random_layouts/runner.py": "is started by its package",
    "tests/unit": "are started by tests",
}


def scripts() -> list[Path]:
    """Return the files that somebody starts by hand."""
    found = sorted(ROOT.glob("pretrain_*.py"))
    for top in ("tools", "examples", "benchmarks", "tests"):
        found += [
            file
            for file in sorted((ROOT / top).rglob("*.py"))
            if '__name__ == "__main__"' in file.read_text()
            and not file.name.startswith("test_")
            and not any(str(file.relative_to(ROOT)).startswith(name) for name in NOT_FOR_USERS)
        ]
    return found


def run(script: Path, word: str) -> None:
    """Run a script with one word on its command line in this process."""
    sys.argv = [str(script), word]
    words = script.relative_to(ROOT).with_suffix("").parts
    without_root = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
    if words[0] in ("benchmarks", "tests") or words[-1] == "__main__":
        sys.path[:] = [str(ROOT), *without_root]
        runpy.run_module(".".join(words).removesuffix(".__main__"), run_name="__main__")
    else:
        sys.path[:] = [str(script.parent), *without_root]
        runpy.run_path(str(script), run_name="__main__")


def answer(script: Path, word: str) -> tuple[int, str]:
    """Return the exit status of a script, and what it says."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        os.dup2(writer, 1)
        os.dup2(writer, 2)
        os.close(reader)
        os.close(writer)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                run(script, word)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as said:
        text = said.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text


if __name__ == "__main__":
    build_parser()  # the table of flags is made once for all forks
    gc.freeze()  # what is imported stays: forks need not look at it
    asked = [(script, "--help") for script in scripts()]
    asked += [(ROOT / "tools" / f"{name}.py", "--no-such-flag") for name in sys.argv[1:]]
    answers = [(str(one.relative_to(ROOT)), word, *answer(one, word)) for one, word in asked]
    print(json.dumps(answers))
