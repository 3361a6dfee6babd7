"""Inspect, check, compare, rewrite and delete checkpoints.

    python tools/checkpoint inspect SAVE [--tensors] [--args]   list the contents
    python tools/checkpoint diff SAVE_A SAVE_B [--contents]     settings, data, tensors that differ
    python tools/checkpoint verify SAVE [--all]                 read all bytes; exit 1 if damaged
    python tools/checkpoint digest SAVE [--weights] [--each]    equal state, equal digest
    python tools/checkpoint reshard SAVE OUT [--files N]        full tensors in N files
    python tools/checkpoint average OUT SAVE SAVE ...           mean of the weights
    python tools/checkpoint prune SAVE [--keep-last N] [--yes]  delete old checkpoints
    python tools/checkpoint export SAVE OUT [--weights]         write SAVE for Megatron-LM
    python tools/checkpoint convert SAVE DIRECTORY              write a Hugging Face model

SAVE is one checkpoint (SAVE/iter_0000100), or a save directory for the checkpoint a run would load.

Each command is a file of this directory with a docstring, a dataclass `Flags` and `run(flags)`,
which returns the exit status.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # sys.path[0] is this directory, and its `inspect.py` would hide Python's own.
    sys.path[0] = os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, os.pardir)

import importlib
from collections.abc import Sequence

from megatron.core.foundation.exit_status import tool
from megatron.core.settings.command_line import Subcommand, run_subcommand

COMMANDS = (
    "inspect",
    "diff",
    "verify",
    "digest",
    "reshard",
    "average",
    "prune",
    "export",
    "convert",
)
"""Names of the commands; each is a file of this directory."""


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    modules = {name: importlib.import_module(f"tools.checkpoint.{name}") for name in COMMANDS}
    return run_subcommand(
        {name: Subcommand(m.Flags, m.run, m.__doc__ or "") for name, m in modules.items()},
        argv,
        prog="tools/checkpoint",
        description=__doc__,
    )


if __name__ == "__main__":
    sys.exit(main())
