"""Pretrain a T5: `torchrun --nproc-per-node 4 examples/encoders/pretrain_t5.py ...`.

Without torchrun it trains in one process. `--dry-run` prints the effect of a command. The corpus
has one sequence for each sentence: `tools/preprocess_data.py --split-sentences`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.enums import ModelType
from megatron.core.foundation import device
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import backend_named, decoder_layer, encoder_layer
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_timers, get_tokenizer, pretrain
from megatron.training.config.resolved import ResolvedRun
from megatron.training.datasets.blends import masked_dataset_settings
from megatron.training.setup.stages import is_dataset_built_on_rank
from megatron_lattice import read_deepspeed_config

ENTRIES = ("text_enc", "text_dec", "labels", "loss_mask", "enc_mask")
"""Entries of a sample that a step reads, [b, s] of the encoder or [b, t] of the decoder."""


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    run: ResolvedRun,
) -> T5Model:
    """Build one chunk of the model: all of it without pipeline parallelism."""
    model, encoders = run.model, run.encoders
    backend = backend_named(model.transformer_impl)
    return T5Model(
        config=config,
        encoder_config=None,
        transformer_encoder_layer_spec=encoder_layer(backend),
        transformer_decoder_layer_spec=decoder_layer(backend),
        vocab_size=run.tokenizer.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        relative_attention_num_buckets=encoders.relative_attention_num_buckets,
        relative_attention_max_distance=encoders.relative_attention_max_distance,
        scales_logits=encoders.scale_t5_logits,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def get_batch(data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Take the next micro batch."""
    batch, where = next(data_iterator), device.current_device()
    return {name: batch[name].to(where, non_blocking=True) for name in ENTRIES}


def loss_func(batch: dict[str, Tensor], losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses [b, t] of the decoder's tokens."""
    mask = batch["loss_mask"].float()
    # fp32: in bf16, a sum over thousands of tokens has only three digits.
    loss, num_tokens = torch.sum(losses.float() * mask), mask.sum()
    return loss, num_tokens.int(), {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple:
    """Run one micro batch through this rank's part of the model."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["text_enc"],
        batch["text_dec"],
        batch["enc_mask"],
        lm_labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(loss_func, batch)


def datasets_provider(
    num_samples: Sequence[int | None], vp_stage: int | None = None, *, run: ResolvedRun
) -> list:
    """Build the train, valid and test datasets on all stages: each needs the ends of texts."""
    config = T5MaskedWordPieceDatasetConfig(
        **masked_dataset_settings(run, get_tokenizer()),
        sequence_length_decoder=run.encoders.decoder_seq_length,
    )
    return BlendedMegatronDatasetBuilder(
        T5MaskedWordPieceDataset,
        num_samples,
        partial(is_dataset_built_on_rank, run, vp_stage),
        config,
    ).build()


datasets_provider.is_distributed = True


if __name__ == "__main__":
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"architecture": "t5"},
        deepspeed_reader=read_deepspeed_config,
    )
