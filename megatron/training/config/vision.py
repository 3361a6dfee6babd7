"""Flags of models that read images."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.models.vision.vision_config import VisionConfig
from megatron.core.settings.flags import SettingsGroup, flag


@dataclass(kw_only=True)
class VisionSettings(SettingsGroup, VisionConfig):
    """Images: their encoder, what of the model is trained, and how samples are made of them."""

    freeze_lm: bool = flag(False, "--freeze-LM", name="freeze_LM")
    """Leave the language model as it is, and train what reads images."""
    freeze_vit: bool = flag(False, "--freeze-ViT", name="freeze_ViT")
    """Leave the encoder of images as it is."""
    freeze_projection: bool = False
    """Leave what maps the encoder's output to the language model as it is."""
    vision_start_token_id: int | None = None
    """Token before an image. Default none."""
    vision_end_token_id: int | None = None
    """Token after an image. Default none."""
    image_min_pixels: int = 3136
    """A smaller image is enlarged to so many pixels."""
    image_max_pixels: int = 1003520
    """A larger image is made smaller, to at most so many pixels."""
    image_mean: list[float] | None = flag(None, nargs="+")
    """What is subtracted from the red, green and blue of a pixel, of 1. Default that of the kind of
    encoder."""
    image_std: list[float] | None = flag(None, nargs="+")
    """By what the rest is divided."""
