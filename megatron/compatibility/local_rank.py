"""Run a script as DeepSpeed's launcher would: with --local_rank=N among its arguments.

torchrun ... -m megatron.compatibility.local_rank [--module] train.py ARGUMENTS
"""

from __future__ import annotations

import os
import runpy
import sys


def main(words: list[str]) -> None:
    """Replace this program by the script that `words` begin with."""
    is_module = words[:1] == ["--module"]
    script, *arguments = words[1:] if is_module else words
    sys.argv = [script, f"--local_rank={os.environ.get('LOCAL_RANK', '0')}", *arguments]
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
