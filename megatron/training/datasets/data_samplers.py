"""Choose the samples of the next micro batch of a data-parallel rank.

The only state is the number of samples that all ranks together have consumed: a new sampler with
this number continues exactly after the previous sampler, for any number of loader workers.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron.core.datasets.order.permutation import KeyedPermutation
from megatron.core.foundation.errors import ConfigError, DataError


@dataclass(eq=False)
class PretrainingSampler(ABC):
    """The micro batches of one rank, as lists of sample numbers.

    Args:
        total_samples: samples of the dataset.
        consumed_samples: samples of all ranks before the first micro batch.
        micro_batch_size: samples of one rank in one micro batch.
        data_parallel_rank: this rank.
        data_parallel_size: number of ranks.
    Raises:
        DataError, ConfigError: an empty dataset, or a size that is not positive.
    """

    total_samples: int
    consumed_samples: int
    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        rank, num_ranks = self.data_parallel_rank, self.data_parallel_size
        if self.total_samples <= 0:
            raise DataError(
                f"a dataset of {self.total_samples} samples.",
                rule="a dataset has at least one sample",
                flags=["--data-path", "--split"],
                fix="give this split more documents or a shorter --seq-length",
            )
        if self.micro_batch_size <= 0 or not 0 <= rank < num_ranks:
            raise ConfigError(
                f"micro batch size {self.micro_batch_size}, data-parallel rank {rank} "
                f"of {num_ranks}.",
                rule="sizes above zero, and a rank below the size",
                flags=["--micro-batch-size"],
            )
        self.stride = self.micro_batch_size * num_ranks
        """Samples in one micro batch of all ranks."""

    @abstractmethod
    def __iter__(self) -> Iterator[list[int | None]]:
        """Yield the sample numbers of one micro batch after the other."""


@dataclass(eq=False)
class MegatronPretrainingSampler(PretrainingSampler):
    """`single`: samples in order; rank r takes the r-th slice of each micro batch of all ranks.

    Args:
        drop_last: leave out a last micro batch that is not full on all ranks. False fills it with
            None, for which datasets return a sample without loss, so that all ranks have the same
            number of steps.
    """

    drop_last: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.consumed_samples >= self.total_samples:
            raise DataError(
                f"{self.consumed_samples} samples were consumed of a dataset of "
                f"{self.total_samples}.",
                rule="a run in order ends with its dataset",
                flags=["--train-iters", "--train-samples", "--dataloader-type"],
                fix="build the dataset for the remaining samples, or use --dataloader-type cyclic",
            )

    def __len__(self) -> int:
        """Return the number of remaining micro batches."""
        left = self.total_samples - self.consumed_samples
        return left // self.stride if self.drop_last else -(-left // self.stride)

    def __iter__(self) -> Iterator[list[int | None]]:
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for micro_batch in range(len(self)):
            begin = first + micro_batch * self.stride
            numbers = range(begin, begin + self.micro_batch_size)
            yield [number if number < self.total_samples else None for number in numbers]


class CyclicSampler(PretrainingSampler):
    """`cyclic`: infinitely many epochs, each with a new shuffle of the whole dataset.

    The shuffle depends only on the number of the epoch, and micro batches may continue in the next
    epoch. So global batches contain the same samples for every number of replicas and every micro
    batch size, and a run can resume with other sizes.
    """

    def __iter__(self) -> Iterator[list[int | None]]:
        epoch, order = -1, KeyedPermutation(self.total_samples)
        first = self.consumed_samples + self.data_parallel_rank * self.micro_batch_size
        for begin in itertools.count(first, self.stride):
            batch: list[int | None] = []
            for number in range(begin, begin + self.micro_batch_size):
                if number // self.total_samples != epoch:
                    epoch = number // self.total_samples
                    order = KeyedPermutation(self.total_samples, "cyclic", epoch)
                batch.append(order[number % self.total_samples])
            yield batch


class MegatronPretrainingRandomSampler(PretrainingSampler):
    """`cyclic-megatron`: the reshuffled epochs of Megatron-LM.

    The order depends on the number of replicas and on the micro batch size. An epoch leaves out
    the samples that do not fill a micro batch of all ranks.

    Args:
        dataset: not used; Megatron's signature has it.
        data_sharding: True gives each rank its own contiguous part of the dataset and shuffles
            the part; False shuffles the dataset and gives each rank every `data_parallel_size`-th
            sample.
    Raises:
        DataError: the dataset is smaller than one micro batch of all ranks, or `consumed_samples`
            ends within one.
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
        self.samples_per_epoch = total_samples - total_samples % self.stride
        if self.samples_per_epoch == 0:
            raise DataError(
                f"a dataset of {total_samples} samples cannot fill one micro batch on "
                f"{data_parallel_size} data-parallel ranks, {self.stride} samples.",
                rule="an epoch holds at least one micro batch for every rank",
                flags=["--micro-batch-size", "--data-path"],
                fix="use --dataloader-type cyclic, a smaller micro batch, fewer ranks or more data",
            )
        if consumed_samples % self.samples_per_epoch % self.stride:
            raise DataError(
                f"{consumed_samples} consumed samples end within a micro batch of all ranks, "
                f"{self.stride}.",
                rule="the cyclic order of Megatron-LM continues at a whole micro batch of all "
                "ranks",
                flags=["--micro-batch-size", "--dataloader-type"],
                fix="resume with the micro batch size and data-parallel size of the saved run, or "
                "use --dataloader-type cyclic",
            )

    def __iter__(self) -> Iterator[list[int | None]]:
        epoch, begun = divmod(self.consumed_samples, self.samples_per_epoch)
        while True:
            order = self._order_of(epoch, begun)
            for at in range(0, len(order) - self.micro_batch_size + 1, self.micro_batch_size):
                yield [*order[at : at + self.micro_batch_size]]
            epoch, begun = epoch + 1, 0

    def _order_of(self, epoch: int, begun: int) -> list[int]:
        """Return this rank's samples of an epoch after its first `begun` samples."""
        generator = torch.Generator().manual_seed(epoch)
        if self.data_sharding:
            per_rank = self.samples_per_epoch // self.data_parallel_size
            order = torch.randperm(per_rank, generator=generator)
            order += self.data_parallel_rank * per_rank
            return order[begun // self.data_parallel_size :].tolist()
        shuffled = self.total_samples - self.total_samples % self.micro_batch_size
        order = torch.randperm(shuffled, generator=generator)[begun : self.samples_per_epoch]
        return order[self.data_parallel_rank :: self.data_parallel_size].tolist()
