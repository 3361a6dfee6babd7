"""Write a checkpoint for Megatron-LM: its torch_dist format, which every megatron-core loads.

SAVE may be anything that --load accepts, also a checkpoint of Megatron-LM's older format or of
DeepSpeed. Optimizer state is written by parameter, as Megatron's distributed optimizer does with
--dist-ckpt-optim-fully-reshardable.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.core.dist_checkpointing.interop.torch_dist_writer import write_torch_dist
from tools.checkpoint.opening import add_path, opened


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_path(parser)
    parser.add_argument("output", help="directory to write iter_NNNNNNN and the tracker into")
    parser.add_argument("--weights", action="store_true", help="leave the optimizer state out")


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint and print where it is."""
    contents = opened(Path(arguments.path))
    final = write_torch_dist(contents, Path(arguments.output), with_optimizer=not arguments.weights)
    print(f"wrote {final}")
    return 0
