"""Check the ranges of whole numbers before anything is computed from them."""

from __future__ import annotations

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import FlagSpec
from megatron.training.config.run import RunConfig, all_flags

REQUIRED = {
    "--num-layers": 12,
    "--hidden-size": 768,
    "--num-attention-heads": 12,
    "--seq-length": 1024,
    "--micro-batch-size": 4,
}
"""Required settings, each with an example."""

_FROM_ZERO = {
    "train_iters", "train_samples", "lr_warmup_iters", "lr_warmup_samples", "eval_iters", "seed",
    "iterations_to_skip", "manual_gc_interval", "grad_compression_warmup", "num_workers",
    "error_injection_rate",
    "vocab_extra_ids", "tiktoken_num_special_tokens", "allowed_save_failures", "ckpt_step",
    "profile_ranks", "cpu_offloading_num_layers", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "mtp_num_layers", "logging_level",
    "deepstack_layers", "vision_full_attention_layers", "mrope_section", "image_token_id",
    "vision_start_token_id", "vision_end_token_id",
    "fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
}  # fmt: skip
"""Settings that may be 0; all others are at least 1."""

_SIZE = 2**31 - 1
_STEPS = 2**53
"""Largest count that is exact in fp64."""
_MOST = {
    **dict.fromkeys(
        ("train_iters", "train_samples", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters",
         "lr_warmup_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples", "ddp_bucket_size"),
        _STEPS,
    ),
    **dict.fromkeys(
        ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "expert_model_parallel_size", "expert_tensor_parallel_size", "dry_run_world_size",
         "hierarchical_context_parallel_sizes", "distributed_timeout_minutes",
         "pipeline_step_durations", "vocab_extra_ids", "tiktoken_num_special_tokens"),
        1_000_000,
    ),
    **dict.fromkeys(
        ("num_layers", "encoder_num_layers", "decoder_num_layers", "mtp_num_layers", "num_experts"),
        100_000,
    ),
    **dict.fromkeys(("num_workers", "num_dataset_builder_threads", "muon_num_ns_steps"), 1000),
}  # fmt: skip
"""Largest value of a setting, `_SIZE` for all others. Larger values are typing errors."""


def wrong_sizes(config: RunConfig) -> dict[str, MegatronError]:
    """Return field name -> problem for whole numbers outside their range."""
    found: dict[str, MegatronError] = {}
    for spec in all_flags().values():
        if (
            spec.group == "inert"
            or spec.element is not int
            or spec.choices
            or spec.metadata.parse is not None
        ):
            continue
        value = config.value_of(spec.name)
        numbers = value if isinstance(value, (list, tuple)) else [value]
        minimum, maximum = int(spec.name not in _FROM_ZERO), _MOST.get(spec.name, _SIZE)
        numbers = [n for n in numbers if n is not None]
        if spec.name == "rampup_batch_size" and len(numbers) == 3:
            numbers = [*numbers[:2], max(numbers[2], 1)] if numbers[2] >= 0 else numbers
        if any(not minimum <= n <= maximum for n in numbers):
            found[spec.name] = _problem(spec, value, minimum, maximum)
    return found


def _problem(spec: FlagSpec, value: object, minimum: int, maximum: int) -> ConfigError:
    shown = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    example = spec.default if spec.default not in (None, []) else REQUIRED.get(spec.flag)
    words = " ".join(map(str, example)) if isinstance(example, list) else str(example)
    return ConfigError(
        f"{spec.flag} {shown if len(shown) <= 60 else shown[:60] + '...'}.",
        rule=f"it is a whole number from {minimum} to {maximum:,}",
        flags=[spec.flag],
        fix=f"drop {spec.flag}" if example is None else f"use {spec.flag} {words}",
    )


def with_defaults_for(config: RunConfig, names: set[str]) -> RunConfig:
    """Return the settings with these fields reset to their defaults."""
    table = all_flags()
    kept = {n: v for n, v in config.flat().items() if n not in names or n not in table}
    return RunConfig.from_values(kept)
