"""Run a table of parity in fp64: `python -m tests.parity.in_fp64 families --cases hy_v4`.

Errors of rounding are then about 1e-13, so a larger figure is another formula.
"""

import importlib
import sys

import torch

import tests.parity.random_layouts.wide  # noqa: F401  before all else
from megatron.core.dist_checkpointing.shard_file import DTYPES
from tests.harness import pool

DTYPES["F64"] = torch.float64  # Transformers writes files of this type

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(f"usage: python -m tests.parity.in_fp64 TABLE [flags of the table]\n\n{__doc__}")
        sys.exit(sys.argv[1:] != ["--help"])
    pool.PRELOAD[:] = ["tests.parity.in_fp64", *pool.PRELOAD]
    table = importlib.import_module(f"tests.parity.{sys.argv.pop(1)}")
    sys.exit(table.main())
