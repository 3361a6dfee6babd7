"""Load and export Hugging Face models; the coordinator opens and writes their files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.collective import run_collectively, run_on_coordinator
from megatron.core.dist_checkpointing.loader import open_contents
from megatron.core.dist_checkpointing.object_store import StoragePath
from megatron.core.tokenizers.base import TextTokenizer
from megatron.core.transport.object_collectives import ControlGroup
from megatron.hugging_face import (
    ModelContents,
    Written,
    load_adapters,
    open_model,
    read_adapters,
    read_model_directory,
    write_adapters,
    write_model,
)
from megatron.hugging_face.writing import PRECISIONS
from megatron.training.checkpointing.run_state import CheckpointContext


def open_collectively(
    directory: Path, context: CheckpointContext, peers: ControlGroup
) -> ModelContents:
    """Open a model for the loader. Collective."""
    reads_images = context.args.get("architecture") == "vlm"
    return run_on_coordinator(
        peers,
        lambda: open_model(directory, reads_images=reads_images),
        doing="opening",
        path=directory,
    )


def note_on_precision(directory: Path, dtype: torch.dtype) -> str | None:
    """Return a log line if the model is stored in half precision and trained in fp32."""
    fields = read_model_directory(directory).fields
    stored = fields.get("dtype") or fields.get("torch_dtype")
    flags = {"bfloat16": "--bf16", "float16": "--fp16"}
    if dtype != torch.float32 or stored not in flags:
        return None
    return (
        f"  the model in {directory} is stored as {stored} and trained in float32;"
        f" {flags[stored]} computes in {stored} with fp32 main weights"
    )


def write_collectively(
    checkpoint: StoragePath,
    directory: Path,
    *,
    companion: Path | None,
    make_tokenizer: Callable[[], TextTokenizer] | None = None,
    has_adapters: bool = False,
    dtype: str | None = None,
    peers: ControlGroup,
) -> Written:
    """Write a checkpoint as a Hugging Face model. Collective; the coordinator writes.

    Args:
        companion: directory of the model that the run began with.
        make_tokenizer: opens the tokenizer to write; None copies the companion's tokenizer.
        has_adapters: the checkpoint contains adapters only, which are merged into `companion`.
        dtype: a key of `PRECISIONS`; None keeps the stored precision.
    """
    precision = None if dtype is None else PRECISIONS[dtype]
    contents = open_contents(checkpoint, peers=peers)

    def write() -> Written:
        tokenizer = None if make_tokenizer is None else make_tokenizer()
        options: dict[str, Any] = {"companion": companion, "tokenizer": tokenizer}
        if not has_adapters:
            return write_model(contents, directory, dtype=precision, **options)
        assert companion is not None, "adapters are merged into their base model"
        base = open_model(companion)
        return write_model(base, directory, dtype=precision, adapters=contents, **options)

    return run_on_coordinator(peers, write, doing="writing", path=directory)


def write_adapters_collectively(
    checkpoint: StoragePath, directory: Path, *, base: str | None, peers: ControlGroup
) -> None:
    """Write the adapters of a checkpoint for PEFT. Collective; the coordinator writes."""
    contents = open_contents(checkpoint, peers=peers)
    run_on_coordinator(
        peers,
        lambda: write_adapters(contents, directory, base=base),
        doing="writing",
        path=directory,
    )


def load_adapters_collectively(
    path: Path, base: Path, context: CheckpointContext, peers: ControlGroup
) -> None:
    """Load the adapters of a run from a PEFT directory. Collective.

    Args:
        base: directory of the base model.
    Raises:
        CheckpointError: on all ranks, if one rank cannot read the adapters.
    """

    def load() -> None:
        adapter = read_adapters(path, read_model_directory(base))
        load_adapters(adapter, list(context.model), context.groups)

    run_collectively(peers, "reading", load, path)
