"""`save_checkpoint` and `load_checkpoint` with Megatron's names, arguments and results.

They read their settings from `get_args()`, for scripts written against Megatron-LM. The loop of
this framework uses `Checkpointer` directly.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.core.dist_checkpointing import async_save
from megatron.core.dist_checkpointing.interop.opening import open_any
from megatron.core.dist_checkpointing.object_store import storage_path
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_handling
from megatron.core.foundation.errors import CheckpointError, refuse_given
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.settings.flags import from_args
from megatron.core.transport.object_collectives import SingleProcess
from megatron.core.utils import get_pg_rank
from megatron.training.checkpointing.checkpointer import Checkpointer
from megatron.training.checkpointing.run_state import CheckpointContext
from megatron.training.checkpointing.selection import select_checkpoints
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.global_vars import get_args
from megatron.training.run.state import TrainState

MODEL_SHAPE_ARGS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "num_query_groups", "group_query_attention", "seq_length", "max_position_embeddings",
    "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved",
    "use_rotary_position_embeddings", "use_rope_scaling", "rope_scaling_factor",
    "add_position_embedding", "add_bias_linear", "add_qkv_bias", "qk_layernorm", "swiglu",
    "squared_relu", "normalization", "norm_epsilon", "apply_layernorm_1p",
    "untie_embeddings_and_output_weights", "make_vocab_size_divisible_by",
    "unpadded_vocab_size", "tokenizer_type", "tokenizer_model", "vocab_size", "vocab_file",
    "merge_file", "window_size", "window_attn_skip_freq", "rotary_base_local", "geglu",
    "sandwich_norm", "use_parallel_residual", "embedding_multiplier", "softmax_scale",
    "attn_logit_softcapping", "final_logit_softcapping", "softmax_type", "no_rope_freq",
    "rotary_seq_len_interpolation_factor", "apply_residual_connection_post_layernorm",
    "openai_gelu", "quick_geglu", "glu_linear_offset", "activation_func_clamp_value",
    "multi_latent_attention", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim",
    "v_head_dim", "rotary_scaling_factor", "original_max_position_embeddings", "beta_fast",
    "beta_slow", "yarn_correction_range_round_to_int", "mscale", "mscale_all_dim", "num_experts",
    "moe_layer_freq", "moe_ffn_hidden_size", "moe_router_topk", "moe_router_score_function",
    "moe_router_pre_softmax", "moe_router_topk_scaling_factor", "moe_router_num_groups",
    "moe_router_group_topk", "moe_router_group_score_topk", "moe_router_enable_expert_bias",
    "moe_router_dtype", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate",
)  # fmt: skip
"""What `--use-checkpoint-args` takes over: the model, not the layout and not the schedule."""

TOKENIZER_FILES = {"tokenizer_model", "vocab_file", "merge_file"}
"""Settings of it that name files."""


def save_checkpoint(
    iteration: int,
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer,
    opt_param_scheduler: OptimizerParamScheduler | None,
    num_floating_point_operations_so_far: float,
    checkpointing_context: object = None,
    pipeline_rank: int | None = None,
    expert_rank: int | None = None,
    tensor_rank: int | None = None,
    pipeline_parallel: bool | None = None,
    expert_parallel: bool | None = None,
    non_persistent_ckpt: bool = False,
    train_data_iterator: object = None,
    preprocess_common_state_dict_fn: object = None,
    *,
    args: argparse.Namespace | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Save the run into `args.save`: collective.

    Counters come from `args.consumed_train_samples` and its kin. With `non_persistent_ckpt` the
    checkpoint of `args.non_persistent_ckpt_type` is replaced. Every rank saves its own shards:
    `pipeline_rank`, `tensor_rank` and `expert_rank` may say the same, and nothing else.
    The data iterator is not asked: a run continues at its number of consumed samples.

    Raises:
        ConfigError: a rank is given that is not this process's.
    """
    args = get_args() if args is None else args
    groups = resolve_groups(pg_collection)
    for name, said, own in (
        ("pipeline_rank", pipeline_rank, get_pg_rank(groups.pp)),
        ("tensor_rank", tensor_rank, get_pg_rank(groups.tp)),
        ("expert_rank", expert_rank, get_pg_rank(groups.ep)),
    ):
        refuse_given(
            "save_checkpoint",
            {f"{name}={said}": said not in (None, own)},
            rule=f"a process saves its own part, and has {name} {own}",
            fix="save from all ranks at once, and leave the rank out",
        )
    maybe_finalize_async_save(blocking=True)
    checkpointer = _checkpointer(args, model, optimizer, opt_param_scheduler, pg_collection)
    train_state = TrainState(
        iteration=iteration,
        consumed_train_samples=getattr(args, "consumed_train_samples", 0),
        consumed_valid_samples=getattr(args, "consumed_valid_samples", 0),
        skipped_train_samples=getattr(args, "skipped_train_samples", 0),
        flops_so_far=num_floating_point_operations_so_far,
    )
    if non_persistent_ckpt:
        checkpointer.save_non_persistent(train_state)
        return
    checkpointer.save(train_state)


def load_checkpoint(
    model: Sequence[nn.Module],
    optimizer: MegatronOptimizer | None,
    opt_param_scheduler: OptimizerParamScheduler | None,
    load_arg: str = "load",
    strict: bool = True,
    checkpointing_context: object = None,
    skip_load_to_model_and_opt: bool = False,
    *,
    args: argparse.Namespace | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[int, float]:
    """Load the newest intact checkpoint of `args.load` into the parts: collective.

    Sets `args.consumed_train_samples`, `consumed_valid_samples` and `skipped_train_samples`.

    Args:
        strict: False lets what is not in the checkpoint keep its values, and says what that is,
            unless `args.dist_ckpt_strictness` decides otherwise.
        skip_load_to_model_and_opt: accepted only as False.
    Returns:
        (iteration, floating-point operations so far); (0, 0.0) if there is nothing to load.
    """
    args = get_args() if args is None else args
    refuse_given(
        "load_checkpoint",
        {"skip_load_to_model_and_opt": skip_load_to_model_and_opt},
        rule="what is read goes straight into the model and the optimizer",
        fix="use load_args_from_checkpoint for the settings of a checkpoint",
    )
    overrides = {"load": getattr(args, load_arg)}
    policy = getattr(args, "dist_ckpt_strictness", StrictHandling.ASSUME_OK_UNEXPECTED)
    if not strict and parse_strict_handling(policy) is StrictHandling.ASSUME_OK_UNEXPECTED:
        overrides["dist_ckpt_strictness"] = StrictHandling.LOG_UNEXPECTED.value
    checkpointer = _checkpointer(
        args, model, optimizer, opt_param_scheduler, pg_collection, **overrides
    )
    restored = checkpointer.load()
    train_state = TrainState() if restored is None else restored.train_state
    args.consumed_train_samples = train_state.consumed_train_samples
    args.consumed_valid_samples = train_state.consumed_valid_samples
    args.skipped_train_samples = train_state.skipped_train_samples
    return train_state.iteration, train_state.flops_so_far


def maybe_finalize_async_save(blocking: bool = False, terminate: bool = False) -> None:
    """Commit an asynchronous save if its bytes are written; with `blocking` wait for it."""
    saving = async_save.in_flight()
    if saving is None:
        return
    if blocking or terminate:
        saving.finish()
    else:
        saving.try_finish()


def load_args_from_checkpoint(
    args: argparse.Namespace, load_arg: str = "load"
) -> tuple[argparse.Namespace, argparse.Namespace | None]:
    """Return `args` with the model's shape as it was saved, and the saved settings.

    This process alone; every rank reads the same file. The second result is None where
    `args.load` holds no checkpoint. A tokenizer's code is never taken from a checkpoint.
    """
    stored = stored_args(
        getattr(args, load_arg),
        getattr(args, "ckpt_step", None),
        save=getattr(args, "save", None),
    )
    if stored is None:
        return args, None
    merged = argparse.Namespace(**vars(args))
    for name in MODEL_SHAPE_ARGS:
        if hasattr(stored, name):
            setattr(merged, name, getattr(stored, name))
    return merged, stored


def stored_args(
    directory: str | None, ckpt_step: int | None = None, *, save: str | None = None
) -> argparse.Namespace | None:
    """Return the settings saved in the newest readable checkpoint of a directory.

    Arguments are those of `select_checkpoints`.
    """
    if directory is None:
        return None
    for found in select_checkpoints(storage_path(directory), ckpt_step, save=save).candidates:
        try:
            state = open_any(found.path, peers=SingleProcess()).common_state()
        except CheckpointError:
            continue
        args = state.get("args")
        if isinstance(args, argparse.Namespace):
            return args
    return None


def _checkpointer(
    args: argparse.Namespace,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    scheduler: Any,
    groups: ProcessGroupCollection | None,
    **overrides: Any,
) -> Checkpointer:
    context = CheckpointContext(
        model=[model] if isinstance(model, nn.Module) else list(model),
        optimizer=optimizer,
        scheduler=scheduler,
        groups=resolve_groups(groups),
        weights="all" if getattr(args, "lora_rank", None) is None else "adapters",
        args=vars(args),
    )
    return Checkpointer(from_args(CheckpointSettings, vars(args) | overrides), context)
