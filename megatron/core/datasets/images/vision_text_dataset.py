"""Samples that are packed from conversations about images while training reads them.

The order of an epoch is a keyed permutation. `packing.pack` packs runs of it into samples of one
length; images are read and texts tokenised when a sample is read. The conversations in a sample
follow from the lengths, the seed and the number of the sample alone, so that a run resumes at any
sample, in any layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.core.datasets.images.grid import num_image_tokens, text_and_image_positions
from megatron.core.datasets.images.image_texts import ImageTexts
from megatron.core.datasets.images.patches import PatchShape
from megatron.core.datasets.order.permutation import KeyedPermutation
from megatron.core.datasets.packing import pack
from megatron.core.foundation.errors import DataError
from megatron.core.settings.field_types import check_types

PACKED_AT_ONCE = 1024
"""Number of consecutive conversations that are packed into samples together."""
RAGGED = ("patches", "image_grid_thw")
"""Entries of a sample whose size depends on its images."""


@dataclass(frozen=True, kw_only=True)
class VisionTextConfig:
    """Settings that convert conversations to samples.

    Attributes:
        sequence_length: tokens of a sample.
        random_seed: seed of the order.
        shape: how images become patches.
        image_token: the token of a block of patches.
        before_image, after_image: tokens around an image; None adds no token.
        vocab_size: ids are below it.
        has_patches: decode images; False if no stage of a rank reads them.
    """

    sequence_length: int
    random_seed: int
    shape: PatchShape
    image_token: int
    before_image: int | None
    after_image: int | None
    vocab_size: int
    has_patches: bool = True

    def __post_init__(self) -> None:
        check_types(self)


class VisionTextDataset:
    """Packed samples of conversations with images.

    Args:
        texts: all conversations.
        numbers: conversations of this split.
        num_samples: number of packed sequences; None is one epoch.
        name: name of the split, a part of the order's key.
    Raises:
        DataError: a conversation is longer than a sample, or cannot be read.
    """

    def __init__(
        self,
        texts: ImageTexts,
        numbers: range,
        num_samples: int | None,
        config: VisionTextConfig,
        name: str,
    ) -> None:
        self.texts, self.numbers, self.config, self.name = texts, numbers, config, name
        self.lengths = np.array([self._length(number) for number in numbers], np.int64)
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > config.sequence_length:
            raise DataError(
                f"{texts.place(numbers[longest])}: a conversation of {self.lengths[longest]}"
                " tokens, images included.",
                rule=f"a conversation fits into a row of {config.sequence_length} tokens",
                flags=["--seq-length", "--image-max-pixels"],
                fix=f"use --seq-length {self.lengths[longest]}, or smaller images",
            )
        self._epochs = [self._rows_of_epoch(0)]
        self._first_rows = [0]
        self._num_samples = len(self._epochs[0]) if num_samples is None else num_samples

    def __len__(self) -> int:
        return self._num_samples

    @property
    def samples_per_epoch(self) -> float:
        """Samples of the first epoch."""
        return float(len(self._epochs[0]))

    def order_fingerprint(self) -> dict[str, Any]:
        config = self.config
        return {
            "sample_order": "packed images and texts",
            "seed": config.random_seed,
            "corpus": self.texts.identity(),
            "conversations": [self.numbers.start, self.numbers.stop],
            "sequence_length": config.sequence_length,
            "shape": repr(config.shape),
        }

    def _length(self, number: int) -> int:
        """Return the tokens of a conversation, images and the tokens around them included."""
        config, total = self.config, 0
        around = (config.before_image is not None) + (config.after_image is not None)
        for part in self.texts.parts(number):
            total += len(part.tokens)
            if part.image is not None:
                grid = self._grid(number, part.image)
                total += around + num_image_tokens(grid, config.shape.merge_size)
        return total

    def _grid(self, number: int, image: int) -> tuple[int, int, int]:
        try:
            return self.config.shape.grid(*self.texts.size(number, image))
        except ValueError as error:
            raise DataError(
                f"{self.texts.place(number)}: image {image + 1} has {error}.",
                rule="a side is at most 200 times the other",
                fix="cut the image, or leave the line out",
            ) from None

    def _rows_of_epoch(self, epoch: int) -> list[list[int]]:
        """Return the conversations of each sample, as positions in `numbers`."""
        count = len(self.numbers)
        order = KeyedPermutation(
            count, "images and texts", self.name, self.config.random_seed, epoch
        ).at(np.arange(count))
        rows: list[list[int]] = []
        for begin in range(0, count, PACKED_AT_ONCE):
            run = order[begin : begin + PACKED_AT_ONCE]
            bins = pack(self.lengths[run].tolist(), self.config.sequence_length)
            rows += [run[members].tolist() for members in bins]
        return rows

    def conversations(self, idx: int) -> list[int]:
        """Return the numbers of the conversations of sample `idx`."""
        if not 0 <= idx < len(self):
            raise IndexError(f"sample {idx} of {len(self)}")
        while idx >= self._first_rows[-1] + len(self._epochs[-1]):
            self._first_rows.append(self._first_rows[-1] + len(self._epochs[-1]))
            self._epochs.append(self._rows_of_epoch(len(self._epochs)))
        epoch = int(np.searchsorted(self._first_rows, idx, side="right")) - 1
        return [self.numbers[n] for n in self._epochs[epoch][idx - self._first_rows[epoch]]]

    def __getitem__(self, idx: int | None) -> dict[str, Tensor]:
        """Return one sample; None returns a sample without loss.

        Returns:
            tokens and labels, int64 [s]; loss_mask, float32 [s]; position_ids, int64 [3, s];
            document_starts, int32 [s]; patches, float32 [p, pixels of a patch] and image_grid_thw,
            int64 [images, 3], of all images of the sample. Without `has_patches` p is 0.
        Raises:
            DataError: a line or an image cannot be read; a token id is outside the vocabulary.
        """
        sample = self._row(self.conversations(0 if idx is None else idx))
        if idx is None:
            sample["loss_mask"].zero_()
        return sample

    def _row(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        config, size = self.config, self.config.sequence_length
        tokens, labels = np.zeros(size, np.int64), np.zeros(size, np.int64)
        loss_mask, starts = np.zeros(size, np.float32), np.zeros(size, np.int32)
        positions, patches, grids = [], [], []
        begin = 0
        for number in numbers:
            ids, learned, is_image, own_grids = self._conversation(number)
            end = begin + len(ids)
            tokens[begin:end], labels[begin : end - 1] = ids, ids[1:]
            loss_mask[begin : end - 1] = learned[1:]
            starts[begin:end] = begin
            marks = torch.from_numpy(is_image)
            positions.append(text_and_image_positions(marks, own_grids, config.shape.merge_size))
            if config.has_patches:
                count = len(own_grids)
                patches += [self.texts.patches(number, n, config.shape) for n in range(count)]
            grids += own_grids
            begin = end
        starts[begin:] = begin  # padding is a document of its own
        positions.append(torch.arange(size - begin).expand(3, -1))
        width = config.shape.num_channels * config.shape.temporal_size * config.shape.patch_size**2
        joined = np.concatenate(patches) if patches else np.zeros((0, width), np.float32)
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.cat(positions, 1),
            "document_starts": torch.from_numpy(starts),
            "patches": torch.from_numpy(joined),
            "image_grid_thw": torch.tensor(grids, dtype=torch.int64).view(-1, 3),
        }

    def _conversation(
        self, number: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
        """Return the tokens of a conversation, masks of learned and of image tokens, and grids."""
        config = self.config
        ids: list[int] = []
        learned: list[float] = []
        is_image: list[bool] = []
        grids = []
        for part in self.texts.parts(number):
            if part.image is None:
                ids += part.tokens
                is_image += [False] * len(part.tokens)
                self._check_ids(part.tokens, number)
            else:
                grids.append(self._grid(number, part.image))
                count = num_image_tokens(grids[-1], config.shape.merge_size)
                for token, times in (
                    (config.before_image, 1),
                    (config.image_token, count),
                    (config.after_image, 1),
                ):
                    if token is not None:
                        ids += [token] * times
                        is_image += [token == config.image_token] * times
            learned += [float(part.is_learned)] * (len(ids) - len(learned))
        return np.array(ids, np.int64), np.array(learned, np.float32), np.array(is_image), grids

    def _check_ids(self, tokens: Sequence[int], number: int) -> None:
        config = self.config
        wrong = [t for t in tokens if not 0 <= t < config.vocab_size or t == config.image_token]
        if wrong:
            raise DataError(
                f"{self.texts.place(number)}: token {wrong[0]} in a text.",
                rule=f"ids are below the vocabulary's size of {config.vocab_size}, and"
                f" {config.image_token} is reserved for images",
                flags=["--image-token-id", "--vocab-size"],
                fix="use the tokenizer of the model, and <image> for an image",
            )

    @staticmethod
    def collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """Join samples: [...] becomes [b, ...], and images follow each other."""
        return {
            name: (torch.cat if name in RAGGED else torch.stack)([s[name] for s in samples])
            for name in samples[0]
        }
