"""Pretrain a language model that reads images: `torchrun --nproc-per-node 4 pretrain_vlm.py ...`.

Without torchrun it trains in one process. `--dry-run` prints the effect of a command. The corpus
is a file of JSON lines, each a conversation with its images: see docs/vision_language.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.enums import ModelType
from megatron.core.foundation import device
from megatron.core.models.vision.vision_config import VisionConfig
from megatron.core.models.vision.vision_language_model import VisionLanguageModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.flags import fields_of
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_timers, get_tokenizer, pretrain
from megatron.training.config.resolved import ResolvedRun
from megatron.training.datasets.image_texts import image_text_datasets
from megatron.training.setup.layer_spec import layer_spec
from megatron_lattice import read_deepspeed_config

ENTRIES = (
    "tokens", "labels", "loss_mask", "position_ids", "document_starts", "patches", "image_grid_thw",
)  # fmt: skip
"""Entries of a micro batch that a step reads."""


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    run: ResolvedRun,
) -> VisionLanguageModel:
    """Build one chunk of the model: all of it without pipeline parallelism."""
    model, vision = run.model, run.vision
    chunk = VisionLanguageModel(
        config=config,
        transformer_layer_spec=layer_spec(model, config, vp_stage),
        vocab_size=run.tokenizer.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        rotary_base=run.latent_attention.rotary_base,
        rope_scaling=model.use_rope_scaling,
        rope_scaling_factor=model.rope_scaling_factor,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        vision_config=VisionConfig(**fields_of(VisionConfig, vision)),
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )
    chunk.freeze(
        freeze_language_model=vision.freeze_lm,
        freeze_vision_model=vision.freeze_vit,
        freeze_vision_projection=vision.freeze_projection,
    )
    return chunk


def get_batch(data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Any]:
    """Return the next micro batch: every stage reads positions and documents."""
    batch, where = next(data_iterator), device.current_device()
    # The host reads the grids to determine the sizes of the work, so they stay on the host.
    grids = batch["image_grid_thw"]
    moved = {name: batch[name].to(where, non_blocking=True) for name in ENTRIES}
    return {**moved, "image_grid_thw": grids, "position_ids": moved["position_ids"].transpose(0, 1)}


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses [b, s] of learned tokens; the mean is over the whole global batch."""
    # fp32: in bf16, a sum over thousands of tokens has only three digits.
    loss = torch.sum(output.float() * loss_mask)
    num_tokens = loss_mask.sum()
    return loss, num_tokens.int(), {"lm loss": torch.stack([loss.detach(), num_tokens])}


def call_model(batch: dict[str, Any], model: Any, labels: Tensor | None) -> Tensor:
    """Run a micro batch through this rank's part of the model; logits without `labels`."""
    output: Tensor = model(
        batch["tokens"],
        batch["position_ids"],
        None,
        labels=labels,
        patches=batch["patches"],
        image_grid_thw=batch["image_grid_thw"],
        packed_seq_params=PackedSeqParams(seq_idx=batch["document_starts"]),
    )
    return output


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple:
    """Run one micro batch through this rank's part of the model."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    return call_model(batch, model, batch["labels"]), partial(loss_func, batch["loss_mask"])


def datasets_provider(
    num_samples: Sequence[int | None], vp_stage: int | None = None, *, run: ResolvedRun
) -> list:
    """Build the train, valid and test datasets; only the stage of the embedding reads images."""
    layout = pipeline_layout(run.transformer_config)
    pp_rank = ProcessGroupCollection.current().pp.rank()
    return image_text_datasets(
        run, get_tokenizer(), num_samples, has_patches=layout.has_embedding(pp_rank, vp_stage)
    )


datasets_provider.is_distributed = True


if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"architecture": "vlm"},
        deepspeed_reader=read_deepspeed_config,
    )
