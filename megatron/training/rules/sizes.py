"""Check the ranges of numbers before anything is computed from them."""

from __future__ import annotations

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import FlagSpec
from megatron.core.utils import as_list
from megatron.training.config.run import RunConfig, all_flags

REQUIRED = {
    "--num-layers": 12,
    "--hidden-size": 768,
    "--num-attention-heads": 12,
    "--seq-length": 1024,
    "--micro-batch-size": 4,
}
"""Required settings, each with an example."""

_LEAST = dict.fromkeys(
    (
    "train_iters", "train_samples", "lr_warmup_iters", "lr_warmup_samples", "eval_iters", "seed",
    "iterations_to_skip", "manual_gc_interval", "grad_compression_warmup", "num_workers",
    "error_injection_rate",
    "vocab_extra_ids", "tiktoken_num_special_tokens", "allowed_save_failures", "ckpt_step",
    "profile_ranks", "cpu_offloading_num_layers", "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers", "mtp_num_layers", "logging_level",
    "deepstack_layers", "vision_full_attention_layers", "mrope_section", "image_token_id",
    "vision_start_token_id", "vision_end_token_id",
    "dsa_indexer_skip_topk_offset", "dsa_indexer_local_blocks", "qk_pos_emb_head_dim",
    "mhc_sinkhorn_iterations", "moe_n_hash_layers",
    "num_kv_shared_layers", "per_layer_embed_dim", "kv_source_layers", "altup_active_idx",
    "laurel_rank",
    "fp8_margin", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"), 0
) | {"replication_factor": 2}  # fmt: skip
"""Smallest value of a setting, 1 for all others."""

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
    **dict.fromkeys(("num_workers", "num_dataset_builder_threads", "muon_num_ns_steps",
                     "mhc_sinkhorn_iterations"), 1000),
}  # fmt: skip
"""Largest value of a setting, `_SIZE` for all others. Larger values are typing errors."""


_INTERVALS = {
    name: interval
    for interval, names in {
        "[0, 1)": ("adam_beta1", "adam_beta2", "sgd_momentum", "lion_beta1", "lion_beta2",
                   "muon_momentum", "lora_dropout"),
        "[0, 1]": ("optimizer_offload_fraction", "lr_warmup_fraction"),
        "[0, inf)": ("adam_eps", "weight_decay", "clip_grad", "muon_extra_scale_factor"),
        "(0, inf)": ("loss_scale", "lora_alpha"),
        "[1, inf)": ("loss_scale_window",),
    }.items()
    for name in names
}  # fmt: skip
"""Intervals of settings that are fractions."""


def _is_in(number: float, interval: str) -> bool:
    low, high = map(float, interval[1:-1].split(","))
    is_closed_below, is_closed_above = interval[0] == "[", interval[-1] == "]"
    return (low < number or (is_closed_below and number == low)) and (
        number < high or (is_closed_above and number == high)
    )


def wrong_sizes(config: RunConfig) -> dict[str, MegatronError]:
    """Return field name -> problem for numbers outside their range."""
    found: dict[str, MegatronError] = {}
    for spec in all_flags().values():
        value, interval = config.value_of(spec.name), _INTERVALS.get(spec.name)
        numbers = [n for n in as_list(value) if n is not None]
        if interval is not None:
            if not all(_is_in(n, interval) for n in numbers):
                found[spec.name] = _problem(spec, value, f"a number in {interval}")
            continue
        is_whole = spec.element is int and not spec.choices and spec.metadata.parse is None
        if spec.group == "inert" or not is_whole:
            continue
        minimum, maximum = _LEAST.get(spec.name, 1), _MOST.get(spec.name, _SIZE)
        if spec.name == "rampup_batch_size" and len(numbers) == 3:
            numbers = [*numbers[:2], max(numbers[2], 1)] if numbers[2] >= 0 else numbers
        if any(not minimum <= n <= maximum for n in numbers):
            rule = f"a whole number from {minimum} to {maximum:,}"
            found[spec.name] = _problem(spec, value, rule)
    return found


def _problem(spec: FlagSpec, value: object, allowed: str) -> ConfigError:
    shown = " ".join(map(str, as_list(value)))
    example = spec.default if spec.default not in (None, []) else REQUIRED.get(spec.flag)
    words = " ".join(map(str, as_list(example)))
    return ConfigError(
        f"{spec.flag} {shown if len(shown) <= 60 else shown[:60] + '...'}.",
        rule=f"it is {allowed}",
        flags=[spec.flag],
        fix=f"drop {spec.flag}" if example is None else f"use {spec.flag} {words}",
    )


def with_defaults_for(config: RunConfig, names: set[str]) -> RunConfig:
    """Return the settings with these fields reset to their defaults."""
    table = all_flags()
    kept = {n: v for n, v in config.flat().items() if n not in names or n not in table}
    return RunConfig.from_values(kept)
