"""Write a checkpoint in the format of another program: Megatron-LM, or any other writable format.

SAVE may have any format that --load reads, including Megatron-LM's older format and
DeepSpeed's. In Megatron-LM's torch_dist format, which every megatron-core loads, optimizer state is
written by parameter, as Megatron's distributed optimizer does with
--dist-ckpt-optim-fully-reshardable.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.interop.formats import FORMATS
from megatron.core.dist_checkpointing.interop.opening import write_format
from megatron.core.settings.flags import flag, positional
from tools.checkpoint.opening import PathFlags, opened

WRITABLE = {form.name: form for form in FORMATS if form.write is not None}


@dataclass(frozen=True, kw_only=True)
class Flags(PathFlags):
    """Checkpoint, and the files to write."""

    output: str = positional()
    """Directory to write iter_NNNNNNN and the tracker into."""
    weights: bool = False
    """Leave the optimizer state out."""
    format: str = flag("torch_dist", choices=WRITABLE)
    """Format of the files."""


def run(flags: Flags) -> int:
    """Write the checkpoint and print its path."""
    final = write_format(
        opened(Path(flags.path)),
        Path(flags.output),
        WRITABLE[flags.format],
        with_optimizer=not flags.weights,
    )
    print(f"wrote {final}")
    return 0
