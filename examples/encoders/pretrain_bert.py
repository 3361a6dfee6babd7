"""Pretrain a BERT: `torchrun --nproc-per-node 4 examples/encoders/pretrain_bert.py ...`.

Without torchrun it trains in one process. `--dry-run` prints the effect of a command. The corpus
has one sequence for each sentence: `tools/preprocess_data.py --split-sentences`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.context_parallel import get_batch_on_this_cp_rank
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.enums import ModelType
from megatron.core.foundation import device
from megatron.core.models.bert.bert_layer_specs import (
    get_bert_layer_local_spec,
    get_bert_layer_with_transformer_engine_spec,
)
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_timers, get_tokenizer, pretrain
from megatron.training.config.resolved import ResolvedRun
from megatron.training.datasets.blends import masked_dataset_settings
from megatron.training.setup.stages import is_dataset_built_on_rank
from megatron_lattice import read_deepspeed_config

SHARED_OVER_RANKS = ("text", "types", "labels", "loss_mask")
"""Entries [b, s] that are split by position over the context-parallel ranks."""
WHOLE = ("padding_mask", "is_random")
"""Entries that every rank reads completely, [b, s] and [b]."""
NUM_TOKENTYPES = 2


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    run: ResolvedRun,
) -> BertModel:
    """Build one chunk of the model: all of it without pipeline parallelism."""
    model = run.model
    is_local = model.transformer_impl == "local"
    layer = get_bert_layer_local_spec if is_local else get_bert_layer_with_transformer_engine_spec
    return BertModel(
        config=config,
        num_tokentypes=NUM_TOKENTYPES,
        transformer_layer_spec=layer(),
        vocab_size=run.tokenizer.padded_vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not model.untie_embeddings_and_output_weights,
        position_embedding_type=model.position_embedding_type,
        rotary_percent=model.rotary_percent,
        seq_len_interpolation_factor=model.rotary_seq_len_interpolation_factor,
        add_binary_head=run.encoders.bert_binary_head,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def get_batch(data_iterator: Iterator[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the next micro batch; `total` is its number of hidden tokens on all ranks."""
    batch = next(data_iterator)
    where = device.current_device()
    moved = {n: batch[n].to(where, non_blocking=True) for n in (*SHARED_OVER_RANKS, *WHOLE)}
    local = get_batch_on_this_cp_rank({name: moved[name] for name in SHARED_OVER_RANKS})
    return {**moved, **local, "total": moved["loss_mask"].sum()}


def loss_func(
    batch: dict[str, Tensor], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of hidden tokens; add the loss of the order, weighted by their number.

    Args:
        output: [b, s] the loss of every token, and [b, 2] the logits of the order.
    """
    losses, order_logits = output
    mask = batch["loss_mask"].float()
    # fp32: in bf16, a sum over thousands of tokens has only three digits.
    loss, num_tokens = torch.sum(losses.float() * mask), mask.sum()
    report = {"lm loss": torch.stack([loss.detach(), num_tokens])}
    if order_logits is not None:
        # The first token is on the first of the ranks that share the sequence.
        holds_first = float(ProcessGroupCollection.current().cp.rank() == 0)
        order = F.cross_entropy(order_logits.float(), batch["is_random"]) * holds_first
        loss = loss + order * batch["total"]
        report["sop loss"] = torch.stack([order.detach(), torch.full_like(order, holds_first)])
    return loss, num_tokens.int(), report


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple:
    """Run one micro batch through this rank's part of the model."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    output = model(
        batch["text"],
        batch["padding_mask"],
        tokentype_ids=batch["types"],
        lm_labels=batch["labels"],
    )
    return output, partial(loss_func, batch)


def datasets_provider(
    num_samples: Sequence[int | None], vp_stage: int | None = None, *, run: ResolvedRun
) -> list:
    """Build the train, valid and test datasets on all stages: each needs the ends of texts."""
    config = BERTMaskedWordPieceDatasetConfig(
        **masked_dataset_settings(run, get_tokenizer()),
        masking_max_ngram=3,
        classification_head=run.encoders.bert_binary_head,
    )
    return BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset,
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
        args_defaults={"architecture": "bert"},
        deepspeed_reader=read_deepspeed_config,
    )
