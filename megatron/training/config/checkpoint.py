"""Flags of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag

_WRITES_NATIVE = "checkpoints are written in the native sharded format in any case"


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved and loaded, where and when."""

    save: str | None = None
    """Directory that checkpoints are written to."""
    load: str | None = None
    """Directory that a checkpoint is read from."""
    save_interval: int | None = None
    """Steps between checkpoints; one is written at the end in any case."""
    save_retain_interval: int | None = None
    """Keep only checkpoints whose step this divides, and the newest."""
    ckpt_format: str = flag(
        "torch_dist",
        "--ckpt-format",
        "--dist-ckpt-format",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
        refuse_values={"fsdp_dtensor": "use torch_dist"},
    )
    """Format; the sharded one can be read in any layout."""
    ckpt_step: int | None = None
    """Load this step instead of the newest."""
    finetune: bool = False
    """Load weights only and start at step 0."""
    pretrained_checkpoint: str | None = None
    """Directory of weights to start from when --load holds nothing yet."""
    no_load_optim: bool = False
    """Do not load optimizer state."""
    no_load_rng: bool = False
    """Do not load the random state."""
    no_save_optim: bool = False
    """Do not save optimizer state."""
    no_save_rng: bool = False
    """Do not save the random state."""
    use_checkpoint_args: bool = False
    """Take the model's shape from the checkpoint."""
    exit_on_missing_checkpoint: bool = False
    """Fail when --load holds no checkpoint, instead of starting afresh."""
    async_save: bool = False
    """Write in the background while training goes on."""
    use_dist_ckpt: bool = flag(False, note=_WRITES_NATIVE)
    """Older switch for sharded checkpoints."""
    ckpt_fully_parallel_save: bool = flag(True, "--no-ckpt-fully-parallel-save")
    """Let only the first replica write."""
    ckpt_fully_parallel_load: bool = flag(
        False, note="each rank reads only the slices that it needs"
    )
    """Divide reading among replicas."""
    ckpt_assume_constant_structure: bool = flag(
        False, note="the plan of a save is formed anew each time, which costs little"
    )
    """Reuse the plan of the first save."""
    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected",
        choices=(
            "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
            "return_unexpected", "return_all", "ignore_all",
        ),
    )  # fmt: skip
    """What happens when the names in a checkpoint are not those of the model."""
    dist_ckpt_optim_fully_reshardable: bool = flag(
        False, note="optimizer state can be read in any layout in any case"
    )
    """Make optimizer state readable in other layouts."""
    auto_detect_ckpt_format: bool = flag(False, note="the format is always read from the files")
    """Find out the format of what is loaded."""
    non_persistent_save_interval: int | None = flag(None, refuse="use --save-interval")
    """Steps between short-lived checkpoints."""
    non_persistent_ckpt_type: str | None = flag(
        None,
        choices=("global", "local", "in_memory"),
        part_of="non_persistent_save_interval",
    )
    """Where those live."""
