"""Write a checkpoint for another program: for Megatron-LM, or in any format that has a writer.

SAVE may be anything that --load accepts, also a checkpoint of Megatron-LM's older format or of
DeepSpeed. In Megatron-LM's torch_dist format, which every megatron-core loads, optimizer state is
written by parameter, as Megatron's distributed optimizer does with
--dist-ckpt-optim-fully-reshardable.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.core.dist_checkpointing.interop.formats import FORMATS
from megatron.core.dist_checkpointing.interop.opening import write_format
from tools.checkpoint.opening import add_path, opened

WRITABLE = {form.name: form for form in FORMATS if form.write is not None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_path(parser)
    parser.add_argument("output", help="directory to write iter_NNNNNNN and the tracker into")
    parser.add_argument("--weights", action="store_true", help="leave the optimizer state out")
    parser.add_argument("--format", choices=WRITABLE, default="torch_dist", help="of the files")


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint and print where it is."""
    final = write_format(
        opened(Path(arguments.path)),
        Path(arguments.output),
        WRITABLE[arguments.format],
        with_optimizer=not arguments.weights,
    )
    print(f"wrote {final}")
    return 0
