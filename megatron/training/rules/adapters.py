"""Rules of low-rank adapters."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.core.foundation.errors import MegatronError
from megatron.core.transformer.low_rank_adapter import EXPERT_TARGETS
from megatron.training.config.resolved import ResolvedRun
from megatron.training.rules.registry import problem, rule


@rule
def adapters_have_a_strength(run: ResolvedRun) -> Iterator[MegatronError]:
    """Strength and dropout are numbers that make an adapter."""
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
    """What is frozen must be worth freezing, and made of layers that can have adapters."""
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
            fix="add --load-hf DIRECTORY; --load is where the adapters are saved",
        )
    wrong = {
        "--transformer-impl": (run.model.transformer_impl, run.model.transformer_impl != "local"),
        "--qk-clip": (run.model.qk_clip, run.model.qk_clip),
    }
    for flag, (value, is_wrong) in wrong.items():
        if is_wrong:
            yield problem(
                f"--lora-rank with {flag} {value}.",
                "adapters are added to layers of the local backend, whose weights are frozen",
                "--lora-rank",
                flag,
                fix=f"use {flag} local" if flag == "--transformer-impl" else f"drop {flag}",
            )


@rule
def experts_have_plain_adapters(run: ResolvedRun) -> Iterator[MegatronError]:
    """Those of routed experts are two matrices, and are there if the model has experts."""
    named = [name for name in run.lora.lora_target_modules if name in EXPERT_TARGETS]
    if run.lora.lora_rank is None or not named:
        return
    if not run.experts.num_moe_experts:
        yield problem(
            f"--lora-target-modules {' '.join(named)} of a model without experts.",
            "these are the layers of routed experts",
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
                "the adapter of an expert is the product of two matrices, as in PEFT, which adapts"
                " parameters of all experts without dropout and magnitudes",
                flag,
                "--lora-target-modules",
                fix=f"drop {flag}, or {' and '.join(named)}",
            )


@rule
def adapters_of_a_directory_belong_to_a_model(run: ResolvedRun) -> Iterator[MegatronError]:
    """Their names are those of a Hugging Face model's layers."""
    if run.checkpoint.load_adapter is not None and run.checkpoint.load_hf is None:
        yield problem(
            "--load-adapter without --load-hf.",
            "an adapter of PEFT's names the layers of the model that it belongs to",
            "--load-adapter",
            "--load-hf",
            fix="add --load-hf DIRECTORY",
        )


@rule
def exported_adapters_have_a_place(run: ResolvedRun) -> Iterator[MegatronError]:
    """An export is made from a checkpoint of the run, and merged into a Hugging Face model."""
    checkpoint = run.checkpoint
    if run.lora.lora_rank is None:
        return
    if run.lora.save_adapter is not None and checkpoint.save is None:
        yield problem(
            "--save-adapter without --save.",
            "adapters are exported from a checkpoint of the run",
            "--save-adapter",
            "--save",
            fix="add --save DIRECTORY",
        )
    mlp = {"linear_fc1", "linear_fc2"} & set(run.lora.lora_target_modules)
    if (
        run.lora.save_adapter is not None
        and run.lora.use_dora
        and run.experts.num_moe_experts
        and mlp
    ):
        yield problem(
            f"--save-adapter with --use-dora beside {' and '.join(sorted(mlp))} of a model with"
            " experts.",
            "there PEFT adapts gate_proj, up_proj and down_proj as parameters, of which it learns"
            " no magnitudes",
            "--save-adapter",
            "--use-dora",
            "--lora-target-modules",
            fix="name the layers of attention in --lora-target-modules, or merge the adapters with"
            " --save-hf",
        )
    if checkpoint.save_hf is not None and checkpoint.load_hf is None:
        yield problem(
            "--save-hf with --lora-rank, without --load-hf.",
            "adapters are merged into the files of the model that they began with",
            "--save-hf",
            "--load-hf",
            fix="use --save-adapter, or begin with --load-hf DIRECTORY",
        )
