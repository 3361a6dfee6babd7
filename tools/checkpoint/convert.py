"""Write a checkpoint as a Hugging Face model, one tensor at a time.

To load a Hugging Face model, no conversion is needed: `pretrain_gpt.py --load-hf DIRECTORY` reads
the model's own files in any layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.settings.flags import flag, positional
from megatron.hugging_face import open_model, write_adapters, write_model
from megatron.hugging_face.writing import PRECISIONS
from tools.checkpoint.opening import PathFlags, opened, size_text


@dataclass(frozen=True, kw_only=True)
class Flags(PathFlags):
    """Checkpoint, and the model to write."""

    target: Path = positional()
    """Directory to create."""
    dtype: str | None = flag(None, choices=PRECISIONS)
    """Type of the written weights; by default the stored type. fp8-block: blocks of 128 x 128."""
    adapter: bool = False
    """Write the low-rank adapters of the checkpoint for PEFT, instead of a whole model."""
    base: Path | None = flag(None, metavar="DIRECTORY")
    """Hugging Face model to merge the checkpoint's adapters into; with --adapter, the model of the
    adapters."""
    companion: Path | None = flag(None, metavar="DIRECTORY")
    """Model that training started from; its tokenizer and generation settings are copied."""


def run(flags: Flags) -> int:
    """Write the model and print a summary."""
    contents = opened(storage_path(flags.path))
    base = flags.base
    if flags.adapter:
        write_adapters(contents, flags.target, base=None if base is None else str(base))
        print(f"{flags.target}: adapters for PEFT")
        return 0
    written = write_model(
        contents if base is None else open_model(base),
        flags.target,
        adapters=None if base is None else contents,
        dtype=PRECISIONS.get(flags.dtype),
        companion=flags.companion or base,
    )
    print(
        f"{flags.target}: a {written.family} model, {written.num_tensors} tensors,"
        f" {size_text(written.num_bytes)}"
    )
    return 0
