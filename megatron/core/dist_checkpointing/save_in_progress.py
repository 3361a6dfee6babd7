"""Save a sharded state dict: ranks plan together, write alone, and commit together."""

from __future__ import annotations

import os
import platform
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.dist_checkpointing import typed_json
from megatron.core.dist_checkpointing.collective import as_checkpoint_error, run_collectively
from megatron.core.dist_checkpointing.flat_ranges import Box, describe_box
from megatron.core.dist_checkpointing.manifest import (
    COMMON_NAME,
    ManifestFile,
    Shard,
    build_manifest,
)
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.object_store import ObjectDirectory, StoragePath, storage_path
from megatron.core.dist_checkpointing.shard_file import (
    StoredFile,
    dtype_name,
    hash_of,
    storage_order,
)
from megatron.core.dist_checkpointing.shard_plan import (
    LocalState,
    SavePlan,
    ShardMetadata,
    plan_save,
    split_state,
)
from megatron.core.dist_checkpointing.snapshot import SnapshotBuffer
from megatron.core.dist_checkpointing.writer import CheckpointWriter, writer_for
from megatron.core.foundation.errors import CheckpointError, MegatronError
from megatron.core.transport.object_collectives import ControlGroup, raise_on_all_ranks


@dataclass
class _Piece:
    """One box that this rank writes."""

    key: str
    box: Box
    tensor: Tensor

    @property
    def name(self) -> str:
        """Its name inside the shard file."""
        return self.key + describe_box(self.box)


@dataclass
class _Report:
    """Report of a rank to the coordinator after its write."""

    file: StoredFile | None
    pieces: list[tuple[str, Box]]


class SaveInProgress:
    """A save between its two collective ends: `prepare_save` ... `write` ... `finish`."""

    def __init__(self, peers: ControlGroup, final: StoragePath, info: Mapping[str, object]) -> None:
        self.peers = peers
        self.final = final
        self.info = info
        self.begin("")
        self.pieces: list[_Piece] = []
        self.num_bytes = 0
        """Bytes that this rank writes."""
        self._problem: MegatronError | None = None
        self._report: _Report | None = None
        self._plan: SavePlan | None = None  # coordinator only, like the next two
        self._common = b""
        self._start = time.monotonic()

    def begin(self, run: str) -> CheckpointWriter:
        """Set the name of the run and return the writer of its files."""
        self.run, self.writer = run, writer_for(self.final, run)
        return self.writer

    def assign(self, run: str, shards: Sequence[ShardedTensor], mine: Sequence[int]) -> None:
        """Set the shards that this rank writes, by their numbers `mine`. Local: `finish` raises a
        failure."""
        try:
            self.begin(run)
            held = [(shards[i].key, *piece) for i in mine for piece in shards[i].pieces()]
            pieces = [_Piece(key, box, data) for key, box, data in held if data is not None]
            sizes = [piece.tensor.numel() * piece.tensor.element_size() for piece in pieces]
            order = storage_order([dtype_name(piece.tensor.dtype) for piece in pieces], sizes)
            self.pieces = [pieces[i] for i in order]
            self.num_bytes = sum(sizes)
        except Exception as error:
            self._problem = as_checkpoint_error(error, f"preparing {self.final}")

    def take_snapshot(self, buffer: SnapshotBuffer) -> None:
        """Copy the tensors that this rank writes into `buffer`, so that training may continue."""
        copies = buffer.copy_of([piece.tensor for piece in self.pieces])
        for piece, copied in zip(self.pieces, copies, strict=True):
            piece.tensor = copied

    def write(self, *, in_background: bool = False) -> None:
        """Write this rank's file. Local: may run in a thread; `finish` raises a failure.

        Args:
            in_background: disturb training as little as possible.
        """
        try:
            file = None
            if self.pieces:
                file = self.writer.write(
                    f"__{self.peers.rank}_0.safetensors",
                    [(piece.name, piece.tensor) for piece in self.pieces],
                    {"format": "pt", "checkpoint": self.final.name, "run": self.run},
                    in_background=in_background,
                )
            self._report = _Report(file, [(piece.key, piece.box) for piece in self.pieces])
        except Exception as error:
            self._problem = as_checkpoint_error(error, "writing", self.writer)

    def finish(self) -> None:
        """Commit the checkpoint, or remove all of its files: collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write or the commit failed. The
                partial directory is removed and earlier checkpoints are as they were.
        """
        try:
            gathered = self.peers.gather((self._problem, self._report))
        except MegatronError:  # another rank failed before its gather
            self._abandon()
            raise
        problem = self._problem
        try:
            if gathered is not None and all(p is None for p, _ in gathered):
                self._commit([r for _, r in gathered])
        except Exception as error:
            problem = as_checkpoint_error(error, "committing", self.writer)
        self.cancel_if(problem)
        self.pieces = []

    def cancel_if(self, problem: MegatronError | None) -> None:
        """End the save on every rank if any rank brings a problem: collective."""
        try:
            raise_on_all_ranks(problem, self.peers)
        except MegatronError:
            self._abandon()
            raise

    def _abandon(self) -> None:
        self.pieces = []
        if self.peers.rank == 0:
            self.writer.abort()

    def _commit(self, reports: list[_Report]) -> None:
        """Write everything but the shards and make the checkpoint exist. Coordinator only."""
        assert self._plan is not None
        files, shards = {}, {key: [] for key in self._plan.tensors}  # type: ignore[var-annotated]
        for rank, report in enumerate(reports):
            stored = report.file
            if stored is None:
                continue
            self._check_visible(rank, stored)
            files[stored.name] = ManifestFile.of(stored)
            for (key, (offset, shape)), s in zip(report.pieces, stored.shards, strict=True):
                shards[key].append(Shard(offset, shape, stored.name, s.begin, s.hashes))
        files[COMMON_NAME] = ManifestFile(len(self._common), hash_of(self._common))
        manifest = build_manifest(
            self.final.name, self.run, files, self._plan.tensors, shards, self.info
        )
        self.writer.commit(self._common, manifest)

    def _check_visible(self, rank: int, stored: StoredFile) -> None:
        size = self.writer.size_of(stored.name)
        if size != stored.size:
            raise CheckpointError(
                f"rank {rank} wrote {stored.name} to {self.writer}, but rank 0 finds {size} "
                f"instead of {stored.size} bytes.",
                rule="all ranks save into one shared directory",
                flags=["--save"],
                fix="use a file system that all nodes share",
            )


def prepare_save(
    state: ShardedStateDict,
    directory: str | os.PathLike[str] | ObjectDirectory,
    *,
    peers: ControlGroup,
    info: Callable[[], Mapping[str, object]] = dict,
    spread_over_replicas: bool = True,
) -> SaveInProgress:
    """Agree on the shards that each rank writes, and create the staging directory: collective.

    Args:
        state: nested dicts and lists of declarations and plain values.
        directory: the checkpoint, for example SAVE/iter_0000010; it appears at `finish`.
        info: returns JSON metadata for the manifest (layout, configuration, data fingerprint).
        spread_over_replicas: balance the bytes over all holders of a shard; otherwise the main
            replica writes it.
    """

    def describe() -> tuple[SaveInProgress, LocalState, list[ShardMetadata]]:
        save = SaveInProgress(peers, storage_path(directory), _versions() | dict(info()))
        local = split_state(state, with_common=peers.rank == 0)
        return save, local, [ShardMetadata.of(shard) for shard in local.shards]

    save, local, declared = run_collectively(peers, "describing the state to save", describe)
    gathered = peers.gather((declared, local.objects))

    def decide() -> list[Any] | None:
        if gathered is None:
            return None
        declarations, objects = zip(*gathered, strict=True)
        plan = plan_save(list(declarations), spread_over_replicas=spread_over_replicas)
        common = _common_bytes(local.common, list(objects))
        writer = save.begin(secrets.token_hex(6))
        writer.prepare(sum(plan.bytes_per_rank) + len(common))
        save._plan, save._common = plan, common
        return [(save.run, mine) for mine in plan.writes]

    answers = run_collectively(peers, f"preparing {save.final}", decide)
    run, mine = peers.scatter(answers)
    save.assign(run, local.shards, mine)
    return save


def _common_bytes(common: Any, objects: list[dict[str, Any]]) -> bytes:
    merged: dict[str, Any] = {}
    for rank, found in enumerate(objects):
        for key, form in found.items():
            if key in merged:
                raise CheckpointError(
                    f"rank {rank} and a lower one both hold the main replica of object {key!r}.",
                    rule="each object has exactly one replica with replica_id 0",
                )
            merged[key] = form
    return typed_json.dump_bytes({"common": common, "objects": merged})


def _versions() -> dict[str, Any]:
    from importlib import metadata

    try:
        own = metadata.version("megatron-lattice")
    except metadata.PackageNotFoundError:
        own = "source tree"
    return {
        "versions": {
            "megatron-lattice": own,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    }
