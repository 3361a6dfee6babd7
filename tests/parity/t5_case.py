"""A small T5 for `tests.parity.encoder_case`: its samples, its chunks and its steps."""

from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from examples.encoders import pretrain_t5
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.t5_dataset import (
    T5MaskedWordPieceDataset,
    T5MaskedWordPieceDatasetConfig,
)
from megatron.core.models.T5.t5_model import T5Model
from megatron.core.models.T5.t5_spec import decoder_layer, encoder_layer
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.megatron_tokenizer import make_tokenizer
from megatron.core.transformer.backend import LocalBackend
from megatron.training.config.resolved import ResolvedRun
from tests.parity.encoder_case import SENTINELS, SEQUENCE
from tests.parity.training_case import SEED

DECODER_SEQUENCE = 16
PADDED_VOCABULARY = 128


@cache
def dataset(vocab_file: Path, _classification_head: bool) -> T5MaskedWordPieceDataset:
    """Return computed sentences as samples; the tokenizer's sentinels follow the vocabulary."""
    tokenizer = make_tokenizer(
        "BertWordPieceLowerCase", vocab_file=str(vocab_file), vocab_extra_ids=SENTINELS
    )
    config = T5MaskedWordPieceDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQUENCE,
        sequence_length_decoder=DECODER_SEQUENCE,
        tokenizer=tokenizer,
        short_sequence_probability=0.3,
    )
    return BlendedMegatronDatasetBuilder(
        T5MaskedWordPieceDataset, [1000, 0, 0], lambda: True, config
    ).build()[0]  # type: ignore[return-value]


def build_chunks(run: ResolvedRun, groups: ProcessGroupCollection) -> list[Any]:
    """Build this rank's chunks."""
    config, encoders = run.transformer_config, run.encoders
    layout, pp_rank = pipeline_layout(config), groups.pp.rank()
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    return [
        T5Model(
            config,
            None,
            encoder_layer(LocalBackend()),
            decoder_layer(LocalBackend()),
            vocab_size=PADDED_VOCABULARY,
            max_sequence_length=run.model.max_position_embeddings,
            position_embedding_type=run.model.position_embedding_type,
            pre_process=layout.has_embedding(pp_rank, chunk),
            post_process=layout.has_loss(pp_rank, chunk),
            share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
            relative_attention_num_buckets=encoders.relative_attention_num_buckets,
            relative_attention_max_distance=encoders.relative_attention_max_distance,
            scales_logits=encoders.scale_t5_logits,
            pg_collection=groups,
            vp_stage=chunk if num_chunks > 1 else None,
        )
        for chunk in range(num_chunks)
    ]


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """Run one micro batch, as the script does."""
    batch = pretrain_t5.get_batch(iterator)
    output = model(
        batch["text_enc"], batch["text_dec"], batch["enc_mask"], lm_labels=batch["labels"]
    )
    return output, partial(pretrain_t5.loss_func, batch)


def logits_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """Compute the logits of one micro batch."""
    batch = pretrain_t5.get_batch(iterator)
    output = model(batch["text_enc"], batch["text_dec"], batch["enc_mask"])
    return output, lambda output, non_loss_data: output


def their_logits(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits [b, t, v] of a model of Transformers, and which are of a token [b, t]."""
    output = model(
        input_ids=batch["text_enc"],
        attention_mask=batch["enc_mask"],
        decoder_input_ids=batch["text_dec"],
    )
    return output.logits, batch["dec_mask"].bool()


def their_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a model of Transformers."""
    logits, _ = their_logits(model, batch)
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
