"""Join corpora into one: the documents of the first, then those of the second, and so on.

    python tools/merge_datasets.py --input shards/ --output-prefix data/whole
    python tools/merge_datasets.py --input shards/ --output-prefix data/whole --no-copy

A folder stands for all its corpora in the order of their names; shards in it must be complete.
Shards of several kinds (of several keys, or conversations and their masks) become one corpus for
each kind, with the end of its name after the prefix: data/whole_messages_document.

The tokens are copied, not held in memory; with --no-copy only the indices are joined, and the
tokens stay in the files of the shards, which must then stay too.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron.core.datasets.corpus.files import list_of_parts, parts_path, token_files
from megatron.core.datasets.corpus.index_file import write_index
from megatron.core.datasets.corpus.token_file import AtomicFile
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    check_same_type,
    get_bin_path,
    get_idx_path,
)
from megatron.core.datasets.preprocessing.flags import shard_name
from megatron.core.foundation.errors import DataError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line

_SHARD = re.compile(r"(.*)-(\d{5,})-of-(\d{5,})(_.*)")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    input: tuple[str, ...]
    """A folder of corpora, or their prefixes."""
    output_prefix: str
    """Path without .bin and .idx."""
    no_copy: bool = False
    """Join the indices; the tokens stay where they are."""
    multimodal: bool = False
    """The corpora hold modes."""


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    """Read the command line."""
    return read_command_line(Flags, argv, description="Join corpora into one.", allow_abbrev=False)


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
        found = [os.path.join(name, entry) for entry in entries]
        refuse_missing_shards(found)
        prefixes += found
    return prefixes


def by_kind(prefixes: Sequence[str]) -> dict[str, list[str]]:
    """Group the corpora of shards by what they hold: the end of the name, "_text_document".

    Returns:
        kind -> prefixes in the order given; all under one kind, "", if one of them is no shard.
    """
    kinds: dict[str, list[str]] = {}
    for prefix in prefixes:
        match = _SHARD.fullmatch(prefix)
        if match is None:
            return {"": list(prefixes)}
        kinds.setdefault(match[4], []).append(prefix)
    return kinds


def refuse_missing_shards(prefixes: Sequence[str]) -> None:
    """Refuse a folder in which shards of an output are missing: an array task that died.

    Raises:
        DataError: names the first.
    """
    found: dict[tuple[str, str, str], set[int]] = {}
    for match in filter(None, map(_SHARD.fullmatch, prefixes)):
        found.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    for (output, num_shards, kind), shards in found.items():
        missing = sorted(set(range(int(num_shards))) - shards)
        if missing:
            raise DataError(
                f"{len(missing)} of {int(num_shards)} shards of {output} are missing, "
                f"{shard_name(output, missing[0], int(num_shards))}{kind} first.",
                rule="the shards of a folder are joined when all of them are there",
                flags=["--input"],
                fix=f"run task {missing[0]} again; to join some only, name them one by one",
            )


def merge(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool = False) -> None:
    """Write the corpus that holds all the others."""
    first = IndexedDataset(prefixes[0], multimodal=multimodal)
    bin_path = get_bin_path(output_prefix)
    with IndexedDatasetBuilder(bin_path, dtype=first.dtype, multimodal=multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
            print(f"added {prefix}: {builder.num_documents:,} documents so far", flush=True)
        builder.finalize(get_idx_path(output_prefix))
        print(f"{output_prefix}: {builder.num_documents:,} documents", flush=True)


def join(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool = False) -> None:
    """Write an index over all the corpora, and the list of their token files."""
    bin_path, idx_path = get_bin_path(output_prefix), get_idx_path(output_prefix)
    if os.path.exists(bin_path):
        raise DataError(
            f"{bin_path} exists.",
            rule="a corpus joined without copying has no token file of its own",
            flags=["--output-prefix", "--no-copy"],
            fix="choose another prefix, or remove the pair first",
        )
    corpora = [IndexedDataset(prefix, multimodal=multimodal) for prefix in prefixes]
    for corpus in corpora:
        check_same_type(corpus, corpora[0].dtype)
    before = np.cumsum([0, *map(len, corpora)])
    documents = [c.document_indices[1:] + n for c, n in zip(corpora, before, strict=False)]
    files = [file for prefix in prefixes for file in token_files(get_bin_path(prefix))]
    index, parts = AtomicFile(idx_path), AtomicFile(parts_path(bin_path))
    write_index(
        index,
        dtype=corpora[0].dtype,
        sequence_lengths=np.concatenate([c.sequence_lengths for c in corpora]),
        document_indices=np.concatenate([[0], *documents]),
        sequence_modes=np.concatenate([c.sequence_modes for c in corpora]) if multimodal else None,
    )
    parts.write(list_of_parts(bin_path, files))
    index.flush_to_disk()
    if os.path.exists(idx_path):
        os.unlink(idx_path)
    parts.commit()
    index.commit()
    total = sum(map(len, documents))
    print(f"{output_prefix}: {len(files)} token files, {total:,} documents", flush=True)


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    args = parse_args(argv)
    work = join if args.no_copy else merge
    kinds = by_kind(corpora_of(args.input))
    for kind, prefixes in kinds.items():
        output = args.output_prefix + (kind if len(kinds) > 1 else "")
        work(prefixes, output, multimodal=args.multimodal)
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
