"""Rules about the model's shape, models with images, and T5."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.low_precision.hadamard import HADAMARD_SIZE as RUN
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.settings.flags import fields_of
from megatron.core.transformer.config.layer_kinds import hybrid_pattern
from megatron.training.config.parallelism import ParallelismSettings
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule
from megatron.training.rules.sizes import REQUIRED
from megatron.training.setup.layer_spec import LOCAL, imported_spec


@rule
def sizes_are_given(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the required sizes are given."""
    for flag, value in _required_sizes(run):
        if value is None and flag == "--num-layers" and run.model.hybrid_layer_pattern:
            try:
                hybrid_pattern(run.model.hybrid_layer_pattern)
            except ConfigError as error:
                yield error
        elif value is None:
            yield problem(
                f"{flag} is not given.",
                "it is a positive number without a default",
                fix=f"add {flag} {REQUIRED[flag]}"
                + (", or --preset NAME" if flag in ("--num-layers", "--hidden-size") else ""),
            )


def _required_sizes(run: ResolvedRun) -> Iterable[tuple[str, int | None]]:
    model = run.model
    values = (model.num_layers, model.hidden_size, model.num_attention_heads, model.seq_length,
              run.schedule.micro_batch_size)  # fmt: skip
    return zip(REQUIRED, values, strict=True)


def has_sizes(run: ResolvedRun) -> bool:
    """Return whether the required sizes are positive, so that other rules can use them."""
    return all((value or 0) > 0 for _, value in _required_sizes(run))


@rule
def the_model_fits_its_layout(run: ResolvedRun) -> Iterator[MegatronError]:
    """Report the problems that the model's config and the stage layout find."""
    if not has_sizes(run):
        return
    config: Any
    try:
        config = run.transformer_config
    except ConfigError as error:
        yield from error.problems or (error,)
        config = SimpleNamespace(
            **fields_of(ParallelismSettings, run.parallelism),
            num_layers=run.model.num_layers,
            mtp_num_layers=run.latent_attention.mtp_num_layers,
        )
    try:
        pipeline_layout(config)
    except MegatronError as error:
        yield error


@rule
def the_spec_is_there(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --spec can be imported."""
    try:
        if run.model.spec and run.model.spec != LOCAL:
            imported_spec(run.model.spec)
    except ConfigError as error:
        yield error


@rule
def the_sequence_splits_over_ranks(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that context and sequence parallelism can split the sequence."""
    parallel = run.parallelism
    tp, cp, length = (
        parallel.tensor_model_parallel_size,
        parallel.context_parallel_size,
        run.model.seq_length,
    )
    if not length or cp < 1:
        return
    pieces = 2 * cp if cp > 1 else 1
    if cp > 1 and length % pieces:
        yield problem(
            f"--seq-length {length} cannot be split over context-parallel size {cp}.",
            "each context-parallel rank holds two equal chunks of the sequence",
            "--context-parallel-size",
            fix=f"use --seq-length {-(-length // pieces) * pieces}",
        )
    elif cp > 1 and run.precision.fp4 and run.precision.fp8_wgrad and length % (pieces * RUN):
        yield problem(
            f"--fp4-format with --seq-length {length} over context-parallel size {cp}.",
            f"a group of {RUN} tokens, which are transformed together, is on one rank",
            "--context-parallel-size",
            fix=f"use --seq-length {-(-length // (pieces * RUN)) * pieces * RUN}",
        )
    elif parallel.sequence_parallel and length // cp % tp:
        step = math.lcm(pieces, cp * tp)
        yield problem(
            f"--seq-length {length} cannot be split over tensor-parallel size {tp}"
            + (f" and context-parallel size {cp}." if cp > 1 else "."),
            "with --sequence-parallel each tensor-parallel rank holds an equal part of the"
            " sequence",
            "--sequence-parallel",
            fix=f"use --seq-length {-(-length // step) * step}",
        )


@rule
def one_activation(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that at most one activation function is chosen."""
    model = run.model
    switches = {
        "--swiglu": model.swiglu,
        "--geglu": model.geglu,
        "--quick-geglu": model.quick_geglu,
        "--squared-relu": model.squared_relu,
        "--xielu": model.xielu,
        "--relu": model.relu,
        "--openai-gelu": model.openai_gelu,
    }
    chosen = [flag for flag, is_on in switches.items() if is_on]
    if len(chosen) > 1:
        yield problem(
            f"{' and '.join(chosen)} are both on.",
            "the MLP has one activation",
            *chosen,
            fix=f"keep {chosen[0]}",
        )


@rule
def layers_without_rotary_embedding(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that --no-rope-freq has one entry per layer."""
    model = run.model
    pattern = model.no_rope_freq
    if pattern is None or not has_sizes(run):
        return
    if len(pattern) != model.num_layers or set(pattern) - {0, 1}:
        yield problem(
            f"--no-rope-freq gives {len(pattern)} layers for a model of {model.num_layers}.",
            "the pattern is one 0 or 1 per layer",
            "--num-layers",
            fix="use a number N, or a list expression of the right length",
        )


@rule
def channels_rotate_in_pairs(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the rotated part of a head is an even number of channels."""
    model = run.model
    is_rotary = model.position_embedding_type in ("rope", "yarn", "mrope")
    if not is_rotary or run.latent_attention.multi_latent_attention or not model.kv_channels:
        return
    usual = {"kv_channels": model.kv_channels, "rotary_percent": model.rotary_percent}
    of_layers = {
        f" in layer {layer}": {name: block.settings.get(name, usual[name]) for name in usual}
        for layer, block in enumerate(model.blocks, 1)
    }
    for where, own in (of_layers or {"": usual}).items():
        width, percent = own.values()
        count = int(width * percent)
        if count < 2 or count % 2:
            yield problem(
                f"--rotary-percent {percent:g} of heads of {width} channels rotates {count}"
                f" channels{where}.",
                "channels rotate in pairs",
                "--kv-channels",
                fix=f"use --kv-channels {width + width % 2} --rotary-percent 1",
            )


@rule
def heads_of_the_indexer_hold_the_rotated_channels(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the width of the indexer's heads without latent attention."""
    model, width = run.model, run.model.dsa_indexer_head_dim
    if run.latent_attention.multi_latent_attention or not model.kv_channels or not width:
        return
    rotated = int(model.kv_channels * model.rotary_percent)
    if width < rotated:
        yield problem(
            f"--dsa-indexer-head-dim {width} with heads that rotate {rotated} channels.",
            "a head of the indexer rotates as the heads of attention do",
            "--rotary-percent",
            fix=f"use --dsa-indexer-head-dim {model.kv_channels}",
        )


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
def norms_move_in_decoders_alone(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the layers of a BERT and a T5 have the usual order of norms."""
    if run.encoders.architecture not in ("bert", "t5"):
        return
    for name in ("reordered_norm", "share_parallel_norm"):
        if getattr(run.model, name):
            flag = "--" + name.replace("_", "-")
            yield problem(
                f"{flag} in a {run.encoders.architecture}.",
                "the layers of BERT and T5 norm the input of each branch",
                flag,
                fix=f"drop {flag}",
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
