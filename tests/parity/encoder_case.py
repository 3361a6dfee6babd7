"""Train a small BERT, T5 or model that reads images in one layout; report what must be equal.

Samples are those of its dataset.

The functions here run inside a worker process of `tests.harness.distributed`; with one rank they
are the serial oracle.
"""

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from examples.encoders import pretrain_bert
from megatron.core import dist_checkpointing
from megatron.core.context_parallel import get_batch_on_this_cp_rank
from megatron.core.datasets.bert_dataset import (
    BERTMaskedWordPieceDataset,
    BERTMaskedWordPieceDatasetConfig,
)
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.dist_checkpointing.loader import load_state
from megatron.core.dist_checkpointing.validation import parse_strict_handling
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.distributed.distributed_data_parallel_config import SHARDING_STRATEGIES
from megatron.core.models.bert.bert_layer_specs import get_bert_layer_local_spec
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.tokenizers.megatron_tokenizer import make_tokenizer
from megatron.core.transformer.sharded_state import sharded_state_dict_of
from megatron.core.transport.object_collectives import SingleProcess
from megatron.hugging_face import open_model
from megatron.inference.generate import generate
from megatron.post_training.heads import replace_head
from megatron.post_training.loss_functions import contrastive_loss_func
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.resolve import resolve
from megatron.training.config.resolved import ResolvedRun
from tests.parity.layouts import LayoutCase
from tests.parity.training_case import (
    ADAM_EPSILON,
    SEED,
    RankReport,
    Run,
    assemble,
    named_parameters,
    note_weights,
    whole_gradient,
)

CASES = {"bert": "encoder_case", "t5": "t5_case", "vlm": "vision_case"}
"""Architecture -> the module that builds its samples and model."""
VOCABULARY, SEQUENCE, SAMPLES = 96, 24, 8
SENTINELS = 12
"""T5's, after the vocabulary."""
TOKENS = {"bert": VOCABULARY, "t5": VOCABULARY + SENTINELS, "vlm": 97}
OPTIMIZER: dict[str, Any] = dict(
    optimizer="adam", lr=3e-3, adam_eps=ADAM_EPSILON, weight_decay=0.0, clip_grad=1.0
)


@dataclass
class EncoderReport(RankReport):
    """What one rank saw; `logits` [b, s, v] of the first micro batch, on the last stage."""

    logits: Tensor | None = None


def case_of(model: str) -> Any:
    """Return the module that builds the samples and the model of an architecture."""
    return importlib.import_module(f"tests.parity.{CASES[model]}")


def write_vocabulary(directory: Path) -> Path:
    """Write a WordPiece vocabulary of `VOCABULARY` tokens; return its file."""
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [chr(ord("a") + i) for i in range(26)]
    tokens = [*specials, *letters, *("##" + x for x in letters)]
    tokens += [f"word{i}" for i in range(VOCABULARY - 2 - len(tokens))]
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "vocab.txt"
    file.write_text("\n".join(tokens) + "\n")
    return file


@cache
def dataset(vocab_file: Path, classification_head: bool) -> BERTMaskedWordPieceDataset:
    """Return computed sentences as samples."""
    tokenizer = make_tokenizer("BertWordPieceLowerCase", vocab_file=str(vocab_file))
    config = BERTMaskedWordPieceDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQUENCE,
        tokenizer=tokenizer,
        short_sequence_probability=0.3,
        classification_head=classification_head,
    )
    sizes = [1000, 0, 0]
    return BlendedMegatronDatasetBuilder(
        BERTMaskedWordPieceDataset, sizes, lambda: True, config
    ).build()[0]  # type: ignore[return-value]


def micro_batches(
    samples: Any, step: int, size: int, *, dp_rank: int = 0, dp_size: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Yield the micro batches of one replica in one step of `SAMPLES` samples."""
    for row in range(dp_rank, SAMPLES // size, dp_size):
        first = step * SAMPLES + row * size
        collate = getattr(samples, "collate", default_collate)
        yield collate([samples[i] for i in range(first, first + size)])


def resolved(layout: LayoutCase, words: Sequence[str], architecture: str = "bert") -> ResolvedRun:
    """Return the settings of a run in a layout, from its flags."""
    flags = [
        "--encoder-seq-length", str(SEQUENCE), "--micro-batch-size", "1", "--train-iters", "1",
        "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer",
        "--transformer-impl", "local", "--tensor-model-parallel-size", str(layout.tp),
        "--pipeline-model-parallel-size", str(layout.pp),
        "--context-parallel-size", str(layout.cp), *words,
    ]  # fmt: skip
    flags += ["--sequence-parallel"] * layout.sp
    if layout.letters:
        flags += ["--pipeline-model-parallel-layout", layout.letters]
    elif layout.vp > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(layout.vp)]
    command = parse_command_line(flags, args_defaults={"architecture": architecture})
    run = resolve(command.config, world_size=layout.world_size)
    return run.overlaid({"unpadded_vocab_size": TOKENS[architecture]})


def build_chunks(run: ResolvedRun, groups: ProcessGroupCollection) -> list[Any]:
    """Build this rank's chunks."""
    config = run.transformer_config
    tp, pp_rank = groups.tp.size(), groups.pp.rank()
    layout = pipeline_layout(config)
    num_chunks = config.virtual_pipeline_model_parallel_size or 1
    return [
        BertModel(
            config,
            num_tokentypes=pretrain_bert.NUM_TOKENTYPES,
            transformer_layer_spec=get_bert_layer_local_spec(),
            vocab_size=-(-VOCABULARY // (8 * tp)) * 8 * tp,
            max_sequence_length=run.model.max_position_embeddings,
            pre_process=layout.has_embedding(pp_rank, chunk),
            post_process=layout.has_loss(pp_rank, chunk),
            share_embeddings_and_output_weights=not run.model.untie_embeddings_and_output_weights,
            position_embedding_type=run.model.position_embedding_type,
            add_binary_head=run.encoders.bert_binary_head,
            pg_collection=groups,
            vp_stage=chunk if num_chunks > 1 else None,
        )
        for chunk in range(num_chunks)
    ]


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """Run one micro batch, as the script does."""
    batch = pretrain_bert.get_batch(iterator)
    output = model(
        batch["text"], batch["padding_mask"], tokentype_ids=batch["types"],
        lm_labels=batch["labels"],
    )  # fmt: skip
    return output, partial(pretrain_bert.loss_func, batch)


def logits_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """Compute the logits of one micro batch."""
    batch = pretrain_bert.get_batch(iterator)
    output = model(batch["text"], batch["padding_mask"], tokentype_ids=batch["types"])
    return output, lambda output, non_loss_data: output[0]


def embedding_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> Any:
    """Tell the text of each even row's key, the text of the next row, from all others."""
    batch = pretrain_bert.get_batch(iterator)
    vectors = model(batch["text"], batch["padding_mask"], tokentype_ids=batch["types"])

    def loss_func(vectors: Tensor) -> Any:
        mask = get_batch_on_this_cp_rank({"loss_mask": batch["padding_mask"]})
        loss, _ = contrastive_loss_func(mask, vectors, temperature=0.2)
        share = ProcessGroupCollection.current().cp.size()
        return loss, {"lm loss": torch.stack((loss.detach(), torch.ones(()))) / share}

    return vectors, loss_func


def train(
    groups: ProcessGroupCollection,
    layout: LayoutCase,
    vocab_file: Path,
    words: Sequence[str],
    directory: Path | None,
    num_steps: int,
    embeds: bool = False,
    model: str = "bert",
) -> EncoderReport:
    """Train from the weights of a directory, or from drawn ones; the job of one rank.

    Returns:
        losses: the sum of all reported means, for every step; gradients of the first step. With
        `embeds` those of a contrastive loss over the vectors of texts.
    """
    rng_state().set_seed(SEED)
    flags = [*words, *(["--load-hf", str(directory)] if directory else [])]
    case = case_of(model)
    run = resolved(layout, flags, model)
    samples = case.dataset(vocab_file, run.encoders.bert_binary_head)
    config = run.transformer_config
    chunks = case.build_chunks(run, groups)
    if embeds:
        chunks = [replace_head(chunk, None) for chunk in chunks]
    if directory is not None:
        for chunk in chunks:
            load_state(
                sharded_state_dict_of(chunk, pg_collection=groups),
                open_model(directory, reads_images=True),
                peers=SingleProcess(),
                strict=parse_strict_handling("raise_unexpected"),
            )
    ddp = DistributedDataParallelConfig(
        bucket_size=5000, data_parallel_sharding_strategy=SHARDING_STRATEGIES[layout.stage]
    )
    wrapped = [DistributedDataParallel(config, ddp, c, pg_collection=groups) for c in chunks]
    chosen = OptimizerConfig(**OPTIMIZER, use_distributed_optimizer=layout.stage > 0)
    optimizer = get_megatron_optimizer(chosen, wrapped, pg_collection=groups)
    config.finalize_model_grads_func = partial(finalize_model_grads, pg_collection=groups)
    dp_rank, dp_size = groups.dp.rank(), groups.dp.size()
    run_schedule = partial(
        get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vp),
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        seq_length=run.model.seq_length,
        micro_batch_size=layout.micro_batch_size,
        decoder_seq_length=run.encoders.decoder_seq_length,
        pg_collection=groups,
    )

    def data(step: int) -> Any:
        parts = [
            micro_batches(samples, step, layout.micro_batch_size, dp_rank=dp_rank, dp_size=dp_size)
            for _ in wrapped
        ]
        return parts if len(parts) > 1 else parts[0]

    ranks = groups.tp.rank(), groups.expt_tp.rank(), dp_rank
    report = EncoderReport(*ranks, [], [], {}, {}, {}, {})
    if directory is not None and layout.cp == 1:
        for chunk in wrapped:
            chunk.eval()
        collected = run_schedule(
            forward_step_func=case.logits_step, data_iterator=data(0), num_microbatches=1,
            forward_only=True, collect_non_loss_data=True,
        )  # fmt: skip
        for chunk in wrapped:
            chunk.train()
        if collected:
            logits = gather_from_tensor_model_parallel_region(collected[0], group=groups.tp)
            report.logits = logits.detach()
    named = list(named_parameters(wrapped))
    for step in range(num_steps):
        rng_state().begin_step(
            step * SAMPLES, micro_batch_size=layout.micro_batch_size, dp_rank=dp_rank,
            dp_size=dp_size,
        )  # fmt: skip
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reported = run_schedule(
            forward_step_func=embedding_step if embeds else case.forward_step,
            data_iterator=data(step), forward_only=False,
            num_microbatches=SAMPLES // layout.micro_batch_size // dp_size,
        )  # fmt: skip
        if reported:
            report.losses.append(mean_loss(reported, groups))
        if step == 0:
            report.gradients[step] = {name: whole_gradient(chunk, p) for name, chunk, p in named}
        ok, grad_norm, _ = optimizer.step()
        assert ok
        report.grad_norms.append(float(grad_norm))
    note_weights(report, wrapped)
    return report


def through_checkpoint(
    groups: ProcessGroupCollection,
    layout: LayoutCase,
    words: Sequence[str],
    directory: Path,
    is_saved: bool,
    model: str,
) -> EncoderReport:
    """Save drawn weights, or load what was saved over weights of another seed; report the weights.

    The job of one rank.
    """
    rng_state().set_seed(SEED if is_saved else SEED + 1)
    run = resolved(layout, words, model)
    chunks = case_of(model).build_chunks(run, groups)
    declared = {
        f"model{number}": sharded_state_dict_of(chunk, pg_collection=groups)
        for number, chunk in enumerate(chunks)
    }
    if is_saved:
        dist_checkpointing.save(declared, directory)
    else:
        dist_checkpointing.load(declared, directory, strict="raise_all")
    report = EncoderReport(
        groups.tp.rank(), groups.expt_tp.rank(), groups.dp.rank(), [0.0], [0.0], {}, {}, {}, {}
    )
    ddp = DistributedDataParallelConfig()
    config = run.transformer_config
    note_weights(
        report, [DistributedDataParallel(config, ddp, c, pg_collection=groups) for c in chunks]
    )
    return report


def write_after(
    groups: ProcessGroupCollection,
    layout: LayoutCase,
    words: Sequence[str],
    directory: Path,
    sources: Sequence[Sequence[int]],
    num_tokens: int,
) -> list[list[int]]:
    """Let the T5 of a directory write so many tokens after reading each source; one rank's job."""
    run = resolved(layout, [*words, "--load-hf", str(directory)], "t5")
    chunks = case_of("t5").build_chunks(run, groups)
    for chunk in chunks:
        declared = sharded_state_dict_of(chunk, pg_collection=groups)
        load_state(declared, open_model(directory, reads_images=True), peers=SingleProcess())
    return generate(
        chunks,
        [[0] for _ in sources],
        sources=sources,
        max_new_tokens=num_tokens,
        vocab_size=TOKENS["t5"],
        max_sequence_length=run.model.max_position_embeddings,
        pg_collection=groups,
    )


def answer_about(
    groups: ProcessGroupCollection,
    layout: LayoutCase,
    words: Sequence[str],
    directory: Path,
    prompts: Sequence[Sequence[int]],
    images: Sequence[Any],
    num_tokens: int,
) -> list[list[int]]:
    """Let the model of a directory continue prompts about images; one rank's job."""
    run = resolved(layout, [*words, "--load-hf", str(directory)], "vlm")
    chunks = case_of("vlm").build_chunks(run, groups)
    for chunk in chunks:
        declared = sharded_state_dict_of(chunk, pg_collection=groups)
        load_state(declared, open_model(directory, reads_images=True), peers=SingleProcess())
    return generate(
        chunks,
        prompts,
        images=images,
        max_new_tokens=num_tokens,
        vocab_size=TOKENS["vlm"],
        max_sequence_length=run.model.max_position_embeddings,
        pg_collection=groups,
    )


def mean_loss(reported: list[dict[str, Tensor]], groups: ProcessGroupCollection) -> float:
    """Return the mean over micro batches and replicas of the sum of a micro batch's mean losses."""
    pairs = torch.stack([torch.stack(list(report.values())) for report in reported]).double()
    if groups.cp.size() > 1:
        torch.distributed.all_reduce(pairs, group=groups.cp)
    means = (pairs[:, :, 0] / pairs[:, :, 1]).sum(1)
    total = torch.tensor([means.sum(), len(means)], dtype=torch.float64)
    if groups.dp.size() > 1:
        torch.distributed.all_reduce(total, group=groups.dp)
    return float(total[0] / total[1])


def their_logits(model: Any, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the logits [b, s, v] of a model of Transformers, and which are of a token [b, s]."""
    output = _their_output(model, batch)
    logits = output.prediction_logits if "prediction_logits" in output else output.logits
    return logits, batch["padding_mask"].bool()


def _their_output(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(
        input_ids=batch["text"],
        attention_mask=batch["padding_mask"],
        token_type_ids=batch["types"],
    )


def their_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the loss of a model of Transformers: hidden words, and the order of the pieces."""
    output = _their_output(model, batch)
    pairs = hasattr(output, "seq_relationship_logits")
    logits = output.prediction_logits if pairs else output.logits
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    if pairs:
        loss = loss + F.cross_entropy(output.seq_relationship_logits, batch["is_random"])
    return loss


def assembled(reports: list[EncoderReport], model: str = "bert") -> Run:
    """Join the ranks' pieces to the one-device model."""
    return assemble(list(reports), vocabulary=TOKENS[model])
