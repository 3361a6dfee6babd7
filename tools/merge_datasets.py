"""Join corpora: write the documents of the first corpus, then of the second, and so on.

    python tools/merge_datasets.py --input shards/ --output-prefix data/whole
    python tools/merge_datasets.py --input shards/ --output-prefix data/whole --no-copy

A folder means all its corpora in the order of their names; its shards must be complete.
Shards of several kinds (of several keys, or conversations and their masks) become one corpus for
each kind, with the end of its name after the prefix: data/whole_messages_document.

Tokens are copied without holding them in memory. With --no-copy only the indices are joined; the
tokens stay in the files of the shards, so these files must be kept.
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
    """Flags of the command line."""

    input: tuple[str, ...]
    """A folder of corpora, or their prefixes."""
    output_prefix: str
    """Path without .bin and .idx."""
    no_copy: bool = False
    """Join only the indices; tokens stay in the files of the shards."""
    multimodal: bool = False
    """The corpora hold modes."""


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    """Read the command line."""
    return read_command_line(Flags, argv, description="Join corpora into one.", allow_abbrev=False)


def corpora_of(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes of the named corpora and folders."""
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
    """Group the corpora of shards by the end of their names, for example "_text_document".

    Returns:
        kind -> prefixes in the order given; if any of them is not a shard, all under the kind "".
    """
    kinds: dict[str, list[str]] = {}
    for prefix in prefixes:
        match = _SHARD.fullmatch(prefix)
        if match is None:
            return {"": list(prefixes)}
        kinds.setdefault(match[4], []).append(prefix)
    return kinds


def refuse_missing_shards(prefixes: Sequence[str]) -> None:
    """Refuse a folder with missing shards of an output, left by an array task that failed.

    Raises:
        DataError: names the first missing shard.
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
                rule="the shards of a folder are joined only when all of them exist",
                flags=["--input"],
                fix=f"run task {missing[0]} again; to join only some shards, name each of them",
            )


def merge(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool = False) -> None:
    """Write a corpus with the documents of all corpora."""
    first = IndexedDataset(prefixes[0], multimodal=multimodal)
    bin_path = get_bin_path(output_prefix)
    with IndexedDatasetBuilder(bin_path, dtype=first.dtype, multimodal=multimodal) as builder:
        for prefix in prefixes:
            builder.add_index(prefix)
            print(f"added {prefix}: {builder.num_documents:,} documents so far", flush=True)
        builder.finalize(get_idx_path(output_prefix))
        print(f"{output_prefix}: {builder.num_documents:,} documents", flush=True)


def join(prefixes: Sequence[str], output_prefix: str, *, multimodal: bool = False) -> None:
    """Write an index over all corpora, and the list of their token files."""
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
