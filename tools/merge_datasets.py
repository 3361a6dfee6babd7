"""Join corpora into one: the documents of the first, then those of the second, and so on.

    python tools/merge_datasets.py --input shards/ --output-prefix data/whole

A folder stands for all its corpora in the order of their names. The tokens are copied, not
held in memory.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir))

from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.errors import DataError, MegatronError


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Join corpora into one.", allow_abbrev=False)
    parser.add_argument(
        "--input", required=True, nargs="+", help="a folder of corpora, or their prefixes"
    )
    parser.add_argument("--output-prefix", required=True, help="path without .bin and .idx")
    parser.add_argument("--multimodal", action="store_true", help="the corpora hold modes")
    return parser.parse_args(argv)


def corpora_of(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes that the arguments stand for."""
    prefixes: list[str] = []
    for name in inputs:
        if not os.path.isdir(name):
            prefixes.append(name.removesuffix(".idx").removesuffix(".bin"))
            continue
        entries = sorted(entry[:-4] for entry in os.listdir(name) if entry.endswith(".idx"))
        if not entries:
            raise DataError(
                f"{name} holds no corpus.",
                rule="a folder of .bin/.idx pairs",
                flags=["--input"],
            )
        prefixes += [os.path.join(name, entry) for entry in entries]
    return prefixes


def merge(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool = False) -> None:
    """Write the corpus that holds all the others."""
    first = IndexedDataset(prefixes[0], multimodal=multimodal)
    bin_path = get_bin_path(output_prefix)
    with IndexedDatasetBuilder(bin_path, dtype=first.dtype, multimodal=multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
            print(f"added {prefix}: {builder.num_documents:,} documents so far", flush=True)
        builder.finalize(get_idx_path(output_prefix))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    args = parse_args(argv)
    try:
        merge(corpora_of(args.input), args.output_prefix, multimodal=args.multimodal)
    except MegatronError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
