"""Rules of models with an encoder."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.errors import MegatronError
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule

_POSITIONS = "--position-embedding-type"


@rule
def relative_positions_need_two_stacks(run: ResolvedRun) -> Iterator[MegatronError]:
    """Only the model with an encoder and a decoder has a bias by distance."""
    is_relative = run.model.position_embedding_type == "relative"
    if is_relative and not run.encoders.traits.has_two_stacks:
        yield problem(
            f"{_POSITIONS} relative for the architecture {run.encoders.architecture}.",
            "attention of a T5, and of it alone, has a bias by the distance of query and key",
            _POSITIONS,
            fix=f"use {_POSITIONS} rope",
        )


@rule
def distances_fill_their_buckets(run: ResolvedRun) -> Iterator[MegatronError]:
    """Half of the buckets of a side are of one distance; the others are of farther ones."""
    if run.model.position_embedding_type != "relative":
        return
    encoders = run.encoders
    num_buckets, farthest = (
        encoders.relative_attention_num_buckets,
        encoders.relative_attention_max_distance,
    )
    if num_buckets < 4 or farthest <= num_buckets // 2:
        yield problem(
            f"--relative-attention-num-buckets {num_buckets} with"
            f" --relative-attention-max-distance {farthest}.",
            "there are at least 4 buckets, and the largest distance is more than half of them",
            "--relative-attention-num-buckets",
            "--relative-attention-max-distance",
            fix="use --relative-attention-num-buckets 32 --relative-attention-max-distance 128",
        )


@rule
def encoders_have_plain_layers(run: ResolvedRun) -> Iterator[MegatronError]:
    """The layers of an encoder have attention and a dense MLP, and nothing predicts later."""
    architecture, traits = run.encoders.architecture, run.encoders.traits
    if architecture == "gpt" or traits.has_images:
        return
    asked: dict[str, object] = {
        "--num-experts": run.experts.num_moe_experts,
        "--multi-latent-attention": run.latent_attention.multi_latent_attention,
        "--mtp-num-layers": run.latent_attention.mtp_num_layers,
        "--hybrid-layer-pattern": run.model.hybrid_layer_pattern,
        "--experimental-attention-variant": run.model.experimental_attention_variant,
        "--qk-layernorm": run.model.qk_layernorm,
    }
    if traits.has_two_stacks:
        asked |= {
            "--window-size": run.model.window_size,
            "--sandwich-norm": run.model.sandwich_norm,
            "--use-parallel-residual": run.model.use_parallel_residual,
        }
    given = [flag for flag, value in asked.items() if value]
    if given:
        yield problem(
            f"{', '.join(given)} for the architecture {architecture}.",
            f"a layer of a {architecture} has plain attention and a dense MLP",
            *given,
            fix=f"leave out {', '.join(given)}, or train a GPT",
        )


@rule
def layers_are_of_encoder_and_decoder(run: ResolvedRun) -> Iterator[MegatronError]:
    """Both stacks have layers, as many as is said, and a model of one stack has no encoder."""
    model, num_decoder = run.model, run.encoders.decoder_num_layers
    num_layers, num_encoder = model.num_layers or 0, model.encoder_num_layers or 0
    if not run.encoders.traits.has_two_stacks:
        if num_encoder:
            yield problem(
                f"--encoder-num-layers {num_encoder} and --num-layers {num_layers}.",
                "they are two spellings for a model of one stack",
                "--encoder-num-layers",
                "--num-layers",
                fix="give one of them",
            )
    elif num_layers and not 0 < num_encoder < num_layers:
        yield problem(
            f"{num_encoder} of {num_layers} layers are of the encoder.",
            "a T5 has an encoder and a decoder of at least one layer each",
            "--encoder-num-layers",
            "--decoder-num-layers",
            fix="give both at least one layer",
        )
    elif num_decoder is not None and num_encoder + num_decoder != num_layers:
        yield problem(
            f"--decoder-num-layers {num_decoder}, where {num_layers - num_encoder} of {num_layers}"
            " layers are the decoder's.",
            "--num-layers counts the layers of both stacks if --encoder-num-layers is given too",
            "--decoder-num-layers",
            "--encoder-num-layers",
            "--num-layers",
            fix="leave out --num-layers",
        )


@rule
def ranks_can_share_both_stacks(run: ResolvedRun) -> Iterator[MegatronError]:
    """The decoder has tokens, which ranks share by rows or heads alone."""
    if not run.encoders.traits.has_two_stacks:
        return
    parallel, model, length = run.parallelism, run.model, run.encoders.decoder_seq_length
    tp = parallel.tensor_model_parallel_size
    if length is None or length < 1:
        yield problem(
            f"--decoder-seq-length {length}.",
            "the decoder of a T5 writes at least one token",
            "--decoder-seq-length",
            fix=f"use --decoder-seq-length {max(1, (model.seq_length or 4) // 4)}",
        )
    elif parallel.sequence_parallel and length % tp:
        yield problem(
            f"--decoder-seq-length {length} cannot be split over tensor-parallel size {tp}.",
            "with --sequence-parallel each tensor-parallel rank holds an equal part of the"
            " sequence",
            "--decoder-seq-length",
            "--sequence-parallel",
            fix=f"use --decoder-seq-length {-(-length // tp) * tp}",
        )
    if model.position_embedding_type == "learned_absolute":
        yield from _positions_of_decoder(run)
    if model.num_query_groups and model.num_query_groups % tp:
        yield problem(
            f"--num-query-groups {model.num_query_groups} with tensor-parallel size {tp}.",
            "each tensor-parallel rank projects the encoder's output to whole groups of keys",
            "--num-query-groups",
            "--tensor-model-parallel-size",
            fix=f"use --num-query-groups {tp}, or fewer ranks",
        )
    if parallel.context_parallel_size > 1:
        yield problem(
            f"--context-parallel-size {parallel.context_parallel_size} for a T5.",
            "ranks that share a sequence exchange keys without a bias of their scores",
            "--context-parallel-size",
            fix="leave it out",
        )


def _positions_of_decoder(run: ResolvedRun) -> Iterator[MegatronError]:
    length, known = run.encoders.decoder_seq_length or 0, run.model.max_position_embeddings or 0
    if length > known:
        yield problem(
            f"--decoder-seq-length {length} for {known} learned positions.",
            "every position of the decoder has a learned embedding",
            "--decoder-seq-length",
            "--max-position-embeddings",
            fix=f"use --max-position-embeddings {length}",
        )
