"""Rules of models with images, of BERT and T5, and of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.errors import MegatronError
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule


@rule
def sections_cover_the_rotated_channels(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --mrope-section divides the rotated pairs of channels."""
    model = run.model
    pairs, section = int((model.kv_channels or 0) * model.rotary_percent) // 2, model.mrope_section
    is_mrope = model.position_embedding_type == "mrope"
    if is_mrope and pairs and (section is None or len(section) != 3 or sum(section) != pairs):
        third = pairs // 3
        yield problem(
            f"--mrope-section {section} for heads of {pairs} pairs of channels.",
            "the three sections add up to the number of rotated pairs of channels",
            fix=f"use --mrope-section {pairs - 2 * third} {third} {third}",
        )


@rule
def the_encoder_of_images_can_be_built(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the sizes of the image encoder."""
    if run.encoders.traits.has_images:
        yield from run.vision.problems(run.parallelism.tensor_model_parallel_size)


@rule
def layers_get_what_is_added_on_their_stage(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the language model has a layer for each entry of --deepstack-layers."""
    count = len(run.vision.layers_added)
    if run.encoders.traits.has_images and count > (run.model.num_layers or count):
        yield problem(
            f"--deepstack-layers names {count} layers for a language model of"
            f" {run.model.num_layers} layers.",
            "the output of each is added after one layer of the language model",
            "--num-layers",
            fix="name fewer layers",
        )


@rule
def distances_fill_their_buckets(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that half of a side's buckets of one distance each fit below the largest distance."""
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
            fix="use --relative-attention-num-buckets 32 --relative-attention-max-distance 128",
        )


@rule
def layers_are_of_encoder_and_decoder(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the numbers of encoder and decoder layers."""
    model, num_decoder = run.model, run.encoders.decoder_num_layers
    num_layers, num_encoder = model.num_layers or 0, model.encoder_num_layers or 0
    if not run.encoders.traits.has_two_stacks:
        return
    if num_layers and not 0 < num_encoder < num_layers:
        yield problem(
            f"{num_encoder} of {num_layers} layers belong to the encoder.",
            "a T5 has an encoder and a decoder of at least one layer each",
            "--encoder-num-layers",
            "--decoder-num-layers",
            fix="give both at least one layer",
        )
    elif num_decoder is not None and num_encoder + num_decoder != num_layers:
        yield problem(
            f"--decoder-num-layers {num_decoder}, but {num_layers - num_encoder} of {num_layers}"
            " layers belong to the decoder.",
            "--num-layers counts the layers of both stacks if --encoder-num-layers is given too",
            "--encoder-num-layers",
            "--num-layers",
            fix="leave out --num-layers",
        )


@rule
def the_decoder_has_tokens(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --decoder-seq-length is given."""
    length = run.encoders.decoder_seq_length
    if run.encoders.traits.has_two_stacks and length is None:
        yield problem(
            f"--decoder-seq-length {length}.",
            "a sample of a T5 has at least one decoder token",
            fix=f"use --decoder-seq-length {max(1, (run.model.seq_length or 4) // 4)}",
        )
