"""TensorBoard and Weights & Biases, on the last rank only: it knows the loss."""

from __future__ import annotations

from typing import Any

from megatron.core.foundation import optional_imports
from megatron.training.config.resolved import ResolvedRun
from megatron.training.config.run import plain
from megatron.training.launch.printing import is_last_rank


def open_tensorboard(run: ResolvedRun) -> Any:
    """Return a `SummaryWriter` with the settings of the run as text, or None."""
    if run.logging.tensorboard_dir is None or not is_last_rank():
        return None
    optional_imports.require("tensorboard", purpose="--tensorboard-dir")
    module = optional_imports.require("torch.utils.tensorboard", purpose="--tensorboard-dir")
    writer = module.SummaryWriter(
        log_dir=run.logging.tensorboard_dir, max_queue=run.logging.tensorboard_queue_size
    )
    for name, value in {**run.values, **run.extra}.items():
        writer.add_text(name, str(plain(value)))
    return writer


def open_wandb(run: ResolvedRun) -> Any:
    """Return the wandb module with an open run, or None; offline where it cannot log in."""
    if not run.logging.wandb_project or not is_last_rank():
        return None
    wandb = optional_imports.require("wandb", purpose="--wandb-project")
    settings = {
        "project": run.logging.wandb_project,
        "entity": run.logging.wandb_entity,
        "name": run.logging.wandb_exp_name,
        "dir": run.logging.wandb_save_dir,
        "config": {name: plain(value) for name, value in run.config.flat().items()},
    }
    try:
        wandb.init(**settings)
    except wandb.Error as error:  # no key, or nobody answers; this rank alone must not end the run
        print(
            f"wandb: {error}\nwandb: the run is recorded offline; upload it with `wandb sync`, or "
            "run `wandb login` first. WANDB_MODE=offline or disabled says so beforehand.",
            flush=True,
        )
        wandb.init(**settings, mode="offline")
    return wandb
