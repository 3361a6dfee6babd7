"""Enumerations that several layers of the package share."""

from __future__ import annotations

import enum


class ModelType(enum.Enum):
    """Kind of a model that is passed to the training loop."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2
    """Third-party code compares with it; no model here has this type."""


class Fp8Recipe(enum.StrEnum):
    """FP8 scaling recipes of Transformer Engine."""

    delayed = "delayed"
    tensorwise = "tensorwise"
    mxfp8 = "mxfp8"
    blockwise = "blockwise"
    custom = "custom"
