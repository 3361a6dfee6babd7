"""Rules of models with images, of BERT and T5, and of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.core.foundation.errors import MegatronError, MissingInputError
from megatron.core.transformer.low_rank_adapter import EXPERT_TARGETS
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule

_ARCHITECTURE = "vlm"


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
            "--mrope-section",
            fix=f"use --mrope-section {pairs - 2 * third} {third} {third}",
        )


@rule
def the_encoder_of_images_can_be_built(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the sizes of the image encoder."""
    if run.encoders.traits.has_images:
        yield from run.vision.problems(run.parallelism.tensor_model_parallel_size)


@rule
def something_is_trained(run: ResolvedRun) -> Iterator[MegatronError]:
    """Refuse to freeze all parts of a model that reads images."""
    vision = run.vision
    if vision.freeze_lm and vision.freeze_vit and vision.freeze_projection:
        yield problem(
            "--freeze-LM, --freeze-ViT, --freeze-projection: nothing is trained.",
            "at least one part is trained",
            "--freeze-LM",
            "--freeze-ViT",
            "--freeze-projection",
            fix="leave out --freeze-projection",
        )


@rule
def layers_get_what_is_added_on_their_stage(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the language model has a layer for each entry of --deepstack-layers."""
    count = len(run.vision.layers_added)
    if run.encoders.traits.has_images and count > (run.model.num_layers or count):
        yield problem(
            f"--deepstack-layers names {count} layers for a language model of"
            f" {run.model.num_layers} layers.",
            "the output of each is added after one layer of the language model",
            "--deepstack-layers",
            "--num-layers",
            fix="name fewer layers",
        )


@rule
def files_of_images_and_texts_exist(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the files of images and texts exist."""
    data = run.data
    if not run.encoders.traits.has_images:
        return
    named = {
        "--data-path": data.data_path,
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    for flag, paths in named.items():
        for path in paths or ():
            if not Path(path).is_file():
                yield MissingInputError(
                    f"{flag} {path}: no such file.",
                    rule="a model that reads images is trained on files of JSON lines",
                    flags=[flag],
                    fix="name a file; weights of files are not supported",
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
            "--relative-attention-num-buckets",
            "--relative-attention-max-distance",
            fix="use --relative-attention-num-buckets 32 --relative-attention-max-distance 128",
        )


@rule
def layers_are_of_encoder_and_decoder(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the numbers of encoder and decoder layers."""
    model, num_decoder = run.model, run.encoders.decoder_num_layers
    num_layers, num_encoder = model.num_layers or 0, model.encoder_num_layers or 0
    if not run.encoders.traits.has_two_stacks:
        if num_encoder:
            yield problem(
                f"--encoder-num-layers {num_encoder} and --num-layers {num_layers}.",
                "for a model of one stack they are two spellings of one flag",
                "--encoder-num-layers",
                "--num-layers",
                fix="give one of them",
            )
    elif num_layers and not 0 < num_encoder < num_layers:
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
            "--decoder-num-layers",
            "--encoder-num-layers",
            "--num-layers",
            fix="leave out --num-layers",
        )


@rule
def ranks_can_share_both_stacks(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that the decoder's sequence and the heads can be split over ranks."""
    if not run.encoders.traits.has_two_stacks:
        return
    parallel, model, length = run.parallelism, run.model, run.encoders.decoder_seq_length
    tp = parallel.tensor_model_parallel_size
    if length is None or length < 1:
        yield problem(
            f"--decoder-seq-length {length}.",
            "a sample of a T5 has at least one decoder token",
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


@rule
def adapters_have_a_strength(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check the ranges of --lora-alpha and --lora-dropout."""
    for flag, value, minimum, maximum, example in (
        ("--lora-alpha", run.lora.lora_alpha, 1e-9, float("inf"), 16),
        ("--lora-dropout", run.lora.lora_dropout, 0.0, 1.0 - 1e-9, 0.1),
    ):
        if value is not None and not minimum <= value <= maximum:
            yield problem(
                f"{flag} {value}.",
                "alpha is positive, a dropout is in [0, 1)",
                flag,
                fix=f"drop {flag}, or use {flag} {example}",
            )


@rule
def adapters_stand_beside_a_trained_model(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that adapters are added to a trained model."""
    if run.lora.lora_rank is None:
        return
    if (
        run.checkpoint.load_hf is None
        and run.checkpoint.pretrained_checkpoint is None
        and not run.schedule.skip_train
    ):
        yield problem(
            "--lora-rank without a model.",
            "adapters are added to the frozen weights of a trained model",
            "--lora-rank",
            "--load-hf",
            "--pretrained-checkpoint",
            fix="add --load-hf DIRECTORY; --load names a checkpoint of the adapters",
        )


@rule
def experts_have_plain_adapters(run: ResolvedRun) -> Iterator[MegatronError]:
    """Check that adapters of routed experts have experts and need no DoRA or dropout."""
    named = [name for name in run.lora.lora_target_modules if name in EXPERT_TARGETS]
    if run.lora.lora_rank is None or not named:
        return
    if not run.experts.num_moe_experts:
        yield problem(
            f"--lora-target-modules {' '.join(named)} for a model without experts.",
            "these modules are layers of routed experts",
            "--lora-target-modules",
            "--num-experts",
            fix=f"drop {' and '.join(named)}",
        )
    for flag, value in (
        ("--use-dora", run.lora.use_dora),
        ("--lora-dropout", run.lora.lora_dropout),
    ):
        if value:
            yield problem(
                f"{flag} with adapters of routed experts.",
                "the adapter of an expert is the product of two matrices; as in PEFT, it has"
                " neither dropout nor magnitudes",
                flag,
                "--lora-target-modules",
                fix=f"drop {flag}, or {' and '.join(named)}",
            )


@rule
def exported_adapters_have_a_place(run: ResolvedRun) -> Iterator[MegatronError]:
    """Refuse exports of adapters that PEFT cannot represent."""
    if run.lora.lora_rank is None:
        return
    mlp = {"linear_fc1", "linear_fc2"} & set(run.lora.lora_target_modules)
    if (
        run.lora.save_adapter is not None
        and run.lora.use_dora
        and run.experts.num_moe_experts
        and mlp
    ):
        yield problem(
            f"--save-adapter with --use-dora and {' and '.join(sorted(mlp))} of a model with"
            " experts.",
            "PEFT adapts gate_proj, up_proj and down_proj of such models as parameters, without"
            " learned magnitudes",
            "--save-adapter",
            "--use-dora",
            "--lora-target-modules",
            fix="name the layers of attention in --lora-target-modules, or merge the adapters with"
            " --save-hf",
        )
