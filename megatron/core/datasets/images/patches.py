"""From an image to patches: resize, normalise, cut.

The sizes equal the sizes in Qwen2-VL's processor ("Qwen2-VL", section 2.1, arXiv 2409.12191): an
image keeps its proportions and, within bounds, its number of pixels; its sides become whole numbers
of blocks. Pillow decodes the images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.core.datasets.images.grid import Grid
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require

LARGEST_RATIO = 200
"""Largest ratio of an image's sides: a longer strip would become a single row of blocks."""


@dataclass(frozen=True, kw_only=True)
class PatchShape:
    """Settings that convert images to patches.

    Attributes:
        patch_size: pixels of a side of a patch.
        merge_size: patches of a side of a block.
        temporal_size: frames of a patch.
        min_pixels, max_pixels: bounds of the pixels of a resized image.
        mean, std: mean and deviation of red, green and blue in 0 ... 1.
    """

    patch_size: int
    merge_size: int
    temporal_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.block**2 <= self.max_pixels or self.min_pixels > self.max_pixels:
            raise ConfigError(
                f"images between {self.min_pixels} and {self.max_pixels} pixels, of blocks of"
                f" {self.block} x {self.block}.",
                rule="an image is at least one block",
                flags=["--image-min-pixels", "--image-max-pixels", "--patch-dim"],
                fix=f"use --image-max-pixels {max(self.block**2, self.min_pixels)}",
            )
        if not len(self.mean) == len(self.std) > 0 or min(self.std) <= 0:
            raise ConfigError(
                f"--image-mean {self.mean} and --image-std {self.std}.",
                rule="each channel has a mean and a positive deviation",
                flags=["--image-mean", "--image-std", "--num-channels"],
                fix="leave them out to use the values of the encoder",
            )

    @property
    def block(self) -> int:
        """Pixels of a side of a block."""
        return self.patch_size * self.merge_size

    @property
    def num_channels(self) -> int:
        """Channels of an image: 3, or 1 for grey."""
        return len(self.mean)

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the sides of a resized image.

        Raises:
            ValueError: the image is a strip.
        """
        if max(height, width) > LARGEST_RATIO * min(height, width):
            raise ValueError(f"sides of {height} and {width} pixels")
        block, pixels = self.block, height * width
        sides = [max(block, round(side / block) * block) for side in (height, width)]
        if math.prod(sides) > self.max_pixels:
            shrink = math.sqrt(pixels / self.max_pixels)
            sides = [max(block, math.floor(s / shrink / block) * block) for s in (height, width)]
        elif math.prod(sides) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / pixels)
            sides = [math.ceil(s * grow / block) * block for s in (height, width)]
        return sides[0], sides[1]

    def grid(self, height: int, width: int) -> Grid:
        """Return the patches of an image of these sides, before it is resized."""
        rows, columns = self.resized(height, width)
        return 1, rows // self.patch_size, columns // self.patch_size

    def patches(self, image: Any) -> np.ndarray:
        """Return the patches of an image of Pillow, fp32 [p, channels * frames * patch * patch]."""
        library = require("PIL.Image", purpose="images in samples")
        image = image.convert("L" if self.num_channels == 1 else "RGB")
        height, width = self.resized(image.height, image.width)
        if (height, width) != (image.height, image.width):
            image = image.resize((width, height), library.Resampling.BICUBIC)
        pixels = np.asarray(image, np.float32).reshape(height, width, self.num_channels) / 255
        mean, std = np.array(self.mean, np.float32), np.array(self.std, np.float32)
        pixels = (pixels - mean) / std
        m, p = self.merge_size, self.patch_size
        cut = pixels.reshape(height // self.block, m, p, width // self.block, m, p, -1)
        # -> blocks by row and column, patches of a block by row and column, channels, pixels
        ordered = cut.transpose(0, 3, 1, 4, 6, 2, 5)
        flat = ordered.reshape(-1, self.num_channels, 1, p * p)
        frames = np.repeat(flat, self.temporal_size, axis=2)
        return np.ascontiguousarray(frames.reshape(len(frames), -1))
