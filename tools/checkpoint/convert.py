"""Write a checkpoint as a Hugging Face model, one tensor at a time.

The way in needs no conversion: `pretrain_gpt.py --load-hf DIRECTORY` reads a model's own files in
any layout.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.hugging_face import open_model, write_adapters, write_model
from tools.checkpoint.opening import add_path, opened, size_text

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_path(parser)
    parser.add_argument("target", type=Path, help="directory to make")
    parser.add_argument("--dtype", choices=_DTYPES, help="of the written weights; else as stored")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="write the low-rank adapters of the checkpoint for PEFT, instead of a whole model",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIRECTORY",
        help="the Hugging Face model into which the adapters of the checkpoint are merged; with"
        " --adapter, the one that they belong to",
    )
    parser.add_argument(
        "--companion",
        type=Path,
        metavar="DIRECTORY",
        help="the model that training began with: its tokenizer and generation settings go along",
    )


def run(arguments: argparse.Namespace) -> int:
    """Write, and say what was written."""
    contents = opened(storage_path(arguments.path))
    base = arguments.base
    if arguments.adapter:
        write_adapters(contents, arguments.target, base=None if base is None else str(base))
        print(f"{arguments.target}: adapters for PEFT")
        return 0
    written = write_model(
        contents if base is None else open_model(base),
        arguments.target,
        adapters=None if base is None else contents,
        dtype=_DTYPES.get(arguments.dtype),
        companion=arguments.companion or base,
    )
    print(
        f"{arguments.target}: a {written.family} model, {written.num_tensors} tensors,"
        f" {size_text(written.num_bytes)}"
    )
    return 0
