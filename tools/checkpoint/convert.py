"""Write a checkpoint as a Hugging Face model, one tensor at a time.

The way in needs no conversion: `pretrain_gpt.py --load-hf DIRECTORY` reads a model's own files in
any layout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.object_store import place_of
from megatron.hugging_face import write_model
from tools.checkpoint.opening import add_path, opened, size_text

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_path(parser)
    parser.add_argument("target", type=Path, help="directory to make")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the written weights; else as stored")
    parser.add_argument(
        "--companion",
        type=Path,
        metavar="DIRECTORY",
        help="the model that training began with: its tokenizer and generation settings go along",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write, and say what was written."""
    written = write_model(
        opened(place_of(arguments.path)),
        arguments.target,
        dtype=_DTYPES.get(arguments.dtype),
        companion=arguments.companion,
    )
    print(
        f"{arguments.target}: a {written.family} model, {written.num_tensors} tensors,"
        f" {size_text(written.num_bytes)}"
    )
    return 0
