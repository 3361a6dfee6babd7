"""Which samples make up the next micro batch of a data-parallel rank.

All state is one number, the samples consumed so far by all ranks together: a sampler made with
that number continues exactly where the last one stopped, whatever the number of loader workers.

A row is the samples that all ranks take for one micro batch: micro_batch_size * dp_size of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from megatron.core.foundation.errors import ConfigError, DataError


class _RowSampler(ABC):
    """Common part: sizes, and the check that something is left."""

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if total_samples <= 0:
            raise DataError(
                f"a dataset of {total_samples} samples.",
                rule="there must be something to train on",
                flags=["--data-path", "--split"],
                fix="give this split more documents or a shorter --seq-length",
            )
        if micro_batch_size <= 0 or not 0 <= data_parallel_rank < data_parallel_size:
            raise ConfigError(
                f"micro batch size {micro_batch_size}, data-parallel rank {data_parallel_rank} "
                f"of {data_parallel_size}.",
                rule="sizes above zero, and a rank below the size",
                flags=["--micro-batch-size"],
            )
        self.total_samples = total_samples
        self.consumed_samples = consumed_samples
        self.micro_batch_size = micro_batch_size
        self.data_parallel_rank = data_parallel_rank
        self.data_parallel_size = data_parallel_size
        self.row_size = micro_batch_size * data_parallel_size

    @abstractmethod
    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield the sample numbers of one micro batch after the other."""


class MegatronPretrainingSampler(_RowSampler):
    """`single`: samples in order; rank r takes the r-th slice of each row.

    Args:
        total_samples: of the dataset.
        consumed_samples: where to begin.
        micro_batch_size: samples of one rank in one micro batch.
        data_parallel_rank: this rank.
        data_parallel_size: ranks.
        drop_last: leave out a last row that is not full; False fills it with None, which datasets
            answer with a sample that carries no loss, so that all ranks take as many steps.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        drop_last: bool = True,
    ) -> None:
        super().__init__(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        self.drop_last = drop_last
        if consumed_samples >= total_samples:
            raise DataError(
                f"{consumed_samples} samples were consumed of a dataset of {total_samples}.",
                rule="a run in order ends with its dataset",
                flags=["--train-iters", "--train-samples", "--dataloader-type"],
                fix="build the dataset for the samples still to come, or use "
                "--dataloader-type cyclic",
            )

    def __len__(self) -> int:
        """Return the micro batches that are left."""
        left = self.total_samples - self.consumed_samples
        return left // self.row_size if self.drop_last else -(-left // self.row_size)

    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield the sample numbers of one micro batch after the other."""
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for row in range(len(self)):
            begin = first + row * self.row_size
            numbers = range(begin, begin + self.micro_batch_size)
            yield [number if number < self.total_samples else None for number in numbers]


class MegatronPretrainingRandomSampler(_RowSampler):
    """`cyclic`: a fresh order in every epoch, without end.

    The order of an epoch depends on its number alone. The samples that do not fill a row are left
    out of each epoch.

    Args:
        dataset: not used; the place it has in the signature that callers know.
        total_samples: of the dataset.
        consumed_samples: where to begin, over all epochs.
        micro_batch_size: samples of one rank in one micro batch.
        data_parallel_rank: this rank.
        data_parallel_size: ranks.
        data_sharding: True gives every rank its own contiguous part of the dataset, shuffled in
            itself; False deals one order of the whole dataset out to the ranks, a micro batch to
            each in turn, so that micro batches hold the same samples with any number of ranks.
    Raises:
        DataError: less than one row, or a start within a row.
    """

    def __init__(
        self,
        dataset: object,
        total_samples: int,
        consumed_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_sharding: bool,
    ) -> None:
        super().__init__(
            total_samples,
            consumed_samples,
            micro_batch_size,
            data_parallel_rank,
            data_parallel_size,
        )
        del dataset
        self.data_sharding = data_sharding
        self.samples_per_epoch = total_samples - total_samples % self.row_size
        if self.samples_per_epoch == 0:
            raise DataError(
                f"a dataset of {total_samples} samples cannot fill one micro batch on "
                f"{data_parallel_size} data-parallel ranks, {self.row_size} samples.",
                rule="an epoch holds at least one micro batch for every rank",
                flags=["--micro-batch-size", "--data-path"],
                fix="use a smaller micro batch, fewer ranks or more data",
            )
        if consumed_samples % self.samples_per_epoch % self.row_size:
            raise DataError(
                f"{consumed_samples} consumed samples end within a row of {self.row_size}.",
                rule="a cyclic order continues at a whole micro batch of all ranks",
                flags=["--micro-batch-size", "--dataloader-type"],
                fix="resume with the micro batch size and data-parallel size of the saved run, or "
                "use --dataloader-type single",
            )

    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield the sample numbers of one micro batch after the other."""
        epoch, begun = divmod(self.consumed_samples, self.samples_per_epoch)
        while True:
            order = self._order_of(epoch, begun)
            for at in range(0, len(order), self.micro_batch_size):
                yield [*order[at : at + self.micro_batch_size]]
            epoch, begun = epoch + 1, 0

    def _order_of(self, epoch: int, begun: int) -> list[int]:
        """Return what this rank takes in an epoch of which `begun` samples are consumed."""
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            per_rank = self.samples_per_epoch // self.data_parallel_size
            order = torch.randperm(per_rank, generator=generator)
            order += self.data_parallel_rank * per_rank
            return order[begun // self.data_parallel_size :].tolist()
        # Whole micro batches of one rank are shuffled, whole rows of all ranks are used.
        shuffled = self.total_samples - self.total_samples % self.micro_batch_size
        order = torch.randperm(shuffled, generator=generator)[begun : self.samples_per_epoch]
        rows = order.view(-1, self.data_parallel_size, self.micro_batch_size)
        return rows[:, self.data_parallel_rank].flatten().tolist()
