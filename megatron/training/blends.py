"""From the data flags to the blends of a dataset config."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron.core.datasets.utils import Split, get_blend_from_list
from megatron.core.errors import DataError


def blends_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return `blend`, `blend_per_split` and `split` for a dataset config.

    All of them None but `split` means synthetic samples.
    """
    if args.mock_data:
        return {"split": args.split}
    if args.data_path or args.data_args_path:
        words = args.data_path or Path(args.data_args_path).read_text().split()
        return {"blend": get_blend_from_list(words), "split": args.split}
    if args.per_split_data_args_path:
        lists = _lists_of(args.per_split_data_args_path)
    else:
        lists = [args.train_data_path, args.valid_data_path, args.test_data_path]
    return {"blend_per_split": [get_blend_from_list(words) for words in lists]}


def _lists_of(path: str) -> list[list[str] | None]:
    """Read {"train": [...], "valid": [...], "test": [...]}."""
    try:
        found = json.loads(Path(path).read_text())
    except ValueError as error:
        raise DataError(
            f"{path} is not JSON: {error}.",
            rule='it holds {"train": [...], "valid": [...], "test": [...]}',
            flags=["--per-split-data-args-path"],
            fix="correct the file",
        ) from None
    return [found.get(split.name) for split in Split]
