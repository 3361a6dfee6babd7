"""Rules of models that read images."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron.core.foundation.errors import MegatronError, MissingInputError
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule

_ARCHITECTURE = "vlm"


@rule
def positions_in_space_are_those_of_images(run: ResolvedRun) -> Iterator[MegatronError]:
    """Positions in time, height and width come with samples that have images."""
    model, has_images = run.model, run.encoders.traits.has_images
    is_mrope = model.position_embedding_type == "mrope"
    if is_mrope and not has_images:
        yield problem(
            f"--position-embedding-type mrope for the architecture {run.encoders.architecture}.",
            "samples of text have one position for each token",
            "--position-embedding-type",
            fix="use --position-embedding-type rope, or train by pretrain_vlm.py",
        )
    if has_images and not is_mrope:
        yield problem(
            f"--position-embedding-type {model.position_embedding_type} for a model that reads"
            " images.",
            "its tokens have positions in time, height and width",
            "--position-embedding-type",
            fix="use --position-embedding-type mrope --mrope-section T H W",
        )
    pairs = int((model.kv_channels or 0) * model.rotary_percent) // 2
    section = model.mrope_section
    if is_mrope and pairs and (section is None or len(section) != 3 or sum(section) != pairs):
        third = pairs // 3
        yield problem(
            f"--mrope-section {section} for heads of {pairs} pairs of channels.",
            "the three sections together are the pairs of channels that rotate",
            "--mrope-section",
            fix=f"use --mrope-section {pairs - 2 * third} {third} {third}",
        )
    if section is not None and not is_mrope:
        yield problem(
            f"--mrope-section {section} without --position-embedding-type mrope.",
            "the sections say which channels have a position in time, height or width",
            "--mrope-section",
            "--position-embedding-type",
            fix="leave --mrope-section out",
        )


@rule
def the_encoder_of_images_can_be_built(run: ResolvedRun) -> Iterator[MegatronError]:
    """Sizes of the encoder fit each other and the layout."""
    if run.encoders.traits.has_images:
        yield from run.vision.problems(run.parallelism.tensor_model_parallel_size)


@rule
def models_with_images_have_plain_decoders(run: ResolvedRun) -> Iterator[MegatronError]:
    """What has not been built for samples with images."""
    if not run.encoders.traits.has_images:
        return
    parallel, model = run.parallelism, run.model
    asked: dict[str, object] = {
        "--num-experts": run.experts.num_moe_experts,
        "--multi-latent-attention": run.latent_attention.multi_latent_attention,
        "--mtp-num-layers": run.latent_attention.mtp_num_layers,
        "--hybrid-layer-pattern": model.hybrid_layer_pattern,
        "--experimental-attention-variant": model.experimental_attention_variant,
        "--rotary-base-local": model.rotary_base_local,
        "--use-mup": model.use_mup,
        "--context-parallel-size": parallel.context_parallel_size > 1,
        "--hybrid-context-parallel": parallel.hybrid_context_parallel,
        "--lora-rank": run.lora.lora_rank,
        "--use-torch-fsdp2": run.ddp.use_torch_fsdp2,
        "--sft": run.data.sft,
        "--fim-data": run.data.fim_data,
        "--data-args-path": run.data.data_args_path,
        "--per-split-data-args-path": run.data.per_split_data_args_path,
        "--multiple-validation-sets": run.data.multiple_validation_sets,
    }
    given = [flag for flag, value in asked.items() if value]
    if given:
        yield problem(
            f"{', '.join(given)} for a model that reads images.",
            "its decoder has plain attention and dense MLPs, a rank has whole sequences, and"
            " samples are files of JSON lines",
            *given,
            fix=f"leave out {', '.join(given)}",
        )


@rule
def something_of_the_model_is_trained(run: ResolvedRun) -> Iterator[MegatronError]:
    """Parts that are frozen belong to a model with images, and do not make up all of it."""
    vision = run.vision
    frozen = {
        "--freeze-LM": vision.freeze_lm,
        "--freeze-ViT": vision.freeze_vit,
        "--freeze-projection": vision.freeze_projection,
    }
    given = [flag for flag, is_on in frozen.items() if is_on]
    if given and not run.encoders.traits.has_images:
        yield problem(
            f"{', '.join(given)} for the architecture {run.encoders.architecture}.",
            "they name parts of a model that reads images",
            *given,
            fix="leave them out, or train by pretrain_vlm.py",
        )
    elif len(given) == len(frozen):
        yield problem(
            f"{', '.join(given)}: nothing is trained.",
            "one part at least learns",
            *given,
            fix=f"leave out {given[-1]}",
        )


@rule
def layers_get_what_is_added_on_their_stage(run: ResolvedRun) -> Iterator[MegatronError]:
    """States are added after layers of the first stage."""
    count = len(run.vision.layers_added)
    if run.encoders.traits.has_images and count > (run.model.num_layers or count):
        yield problem(
            f"--deepstack-layers names {count} layers for {run.model.num_layers} of the language"
            " model.",
            "each is added after one layer of the language model",
            "--deepstack-layers",
            "--num-layers",
            fix="name fewer layers",
        )


@rule
def files_of_images_and_texts_exist(run: ResolvedRun) -> Iterator[MegatronError]:
    """Samples are files of JSON lines."""
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
                    fix="name a file; weights of several files are not read",
                )
