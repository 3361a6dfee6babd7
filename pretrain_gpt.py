"""Pretrain a GPT: `torchrun --nproc-per-node 4 pretrain_gpt.py --preset gpt2-124m ...`.

Without torchrun it trains in one process. `--dry-run` prints the effect of a command;
`--auto-parallel H100 --dry-run-world-size 64` prints the fastest layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.context_parallel import get_batch_on_this_cp_rank, share_microbatch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.enums import ModelType
from megatron.core.foundation import device
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import get_timers, get_tokenizer, pretrain
from megatron.training.cli.parser import ParsedCommand
from megatron.training.config.resolved import ResolvedRun
from megatron.training.datasets.blends import gpt_dataset_class, gpt_dataset_config
from megatron.training.setup.layer_spec import layer_spec
from megatron.training.setup.stages import is_dataset_built_on_rank
from megatron_lattice import read_deepspeed_config

BATCH = (
    "tokens", "labels", "loss_mask", "attention_mask", "position_ids", "document_starts",
    "padding_mask",
)  # fmt: skip
"""Entries of a micro batch; entries that the data lack are None."""


def model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection,
    run: ResolvedRun,
) -> GPTModel:
    """Build one chunk of the model: all of it without pipeline parallelism."""
    model = run.model
    layers = layer_spec(model, config, vp_stage)
    return GPTModel(
        config=config,
        transformer_layer_spec=layers,
        mtp_block_spec=get_gpt_mtp_block_spec(
            config, layers, model.transformer_impl == "transformer_engine"
        ),
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
        pg_collection=pg_collection,
        vp_stage=vp_stage,
    )


def get_batch(data_iterator: Iterator[dict[str, Tensor]] | None) -> dict[str, Any]:
    """Return the next micro batch; a stage between the first and the last needs none.

    Every rank that needs tokens reads them itself: the corpus is memory-mapped and the order of
    samples is arithmetic, so tensor-parallel ranks read the same bytes without a broadcast, and
    context-parallel ranks keep their positions of the sequence.
    """
    if data_iterator is None:
        return dict.fromkeys(BATCH)
    batch = next(data_iterator)
    share_microbatch(batch)
    where = device.current_device()
    moved = {n: batch[n].to(where, non_blocking=True) if n in batch else None for n in BATCH}
    return get_batch_on_this_cp_rank(moved)


def loss_func(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Sum the losses of real tokens; the mean is computed over the whole global batch.

    Args:
        loss_mask: [b, s], 1 where a token counts.
        output: [b, s], the loss of every token.
    """
    # fp32 or more: in bf16, a sum over thousands of tokens has only three digits.
    wide = output.to(torch.promote_types(output.dtype, torch.float32))
    loss = torch.sum(wide * loss_mask)
    num_tokens = loss_mask.sum()
    return loss, num_tokens.int(), {"lm loss": torch.stack([loss.detach(), num_tokens])}


def forward_step(data_iterator: Iterator[dict[str, Tensor]] | None, model: Any) -> tuple:
    """Run one micro batch through this rank's part of the model."""
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = get_batch(data_iterator)
    timers("batch-generator").stop()
    documents = batch["document_starts"]
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        packed_seq_params=None if documents is None else PackedSeqParams(seq_idx=documents),
        padding_mask=batch["padding_mask"],
    )
    return output, partial(loss_func, batch["loss_mask"])


def datasets_provider(
    num_samples: Sequence[int | None], vp_stage: int | None = None, *, run: ResolvedRun
) -> list:
    """Build the train, valid and test datasets on the ranks that read data."""
    config = gpt_dataset_config(run, get_tokenizer())
    kind = gpt_dataset_class(run.data)
    return BlendedMegatronDatasetBuilder(
        kind, num_samples, partial(is_dataset_built_on_rank, run, vp_stage), config
    ).build()


datasets_provider.is_distributed = True


def layout_search(words: Sequence[str], gpu: str, num_gpus: int) -> str:
    """Return the report of `--auto-parallel`."""
    from megatron_lattice.planner.search_command import Cluster, search_command

    return search_command(words, Cluster(gpu, num_gpus), script="pretrain_gpt.py").text


def step_prediction(command: ParsedCommand, num_ranks: int, is_shown: bool) -> Any:
    """Return the planner's prediction of a step of this run, for the log line."""
    from megatron.training.setup.traced_rank import ModelScript
    from megatron_lattice.planner.step_command import prediction_for_log

    script = ModelScript(model_provider, forward_step)
    return prediction_for_log(command, num_ranks, script, is_shown=is_shown)


def main() -> None:
    """Train with the flags of the command line."""
    pretrain(
        datasets_provider,
        model_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        layout_search=layout_search,
        step_prediction=step_prediction,
        deepspeed_reader=read_deepspeed_config,
    )


if __name__ == "__main__":
    main()
