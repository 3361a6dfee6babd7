"""A small language model that reads images, and its samples, for `tests.parity.encoder_case`."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pretrain_vlm
from megatron.core.datasets.images.image_texts import MockImageTexts
from megatron.core.datasets.images.patches import PatchShape
from megatron.core.datasets.images.vision_text_dataset import VisionTextConfig, VisionTextDataset
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.vision.vision_config import VisionConfig
from megatron.core.models.vision.vision_language_model import VisionLanguageModel
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.flags import fields_of
from megatron.training.config.resolved import ResolvedRun
from tests.parity.training_case import SEED

SEQUENCE, VOCABULARY, PATCH = 48, 97, 4
IMAGE, BEFORE, AFTER = 90, 92, 93
PADDED_VOCABULARY = 128


@cache
def dataset(_vocab_file: Path, _classification_head: bool) -> VisionTextDataset:
    """Return computed conversations, several in a row, with images of several sizes or none."""
    shape = PatchShape(
        patch_size=PATCH, merge_size=2, temporal_size=2, min_pixels=64, max_pixels=4096,
        mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5),
    )  # fmt: skip
    config = VisionTextConfig(
        sequence_length=SEQUENCE, random_seed=SEED, shape=shape, image_token=IMAGE,
        before_image=BEFORE, after_image=AFTER, vocab_size=VOCABULARY,
    )  # fmt: skip
    texts = MockImageTexts(IMAGE, 2 * PATCH)
    return VisionTextDataset(texts, range(200), 1000, config, "train")


def build_chunks(run: ResolvedRun, groups: ProcessGroupCollection) -> list[Any]:
    """Build this rank's chunks."""
    config = run.transformer_config
    layout, pp_rank = pipeline_layout(config), groups.pp.rank()
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    found = []
    for chunk in range(num_chunks):
        vp_stage = chunk if num_chunks > 1 else None
        model = VisionLanguageModel(
            config,
            get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, vp_stage=vp_stage, pp_rank=pp_rank
            ),
            vocab_size=PADDED_VOCABULARY,
            max_sequence_length=run.model.max_position_embeddings,
            position_embedding_type=run.model.position_embedding_type,
            rotary_percent=run.model.rotary_percent,
            rotary_base=run.latent_attention.rotary_base,
            pre_process=layout.has_embedding(pp_rank, chunk),
            post_process=layout.has_loss(pp_rank, chunk),
            share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
            vision_config=VisionConfig(**fields_of(VisionConfig, run.vision)),
            pg_collection=groups,
            vp_stage=vp_stage,
        )
        model.freeze(
            freeze_language_model=run.vision.freeze_lm,
            freeze_vision_model=run.vision.freeze_vit,
            freeze_vision_projection=run.vision.freeze_projection,
        )
        found.append(model)
    return found


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """Run one micro batch, as the script does."""
    batch = pretrain_vlm.get_batch(iterator)
    output = pretrain_vlm.call_model(batch, model, batch["labels"])
    return output, partial(pretrain_vlm.loss_func, batch["loss_mask"])


def logits_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """Compute the logits of one micro batch."""
    batch = pretrain_vlm.get_batch(iterator)
    output = pretrain_vlm.call_model(batch, model, None)
    return output, lambda output, non_loss_data: output


def their_logits(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits [b, s, v] of a model of Transformers, and which are of a token [b, s].

    Each conversation is read by itself.
    """
    grids, patches = batch["image_grid_thw"], batch["patches"]
    rows = []
    for ids, starts, positions in zip(
        batch["tokens"], batch["document_starts"], batch["position_ids"], strict=True
    ):
        pieces = []
        for start in starts.unique().tolist():
            where = starts == start
            tokens = ids[where]
            given: dict[str, Any] = {}
            wanted, count = 4 * int((tokens == IMAGE).sum()), 0
            while int(grids[:count].prod(1).sum()) < wanted:
                count += 1
            if count:
                given = {"pixel_values": patches[:wanted], "image_grid_thw": grids[:count]}
                patches, grids = patches[wanted:], grids[count:]
            output = model(
                input_ids=tokens[None], position_ids=positions[:, where][:, None],
                mm_token_type_ids=(tokens == IMAGE).int()[None], use_cache=False, **given,
            )  # fmt: skip
            pieces.append(output.logits[0])
        rows.append(torch.cat(pieces))
    return torch.stack(rows), torch.ones_like(batch["tokens"], dtype=torch.bool)


def their_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a model of Transformers."""
    logits, _ = their_logits(model, batch)
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
