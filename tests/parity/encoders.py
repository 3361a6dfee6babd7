"""Print how far encoders are from Transformers and from one process: `python -m
tests.parity.encoders [--part hugging-face|curves|layouts]`.

- hugging-face: small models of Transformers with random weights, norms and biases are loaded in
  layouts of tensor, pipeline and data parallelism with ZeRO; logits and every gradient of a step
  on samples of the dataset are compared.
- curves: both are trained for 20 steps on the same samples, from the same weights, by Adam; the
  losses are compared.
- layouts: models with drawn weights and dropout are trained in drawn layouts; losses, every
  gradient, norms and weights are compared with those of one process.

Exits with status 1 if any error exceeds its tolerance.
"""

import functools
import random
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.compare import Errors, compare
from tests.parity.encoder_case import (
    OPTIMIZER,
    SAMPLES,
    TOKENS,
    VOCABULARY,
    EncoderReport,
    answer_about,
    assembled,
    case_of,
    micro_batches,
    through_checkpoint,
    train,
    write_after,
    write_vocabulary,
)
from tests.parity.layouts import LayoutCase
from tests.parity.table import FIGURES, exceeds, figures
from tests.parity.training_case import Run
from tests.unit.hugging_face.gradients import compare_gradients

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 40, "layer_norm_eps": 1e-6,
}  # fmt: skip
_T5_SIZES = {
    "vocab_size": TOKENS["t5"], "d_model": 32, "d_kv": 12, "num_heads": 4, "d_ff": 48,
    "num_layers": 2, "num_decoder_layers": 4, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 16, "dropout_rate": 0.0,
}  # fmt: skip

_TEXT = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_TEXT_3_5 = {
    "head_dim": 32, "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    # A first token's output has its product of query and key as a factor, and is normed.
    "rms_norm_eps": 1e-2,
    "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2],
                        "mrope_interleaved": True},
}  # fmt: skip
_ENCODER = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "patch_size": 4,
    "out_hidden_size": 64,
}  # fmt: skip
_IMAGE_TOKENS = {
    "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92,
    "vision_end_token_id": 93,
}  # fmt: skip

PUBLISHED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForPreTraining", _SIZES),
    "bert, hidden words alone": (
        "BertConfig", "BertForMaskedLM", {**_SIZES, "hidden_act": "gelu_new"},
    ),
    "megatron-bert": ("MegatronBertConfig", "MegatronBertForPreTraining", _SIZES),
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5_SIZES),
    "t5 1.1": ("T5Config", "T5ForConditionalGeneration", {
        **_T5_SIZES, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False,
        "scale_decoder_outputs": False,
    }),
    "qwen2.5-vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", {
        **_IMAGE_TOKENS,
        "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}},
        "vision_config": {**_ENCODER, "window_size": 16, "fullatt_block_indexes": [1]},
    }),
    "qwen2.5-vl, tied": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration", {
        **_IMAGE_TOKENS, "tie_word_embeddings": True,
        "text_config": {**_TEXT, "rope_parameters": {**_ROPE, "mrope_section": [4, 2, 2]}},
        "vision_config": {**_ENCODER, "window_size": 8, "fullatt_block_indexes": [0, 2]},
    }),
    "qwen3-vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration", {
        **_IMAGE_TOKENS,
        "text_config": {**_TEXT, "head_dim": 16, "rope_parameters": {
            **_ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        "vision_config": {
            **_ENCODER, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    }),
    "qwen3.5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", {
        **_IMAGE_TOKENS, "text_config": {**_TEXT, **_TEXT_3_5},
        "vision_config": {**_ENCODER, "num_position_embeddings": 16},
    }),
    "qwen3.5, experts": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration", {
        **_IMAGE_TOKENS, "text_config": {
            **_TEXT, **_TEXT_3_5, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        "vision_config": {**_ENCODER, "num_position_embeddings": 16},
    }),
}  # fmt: skip
"""Name -> config class and model class of Transformers, and the config's arguments."""

LAYOUTS = (
    LayoutCase(micro_batch_size=2),
    LayoutCase(tp=2, micro_batch_size=2),
    LayoutCase(tp=4, sp=True, micro_batch_size=2),
    LayoutCase(pp=2, micro_batch_size=2),
    LayoutCase(dp=2, stage=1, micro_batch_size=2),
    LayoutCase(dp=2, stage=3, micro_batch_size=2),
    LayoutCase(tp=2, sp=True, pp=2, dp=2, stage=1, micro_batch_size=2),
)

_T5_SHAPE = (
    "--encoder-num-layers", "3", "--decoder-num-layers", "3", "--decoder-seq-length", "16",
)  # fmt: skip
_BIASES = (
    "--position-embedding-type", "relative", "--relative-attention-num-buckets", "8",
    "--relative-attention-max-distance", "16",
)  # fmt: skip
_LAYERS = ("--num-layers", "4")
_READS_IMAGES = (
    *_LAYERS, "--seq-length", "48", "--position-embedding-type", "mrope", "--mrope-section", "2",
    "1", "1", "--image-token-id", "90", "--vision-num-layers", "3", "--vision-hidden-size", "32",
    "--vision-num-attention-heads", "4", "--vision-ffn-hidden-size", "48", "--patch-dim", "4",
    "--vision-window-size", "16", "--vision-full-attention-layers", "1", "--normalization",
    "RMSNorm", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights",
)  # fmt: skip
_ADDS_STATES = (
    "--vision-model-type", "qwen3_vl", "--vision-num-position-embeddings", "16",
    "--deepstack-layers", "0", "2", "--qk-layernorm",
)  # fmt: skip
_RECURRENT = (
    "--experimental-attention-variant", "gated_delta_net", "--linear-attention-freq", "2",
    "--linear-num-key-heads", "4", "--linear-num-value-heads", "4", "--linear-key-head-dim", "8",
    "--linear-value-head-dim", "8",
)  # fmt: skip
DRAWN: dict[str, tuple[str, ...]] = {
    "t5": (*_T5_SHAPE, *_BIASES),
    "t5, untied": (
        *_T5_SHAPE, *_BIASES, "--untie-embeddings-and-output-weights", "--normalization", "RMSNorm",
        "--disable-bias-linear", "--geglu",
    ),
    "t5, learned positions": _T5_SHAPE,
    "t5, rope": (*_T5_SHAPE, "--position-embedding-type", "rope", "--relu"),
    "vlm": _READS_IMAGES,
    "vlm, full recomputation": (
        *_READS_IMAGES, "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1",
    ),
    "vlm, states added": (*_READS_IMAGES, *_ADDS_STATES),
    "vlm, states added, recomputed": (
        *_READS_IMAGES, *_ADDS_STATES, "--recompute-granularity", "full", "--recompute-method",
        "uniform", "--recompute-num-layers", "2",
    ),
    "vlm, recurrent mixers and experts": (
        *_READS_IMAGES, *_ADDS_STATES, *_RECURRENT, "--num-experts", "4", "--moe-router-topk", "2",
        "--moe-router-load-balancing-type", "none", "--moe-ffn-hidden-size", "16",
    ),
    "vlm, frozen encoder": (*_READS_IMAGES, "--freeze-ViT"),
    "vlm, frozen language model": (*_READS_IMAGES, "--freeze-LM"),
    "vlm, frozen but for the projector": (*_READS_IMAGES, "--freeze-LM", "--freeze-ViT"),
    "bert": _LAYERS,
    "bert, post-norm, rope": (
        *_LAYERS, "--apply-residual-connection-post-layernorm", "--position-embedding-type", "rope",
    ),
    "bert, hidden words alone, untied": (
        *_LAYERS, "--bert-no-binary-head", "--untie-embeddings-and-output-weights",
    ),
}  # fmt: skip
"""Name -> flags of a model with drawn weights, besides `_SHAPE`."""
_SHAPE = (
    "--hidden-size", "32", "--num-attention-heads", "4", "--init-method-std", "0.1",
)  # fmt: skip
WORDS: dict[str, tuple[str, ...]] = {
    "bert": (), "t5": ("--decoder-seq-length", "16"), "vlm": ("--seq-length", "48"),
}  # fmt: skip
"""Architecture -> flags of all its models."""
NO_DROPOUT = ("--hidden-dropout", "0", "--attention-dropout", "0")


def saved(case: str, directory: Path) -> Any:
    """Build a model of Transformers with random weights, save it, and return it."""
    config, kind, fields = PUBLISHED[case]
    torch.manual_seed(3)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.1
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    model.set_experts_implementation("eager")  # others have no fp64
    model.save_pretrained(directory)
    return model


def run_layout(
    layout: LayoutCase,
    folder: Path,
    words: tuple[str, ...],
    directory: Path | None = None,
    num_steps: int = 1,
    embeds: bool = False,
    model: str = "bert",
) -> list[EncoderReport]:
    """Train in a layout on worker processes."""
    sizes = {"tp": layout.tp, "pp": layout.pp, "vp": layout.vp, "cp": layout.cp}
    return run_distributed(
        train, layout.world_size, layout, folder / "vocab.txt", words, directory, num_steps,
        embeds, model, timeout_s=240.0, **sizes,
    )  # fmt: skip


def against_transformers(case: str, layout: LayoutCase, folder: Path) -> tuple[float, float]:
    """Return the largest error of a logit, and of a gradient relative to its tensor's largest.

    Raises:
        AssertionError: one exceeds its tolerance.
    """
    directory = folder / case.replace(" ", "-").replace(",", "")
    theirs, model = saved(case, directory), architecture_of(case)
    words = (*WORDS[model], *NO_DROPOUT)
    reports = run_layout(layout, folder, words, directory, model=model)
    batches = list(micro_batches(their_samples(theirs, folder, model), 0, layout.micro_batch_size))
    expected, is_token = case_of(model).their_logits(theirs, batches[0])
    expected = expected.detach()
    logits = next(r.logits for r in reports if r.logits is not None)[..., : TOKENS[model]].detach()
    assert_close(logits[is_token], expected[is_token], FP32_REORDERED_SUM, "logits")
    for batch in batches:
        (case_of(model).their_loss(theirs, batch) / len(batches)).backward()
    gradients = assembled(reports, model).gradients[0]
    worst = compare_gradients(directory, theirs, gradients, reads_images=True)
    return float((logits - expected)[is_token].abs().max()), worst


def architecture_of(case: str) -> str:
    """Return what a case trains."""
    if case.startswith(("vlm", "qwen")):
        return "vlm"
    return "t5" if case.startswith("t5") else "bert"


def their_samples(model: Any, folder: Path, architecture: str = "bert") -> Any:
    """Return the dataset that a model of Transformers is trained on."""
    pairs = hasattr(model, "cls") and hasattr(model.cls, "seq_relationship")
    return case_of(architecture).dataset(folder / "vocab.txt", pairs)


def curves(
    case: str, layout: LayoutCase, folder: Path, num_steps: int
) -> tuple[list[float], list[float]]:
    """Return the losses of both trained from the same weights: Transformers' first."""
    directory = folder / case.replace(" ", "-").replace(",", "")
    theirs, model = saved(case, directory), architecture_of(case)
    optimizer = torch.optim.Adam(
        theirs.parameters(), lr=OPTIMIZER["lr"], eps=OPTIMIZER["adam_eps"], betas=(0.9, 0.999)
    )
    samples, losses = their_samples(theirs, folder, model), []
    for step in range(num_steps):
        batches = list(micro_batches(samples, step, layout.micro_batch_size))
        optimizer.zero_grad()
        total = 0.0
        for batch in batches:
            loss = case_of(model).their_loss(theirs, batch) / len(batches)
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), OPTIMIZER["clip_grad"])
        optimizer.step()
        losses.append(total)
    words = (*WORDS[model], *NO_DROPOUT)
    reports = run_layout(layout, folder, words, directory, num_steps, model=model)
    return losses, next(report.losses for report in reports if report.losses)


@functools.cache
def serial_run(
    folder: Path,
    words: tuple[str, ...],
    micro_batch_size: int,
    embeds: bool = False,
    model: str = "bert",
) -> Run:
    """Train on one process."""
    layout = LayoutCase(micro_batch_size=micro_batch_size)
    reports = run_layout(layout, folder, words, num_steps=2, embeds=embeds, model=model)
    return assembled(reports, model)


def against_one_process(case: str, layout: LayoutCase, folder: Path) -> Errors:
    """Train two steps in a layout, from drawn weights, with dropout, and compare."""
    words, model = (*_SHAPE, *DRAWN[case]), architecture_of(case)
    run = assembled(run_layout(layout, folder, words, num_steps=2, model=model), model)
    return compare(run, serial_run(folder, words, layout.micro_batch_size, model=model))


def reloaded(case: str, saved_in: LayoutCase, loaded_in: LayoutCase, directory: Path) -> list[Run]:
    """Save drawn weights in one layout and load them in another; return both models."""
    words, model = (*_SHAPE, *DRAWN[case]), architecture_of(case)
    runs = []
    for layout, is_saved in ((saved_in, True), (loaded_in, False)):
        reports = run_distributed(
            through_checkpoint, layout.world_size, layout, words, directory, is_saved, model,
            timeout_s=240.0, tp=layout.tp, pp=layout.pp, vp=layout.vp,
        )  # fmt: skip
        runs.append(assembled(reports, model))
    return runs


def written(case: str, layout: LayoutCase, folder: Path) -> tuple[list[list[int]], ...]:
    """Return what a T5 writes by the most likely tokens: Transformers', then ours on each rank."""
    directory = folder / case.replace(" ", "-")
    theirs, num_tokens = saved(case, directory), 9
    sources = [[5, 9, 70, 31, 8], [12], [60, 61, 62, 7, 90, 101, 3, 44]]
    ids = torch.zeros(len(sources), max(map(len, sources)), dtype=torch.long)
    for row, source in enumerate(sources):
        ids[row, : len(source)] = torch.tensor(source)
    lengths = torch.tensor([len(source) for source in sources])
    theirs.generation_config.eos_token_id = None
    expected = theirs.generate(
        input_ids=ids,
        attention_mask=(torch.arange(ids.shape[1]) < lengths[:, None]).long(),
        decoder_start_token_id=0,
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=False,  # its cache has as many layers as the encoder
    )
    found = run_distributed(
        write_after, layout.world_size, layout, (*WORDS["t5"], *NO_DROPOUT), directory, sources,
        num_tokens, timeout_s=240.0, tp=layout.tp, pp=layout.pp, vp=layout.vp,
    )  # fmt: skip
    return expected.tolist(), *found


def answered(case: str, layout: LayoutCase, folder: Path) -> tuple[list[list[int]], ...]:
    """Return how prompts about images are continued: by Transformers, then by us on each rank."""
    directory = folder / case.replace(" ", "-")
    theirs, num_tokens = saved(case, directory), 7
    theirs.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(5)
    prompts, images, expected = [], [], []
    for grids in ([(1, 4, 6)], [(1, 2, 2), (1, 4, 4)], []):
        own = [(torch.randn(t * h * w, 96, generator=generator), (t, h, w)) for t, h, w in grids]
        prompt = [
            3,
            5,
            *(token for t, h, w in grids for token in (92, *[90] * (h * w // 4), 93)),
            7,
        ]
        given: dict[str, Any] = {}
        if own:
            given["pixel_values"] = torch.cat([patches for patches, _ in own])
            given["image_grid_thw"] = torch.tensor(grids)
        ids = torch.tensor([prompt])
        kinds = (ids == 90).int()
        written = theirs.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds,
            max_new_tokens=num_tokens, do_sample=False, **given,
        )  # fmt: skip
        prompts.append(prompt)
        images.append(own)
        expected += written.tolist()
    found = run_distributed(
        answer_about, layout.world_size, layout, (*WORDS["vlm"], *NO_DROPOUT), directory, prompts,
        images, num_tokens, timeout_s=240.0, tp=layout.tp, pp=layout.pp, vp=layout.vp,
    )  # fmt: skip
    return expected, *found


def embeddings_against_one_process(layout: LayoutCase, folder: Path) -> Errors:
    """Train an embedding model with a contrastive loss, as `against_one_process` does.

    The keys of all replicas are the others of a query, so that one process takes the samples of
    their micro batches in one.
    """
    words = (*_SHAPE, *_LAYERS, "--untie-embeddings-and-output-weights")
    run = assembled(run_layout(layout, folder, words, num_steps=2, embeds=True))
    size = layout.micro_batch_size * layout.dp
    return compare(run, serial_run(folder, words, size, embeds=True))


def draw_layout(generator: random.Random) -> LayoutCase:
    """Draw a layout of at most 8 ranks."""
    while True:
        layout = LayoutCase(
            tp=generator.choice((1, 2, 4)),
            pp=generator.choice((1, 2, 4)),
            cp=generator.choice((1, 1, 2)),
            dp=generator.choice((1, 2)),
            vp=generator.choice((1, 2)),
            stage=generator.choice((0, 1, 2, 3)),
            micro_batch_size=generator.choice((1, 2)),
        )
        has_chunks = layout.vp == 1 or layout.pp == 2
        if 1 < layout.world_size <= 8 and has_chunks and SAMPLES % layout.dp == 0:
            is_sp = layout.tp > 1 and generator.random() < 0.5
            stage = layout.stage if layout.dp > 1 else 0
            return LayoutCase(**{**vars(layout), "sp": is_sp, "stage": stage})


def with_drawn_split(layout: LayoutCase, generator: random.Random) -> LayoutCase:
    """Cut the six layers of the drawn T5 at any places, also into empty stages; without CP."""
    num_stages = layout.pp * layout.vp
    if num_stages == 1:
        return replace(layout, cp=1)
    cuts = sorted(generator.choices(range(7), k=num_stages - 1))
    sizes = [b - a for a, b in zip((0, *cuts), (*cuts, 6), strict=True)]
    letters = "E" + "|".join("t" * size for size in sizes) + "L"
    return replace(layout, cp=1, letters=letters)


def with_whole_sequences(layout: LayoutCase) -> LayoutCase:
    """Leave context parallelism out, and let the first of four stages have two layers."""
    num_stages = layout.pp * layout.vp
    return replace(layout, cp=1, letters="Ett|t||tL" if num_stages == 4 else "")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    part: str = flag("all", choices=("all", "hugging-face", "curves", "layouts"))
    """Which table."""
    cases: str = ""
    """Only models whose name begins so."""
    count: int = 20
    """Layouts drawn for each model."""
    steps: int = 20
    """Steps of a curve."""
    seed: int = 1


def main() -> int:
    """Print the tables."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_vocabulary(folder)
        if options.part in ("all", "hugging-face"):
            print(f"{'case':<36}{'layout':<28}{'logits':>10}{'gradients':>11}")
            for case in filter(lambda c: c.startswith(options.cases), PUBLISHED):
                for layout in LAYOUTS:
                    try:
                        logits, worst = against_transformers(case, layout, folder)
                        print(f"{case:<36}{layout!s:<28}{logits:>10.1e}{worst:>11.1e}", flush=True)
                    except AssertionError as error:
                        failures.append(f"{case} | {layout}: {error}")
                        print(f"{case:<36}{layout!s:<28}  FAILED", flush=True)
        if options.part in ("all", "curves"):
            for case in filter(lambda c: c.startswith(options.cases), PUBLISHED):
                layout = LayoutCase(tp=2, pp=2, micro_batch_size=2)
                theirs, ours = curves(case, layout, folder, options.steps)
                worst = max(abs(a - b) / abs(a) for a, b in zip(theirs, ours, strict=True))
                print(
                    f"{case}, {layout}, {options.steps} steps: {theirs[0]:.6f} -> {theirs[-1]:.6f}"
                    f" theirs, {ours[0]:.6f} -> {ours[-1]:.6f} ours, largest difference"
                    f" {worst:.1e} of the loss",
                    flush=True,
                )
                failures += [f"{case}: {worst}"] * (worst > FP32_REORDERED_SUM.rtol)
        if options.part in ("all", "layouts"):
            generator = random.Random(options.seed)
            for case in filter(lambda c: c.startswith(options.cases), DRAWN):
                print(f"{case}\n{'layout':<40}{FIGURES}", flush=True)
                for _ in range(options.count):
                    layout = draw_layout(generator)
                    if architecture_of(case) == "t5":
                        layout = with_drawn_split(layout, generator)
                    if architecture_of(case) == "vlm":
                        layout = with_whole_sequences(layout)
                    errors = against_one_process(case, layout, folder)
                    print(f"{layout!s:<40}{figures(errors)}", flush=True)
                    failures += [f"{case} | {layout}: {what}" for what in exceeds(errors)]
    print(f"{len(failures)} above tolerance", *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
