"""`save_checkpoint` and `load_checkpoint` with Megatron's names, arguments and results.

Scripts for Megatron-LM call these functions, which read their settings from `get_args()`. Our
training loop uses `Checkpointer` directly.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from torch import nn

from megatron.core.dist_checkpointing import async_save
from megatron.core.dist_checkpointing.validation import StrictHandling, parse_strict_handling
from megatron.core.foundation.errors import refuse_given
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_groups
from megatron.core.settings.flags import from_args
from megatron.training.checkpointing.checkpointer import Checkpointer
from megatron.training.checkpointing.run_state import CheckpointContext
from megatron.training.checkpointing.stored_settings import MODEL_SHAPE_ARGS, stored_args
from megatron.training.config.checkpoint import CheckpointSettings
from megatron.training.global_vars import get_args
from megatron.training.run.state import TrainState


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
    args: Namespace | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Save the run into `args.save`. Collective.

    `args` contains the counters, for example `args.consumed_train_samples`. `non_persistent_ckpt`
    replaces the checkpoint of `args.non_persistent_ckpt_type`. Every rank saves its own shards, so
    `pipeline_rank`, `tensor_rank` and `expert_rank` must be this process's ranks, if given. The
    data iterator is unused: a resumed run continues after its number of consumed samples.

    Raises:
        ConfigError: a given rank differs from this process's rank.
    """
    args = get_args() if args is None else args
    groups = resolve_groups(pg_collection)
    for name, said, own in (
        ("pipeline_rank", pipeline_rank, groups.pp.rank()),
        ("tensor_rank", tensor_rank, groups.tp.rank()),
        ("expert_rank", expert_rank, groups.ep.rank()),
    ):
        refuse_given(
            "save_checkpoint",
            {f"{name}={said}": said not in (None, own)},
            rule=f"a process saves its own shards, and has {name} {own}",
            fix="call it on all ranks, without the rank",
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
    args: Namespace | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> tuple[int, float]:
    """Load the newest intact checkpoint of `args.load` into the parts. Collective.

    Sets `args.consumed_train_samples`, `consumed_valid_samples` and `skipped_train_samples`.

    Args:
        strict: if False, tensors that the checkpoint lacks keep their values and are logged, unless
            `args.dist_ckpt_strictness` sets another policy.
        skip_load_to_model_and_opt: accepted only as False.
    Returns:
        (iteration, floating-point operations so far); (0, 0.0) if there is nothing to load.
    """
    args = get_args() if args is None else args
    refuse_given(
        "load_checkpoint",
        {"skip_load_to_model_and_opt": skip_load_to_model_and_opt},
        rule="a checkpoint is read directly into the model and the optimizer",
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
    """Commit an asynchronous save if its bytes are written; `blocking` waits for them."""
    saving = async_save.in_flight()
    if saving is None:
        return
    if blocking or terminate:
        saving.finish()
    else:
        saving.try_finish()


def load_args_from_checkpoint(
    args: Namespace, load_arg: str = "load"
) -> tuple[Namespace, Namespace | None]:
    """Return (`args` with the shape of the saved model, the saved settings).

    Not a collective. The second value is None if `args.load` contains no checkpoint. A tokenizer's
    code is never taken from a checkpoint.
    """
    stored = stored_args(
        getattr(args, load_arg),
        getattr(args, "ckpt_step", None),
        save=getattr(args, "save", None),
    )
    if stored is None:
        return args, None
    merged = Namespace(**vars(args))
    for name in MODEL_SHAPE_ARGS:
        if hasattr(stored, name):
            setattr(merged, name, getattr(stored, name))
    return merged, stored


def _checkpointer(
    args: Namespace,
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
