"""A language model that reads images: the encoder's output replaces token embeddings.

H. Liu et al., "Visual Instruction Tuning", section 4.1, arXiv 2304.08485 (encoder, projector,
decoder); P. Wang et al., "Qwen2-VL", arXiv 2409.12191 (images of any size, positions in time,
height and width); "Qwen3-VL Technical Report", arXiv 2511.21631 (DeepStack: encoder states are
added in several layers).

Legend: s sequence, b micro-batch, h hidden, p patches and i tokens of all images of a micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.datasets.images.grid import Grid, grids_of, num_image_tokens
from megatron.core.foundation.device import check
from megatron.core.foundation.errors import ConfigError, DataError, raise_together
from megatron.core.inference.contexts.static_context import StaticInferenceContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.vision.vision_config import VisionConfig
from megatron.core.models.vision.vision_transformer import VisionTransformer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig

_MISMATCH = "the number of image tokens differs from the number of blocks of patches"


@dataclass(frozen=True)
class _Places:
    """Positions of image tokens in the hidden states [s, b, h], or in this rank's shard.

    The tensors have fixed shapes, so that the host does not wait for the device.
    """

    is_image: Tensor
    """bool [s, b, 1]."""
    block: Tensor
    """int64 [s, b]: index of the block of an image token; any index for other tokens."""

    def put(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Replace the image tokens of [s, b, h] with blocks of [i, h]."""
        return torch.where(self.is_image, tokens[self.block].to(states.dtype), states)


class VisionLanguageModel(GPTModel):
    """One pipeline stage (or all) of a language model with an image encoder.

    The encoder and its projectors are `vision_model` on the first stage; all other parts are a
    `GPTModel`, with the same parameter names.

    Args: see `GPTModel`, and
        vision_config: settings of the encoder.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        vision_config: VisionConfig,
        **options: Any,
    ) -> None:
        raise_together(
            vision_config.problems(config.tensor_model_parallel_size), summary="VisionConfig"
        )
        _check(config)
        options["vision_model"] = partial(VisionTransformer, vision_config, config)
        super().__init__(config, *args, **options)
        self.vision_config = vision_config
        num_layers = len(self.decoder.layers)
        if self.pre_process and len(vision_config.layers_added) > num_layers:
            raise ConfigError(
                f"--deepstack-layers names {len(vision_config.layers_added)} layers, and the first"
                f" pipeline stage has {num_layers} of the language model.",
                rule="the states added after the first layers are computed on the first stage",
                flags=["--deepstack-layers", "--pipeline-model-parallel-layout"],
                fix="give the first stage more layers",
            )

    def freeze(
        self,
        freeze_language_model: bool = False,
        freeze_vision_model: bool = False,
        freeze_vision_projection: bool = False,
    ) -> None:
        """Freeze parts of the model: their parameters get no gradient.

        Args:
            freeze_language_model: embedding, decoder and head.
            freeze_vision_model: the encoder without its projectors.
            freeze_vision_projection: the projectors.
        """
        for name, parameter in self.named_parameters():
            is_vision = name.startswith("vision_model.")
            is_projection = is_vision and "merger" in name.split(".")[1]
            frozen = freeze_vision_model if is_vision else freeze_language_model
            if freeze_vision_projection if is_projection else frozen:
                parameter.requires_grad_(False)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None,
        position_ids: Tensor | None,
        attention_mask: Tensor | None,
        decoder_input: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        patches: Tensor | None = None,
        image_grid_thw: Tensor | list[Grid] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        loss_mask: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        inference_context: StaticInferenceContext | None = None,
    ) -> Tensor:
        """Run this stage.

        Args:
            position_ids: [3, b, s] (`images.grid.text_and_image_positions`), on every stage.
            patches: [p, channels * frames * patch * patch], of all images in the order of their
                tokens, sample by sample; None without images. Only the first stage reads them.
            image_grid_thw: [images, 3], grids of the images.
            others: see `GPTModel.forward`.
        Returns:
            see `GPTModel.forward`.
        Raises:
            DataError: image tokens, grids and patches contradict each other.
        """
        added: list[Tensor] = []
        if self.pre_process and decoder_input is None:
            assert input_ids is not None
            decoder_input = self.embedding(input_ids=input_ids, position_ids=None)
            decoder_input, added = self._with_images(
                decoder_input, input_ids, patches, image_grid_thw
            )
        return super().forward(
            input_ids,
            position_ids,
            attention_mask,
            decoder_input,
            labels,
            packed_seq_params=packed_seq_params,
            loss_mask=loss_mask,
            extra_block_kwargs={"added_states": added} if added else None,
            runtime_gather_output=runtime_gather_output,
            inference_context=inference_context,
        )

    def _with_images(
        self,
        states: Tensor,
        input_ids: Tensor,
        patches: Tensor | None,
        image_grid_thw: Tensor | list[Grid] | None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Replace the image tokens in the embedded text [s, b, h] (or in this rank's shard).

        Returns:
            (the states, and the states to add after each of the first decoder layers).
        """
        merge = self.vision_config.spatial_merge_size
        grids = [] if image_grid_thw is None else grids_of(image_grid_thw)
        has_images = bool(grids)
        if not has_images or patches is None:
            # All replicas must run the encoder, because they reduce its gradients together.
            grids, patches = [(1, merge, merge)], states.new_zeros(merge**2, self._patch_size)
        self._check_images(input_ids, patches, grids, has_images)
        tokens, added = self.vision_model(patches, grids)
        if not has_images:
            for part in (tokens, *added):
                states = states + part.sum().to(states.dtype) * 0.0
            return states, []
        if self.config.sequence_parallel:
            # Each rank uses the image tokens of its shard: the gradient is the sum over ranks.
            tp = self.pg_collection.tp
            tokens = copy_to_tensor_model_parallel_region(tokens, group=tp)
            added = [copy_to_tensor_model_parallel_region(part, group=tp) for part in added]
        places = self._places(input_ids)
        empty = torch.zeros_like(states)
        return places.put(states, tokens), [places.put(empty, part) for part in added]

    @property
    def _patch_size(self) -> int:
        vision = self.vision_config
        return vision.num_channels * vision.temporal_patch_size * vision.patch_dim**2

    def _is_image(self, input_ids: Tensor) -> Tensor:
        """Return the mask [b, s] of image tokens."""
        return torch.eq(input_ids, self.vision_config.image_token_id or 0)

    def _places(self, input_ids: Tensor) -> _Places:
        """Return the image tokens of [b, s] in this rank's shard."""
        is_image = self._is_image(input_ids)
        numbers = (is_image.flatten().cumsum(0) - 1).view_as(input_ids)
        if self.config.sequence_parallel:
            tp = self.pg_collection.tp
            is_image, numbers = (x.chunk(tp.size(), 1)[tp.rank()] for x in (is_image, numbers))
        return _Places(is_image.t().unsqueeze(-1), numbers.t().clamp(min=0))

    def _check_images(
        self, input_ids: Tensor, patches: Tensor, grids: list[Grid], has_images: bool
    ) -> None:
        """Raise if image tokens, grids and patches contradict each other."""
        merge = self.vision_config.spatial_merge_size
        odd = [grid for grid in grids if grid[1] % merge or grid[2] % merge or min(grid) < 1]
        num_patches = sum(t * h * w for t, h, w in grids)
        if odd or patches.shape != (num_patches, self._patch_size):
            raise _problem(f"patches of shape {tuple(patches.shape)} for grids {odd or grids}")
        count = sum(num_image_tokens(grid, merge) for grid in grids) if has_images else 0
        is_image = self._is_image(input_ids)
        if not check(is_image.sum() == count, _MISMATCH):
            raise _problem(f"{int(is_image.sum())} image tokens, {count} blocks of patches")


def _problem(found: str) -> DataError:
    return DataError(
        f"images: {found}.",
        rule="an image with grid t x h x w has t * h * w patches and t * h * w / m^2 image tokens,"
        " where h and w are multiples of --spatial-merge-size m",
        flags=["--image-token-id", "--patch-dim", "--spatial-merge-size"],
        fix="make samples with the dataset of pretrain_vlm.py",
    )


def _check(config: TransformerConfig) -> None:
    """Raise if the language model does not support images."""
    asked = {
        "--context-parallel-size": config.context_parallel_size > 1,
        "--hybrid-context-parallel": config.hybrid_context_parallel,
        "--mtp-num-layers": bool(config.mtp_num_layers),
        "--multi-latent-attention": config.multi_latent_attention,
        "--hybrid-layer-pattern": bool(config.hybrid_layer_pattern),
        "--experimental-attention-variant": any(
            kind.is_sparse or kind.is_compressed for kind in config.layer_kinds()
        ),
        "--use-mup": config.use_mup,
        "--altup-num-inputs": config.altup_num_inputs > 1,
    }
    wrong = [flag for flag, is_on in asked.items() if is_on]
    if wrong:
        raise ConfigError(
            f"{', '.join(wrong)} for a model that reads images.",
            rule="its decoder has plain attention or recurrent mixers in layers with an MLP, and a"
            " rank has whole sequences",
            flags=wrong,
            fix="drop these flags",
        )


__all__ = ["VisionLanguageModel"]
