"""The loader that an engine makes of a dataset: each replica reads samples of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset, DistributedSampler

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron_lattice.deepspeed.settings import EngineSettings


class ReplicaLoader:
    """Batches of this replica's samples: an epoch each time it is iterated over."""

    def __init__(self, loader: DataLoader[object], sampler: DistributedSampler[object]) -> None:
        self.loader, self.sampler = loader, sampler
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.sampler.set_epoch(self.epoch)
        self.epoch += 1
        return iter(self.loader)


def replica_loader(
    data: Dataset[object],
    settings: EngineSettings,
    collate_fn: Callable[..., object] | None,
    pg_collection: ProcessGroupCollection,
    batch_size: int | None = None,
) -> ReplicaLoader:
    """Return the batches of this replica's samples; None takes the size of a micro batch."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        data,
        num_replicas=settings.batch.replicas,
        rank=pg_collection.dp_cp.rank(),
        seed=settings["seed"] or 0,
    )
    loader: DataLoader[Any] = DataLoader(
        data,
        batch_size=batch_size or settings.batch.micro,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=settings["dataloader_drop_last"],
    )
    return ReplicaLoader(loader, sampler)
