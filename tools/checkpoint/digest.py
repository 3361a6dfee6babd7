"""Print a hash of the state, independent of the layout of the run that saved it.

Equal state gives an equal digest in any layout and under any padding of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.dist_checkpointing.object_store import storage_path
from tools.checkpoint.opening import OPTIMIZER_PREFIX, PathFlags, checkpoint_in, opened
from tools.checkpoint.state_digest import checkpoint_digest, tensor_digests


@dataclass(frozen=True, kw_only=True)
class Flags(PathFlags):
    """State to hash."""

    weights: bool = False
    """Hash the model alone."""
    each: bool = False
    """Print one digest per tensor."""


def run(flags: Flags) -> int:
    """Print the digest and return 0."""
    path = checkpoint_in(storage_path(flags.path))
    if flags.each:
        for key, value in tensor_digests(opened(path)):
            print(f"{value}  {key}")
        return 0
    only_weights = flags.weights
    value = checkpoint_digest(
        path,
        only=lambda key: not (only_weights and key.startswith(OPTIMIZER_PREFIX)),
        with_plain_state=not only_weights,
    )
    print(f"{value}  {path}")
    return 0
