"""Print a hash of the state that does not depend on the layout that saved it.

Equal state gives an equal digest in any layout and under any padding of the vocabulary.
"""

from __future__ import annotations

import argparse

from megatron.core.dist_checkpointing.digest import checkpoint_digest, tensor_digests
from megatron.core.dist_checkpointing.object_store import storage_path
from tools.checkpoint.opening import OPTIMIZER_PREFIX, add_path, checkpoint_in, opened


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_path(parser)
    parser.add_argument("--weights", action="store_true", help="the model alone")
    parser.add_argument("--each", action="store_true", help="one digest per tensor")


def run(arguments: argparse.Namespace) -> int:
    """Print and return 0."""
    path = checkpoint_in(storage_path(arguments.path))
    if arguments.each:
        for key, value in tensor_digests(opened(path)):
            print(f"{value}  {key}")
        return 0
    only_weights = arguments.weights
    value = checkpoint_digest(
        path,
        only=lambda key: not (only_weights and key.startswith(OPTIMIZER_PREFIX)),
        with_plain_state=not only_weights,
    )
    print(f"{value}  {path}")
    return 0
