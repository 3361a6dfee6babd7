"""Enumerations that several layers of the package share."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """Kind of model that the training loop is given."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    """Code compares with it; models here are decoders, and none is of this kind."""


class Fp8Recipe(enum.StrEnum):
    """FP8 scaling recipes of Transformer Engine."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"
