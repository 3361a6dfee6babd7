"""Build datasets of images and texts from the flags."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.datasets.images.image_texts import ImageTexts, JsonLines, MockImageTexts
from megatron.core.datasets.images.patches import PatchShape
from megatron.core.datasets.images.vision_text_dataset import VisionTextConfig, VisionTextDataset
from megatron.core.datasets.order.index_building import split_boundaries, split_bounds
from megatron.core.datasets.preprocessing.chat_template import ChatTemplate, find_chat_template
from megatron.core.datasets.utils import Split
from megatron.core.foundation.errors import ConfigError
from megatron.core.models.model_settings import VisionSettings
from megatron.core.tokenizers.base import TextTokenizer
from megatron.training.config.resolved import ResolvedRun

_NORMALISATION = {
    "qwen2_5_vl": (
        (0.48145466, 0.4578275, 0.40821073),
        (0.26862954, 0.26130258, 0.27577711),
    ),
    "qwen3_vl": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and deviation of red, green and blue: CLIP's values (A. Radford et al., arXiv 2103.00020),
and 0.5."""


def patch_shape(vision: VisionSettings) -> PatchShape:
    """Return the settings for cutting images into patches."""
    mean, std = _NORMALISATION[vision.vision_model_type]
    count = vision.num_channels
    return PatchShape(
        patch_size=vision.patch_dim,
        merge_size=vision.spatial_merge_size,
        temporal_size=vision.temporal_patch_size,
        min_pixels=vision.image_min_pixels,
        max_pixels=vision.image_max_pixels,
        mean=tuple(vision.image_mean or mean[:count]),
        std=tuple(vision.image_std or std[:count]),
    )


def image_text_datasets(
    run: ResolvedRun,
    tokenizer: TextTokenizer,
    num_samples: Sequence[int | None],
    *,
    has_patches: bool = True,
) -> list[VisionTextDataset | None]:
    """Build the train, valid and test datasets.

    Args:
        has_patches: whether this rank's chunk reads images.
    Raises:
        ConfigError, DataError: files cannot be read, or flags are missing.
    """
    vision, model = run.vision, run.model
    assert vision.image_token_id is not None
    config = VisionTextConfig(
        sequence_length=model.seq_length,
        random_seed=run.schedule.seed,
        shape=patch_shape(vision),
        image_token=vision.image_token_id,
        before_image=vision.vision_start_token_id,
        after_image=vision.vision_end_token_id,
        vocab_size=model.unpadded_vocab_size or tokenizer.vocab_size,
        has_patches=has_patches,
    )
    parts = _parts(run, tokenizer)
    return [
        None if part is None or count == 0 else VisionTextDataset(*part, count, config, split.name)
        for split, part, count in zip(Split, parts, num_samples, strict=True)
    ]


def _parts(run: ResolvedRun, tokenizer: TextTokenizer) -> list[tuple[ImageTexts, range] | None]:
    """Return the conversations of train, valid and test."""
    data, vision = run.data, run.vision
    per_split = [data.train_data_path, data.valid_data_path, data.test_data_path]
    if any(per_split):
        template = _template(run)
        files = [JsonLines(p, tokenizer, template) if p else None for p in per_split]
        return [None if texts is None else (texts, range(len(texts))) for texts in files]
    if data.mock_data:
        sizes = (tokenizer.vocab_size, run.model.unpadded_vocab_size, vision.image_token_id)
        vocab_size = min(size for size in sizes if size is not None)
        block = vision.patch_dim * vision.spatial_merge_size
        whole: ImageTexts = MockImageTexts(vocab_size, block, vision.num_channels)
    else:
        whole = JsonLines(data.data_path or [], tokenizer, _template(run))
    split = data.split or ("1,1,1" if data.mock_data else None)
    if split is None:
        raise ConfigError(
            "--data-path without --split.",
            rule="--split sets the shares of train, valid and test",
            flags=["--split"],
            fix="add --split 99,1,0",
        )
    parts = [None if s is None else split_bounds(s, len(whole)) for s in split_boundaries(split)]
    return [(whole, part) if part else None for part in parts]


def _template(run: ResolvedRun) -> ChatTemplate | None:
    """Return the chat template of the flag or of the tokenizer, or None."""
    path, model = run.tokenizer.chat_template, run.tokenizer.tokenizer_model
    if path is not None:
        return find_chat_template(path, model)
    try:
        return find_chat_template(None, model) if model else None
    except ConfigError:
        return None
