"""Flags of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag

_WRITES_NATIVE = "checkpoints are written in the native sharded format in any case"


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """What is saved and loaded, where and when."""

    save: str | None = None
    """Directory that checkpoints are written to, or a URL of an object store."""
    load: str | None = None
    """Directory or URL that a checkpoint is read from."""
    save_interval: int | None = flag(None, "--save-interval", "--persistent-save-interval")
    """Steps between checkpoints; one is written at the end in any case."""
    save_retain_interval: int | None = None
    """Keep only checkpoints whose step this divides, and the newest."""
    most_recent_k: int | None = None
    """Keep only so many of the newest checkpoints, and what --save-retain-interval keeps."""
    allowed_save_failures: int = 0
    """So many saves in a row may fail, for example on a full disk: training goes on and tries again
    at the next interval. The last save of a run must succeed."""
    ckpt_format: str = flag(
        "torch_dist",
        "--ckpt-format",
        "--dist-ckpt-format",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
        note_values=dict.fromkeys(("torch", "torch_dcp", "fsdp_dtensor"), _WRITES_NATIVE),
    )
    """Format; the sharded one can be read in any layout."""
    ckpt_step: int | None = None
    """Load this step instead of the newest."""
    finetune: bool = False
    """Load weights only and start at step 0."""
    pretrained_checkpoint: str | None = None
    """Directory of weights to start from when --load holds nothing yet."""
    load_hf: str | None = None
    """Directory of a Hugging Face model to start from: its shape, its weights and, without
    --tokenizer-type, its tokenizer. A checkpoint in --load comes first, so a run resumes."""
    load_adapter: str | None = None
    """Begin with the adapters of a directory of PEFT's, which says their rank, strength and places;
    beside --load-hf. A checkpoint of --load comes first."""
    moe_use_upcycling: bool = flag(False, part_of="num_experts")
    """Where a checkpoint to load is that of a dense model, start every expert as its MLP."""
    save_hf: str | None = None
    """Write the weights as a Hugging Face model into this directory when training ends."""
    save_hf_dtype: str | None = flag(None, choices=("fp32", "bf16", "fp16"), part_of="save_hf")
    """Precision of what --save-hf writes. Default: that of the weights in the checkpoint, and of
    merged adapters that of the model they began with, which may round what they have learned."""
    no_load_optim: bool = False
    """Do not load optimizer state."""
    no_load_rng: bool = False
    """Do not load the random state."""
    no_save_optim: bool = False
    """Do not save optimizer state."""
    no_save_rng: bool = False
    """Do not save the random state."""
    use_checkpoint_args: bool = False
    """Take the model's shape from the checkpoint, where no flag gives it, and the type of the
    tokenizer."""
    use_tokenizer_model_from_checkpoint_args: bool = flag(False, part_of="use_checkpoint_args")
    """Open the tokenizer files that the checkpoint names, too."""
    exit_on_missing_checkpoint: bool = False
    """Fail when --load holds no checkpoint, instead of starting afresh."""
    async_save: bool = False
    """Write in the background while training continues."""
    ckpt_fully_parallel_save: bool = flag(True, "--no-ckpt-fully-parallel-save")
    """Let only the first replica write."""
    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected",
        choices=(
            "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
            "return_unexpected", "return_all", "ignore_all",
        ),
    )  # fmt: skip
    """What happens when the names in a checkpoint are not those of the model."""
    non_persistent_save_interval: int | None = None
    """Steps between non-persistent checkpoints, for quick restarts: each replaces the last one."""
    non_persistent_ckpt_type: str | None = flag(
        None,
        choices=("global", "local", "in_memory"),
        refuse_values={
            "in_memory": "use local, with --non-persistent-local-ckpt-dir on a memory disk"
        },
    )
    """Where those live: one of all ranks together, or each node's own storage."""
    non_persistent_global_ckpt_dir: str | None = None
    """Directory of the global ones; the default is non_persistent in that of --save."""
    non_persistent_local_ckpt_dir: str | None = None
    """Directory on each node's own storage, for example on /dev/shm."""
    replication: bool = False
    """Keep copies of local checkpoints on other nodes."""
    replication_jump: int | None = None
    """Ranks between a rank and the holder of its copy; the default is the ranks of a node."""
    replication_factor: int = 2
    """Places that hold a local checkpoint, its own node included."""
