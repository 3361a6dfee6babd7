"""Flags of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag

_WRITES_NATIVE = "checkpoints are written in the native sharded format in any case"


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Saving and loading of checkpoints, and start from other models."""

    save: str | None = None
    """Directory or URL of an object store to write checkpoints to."""
    load: str | None = None
    """Directory or URL of an object store to read a checkpoint from."""
    save_interval: int | None = flag(None, "--save-interval", "--persistent-save-interval")
    """Steps between checkpoints. The end of training always writes a checkpoint."""
    save_retain_interval: int | None = None
    """Keep the checkpoints whose step is a multiple of this, and the newest; delete the others."""
    most_recent_k: int | None = None
    """Keep this many of the newest checkpoints and those kept by --save-retain-interval; delete the
    others."""
    allowed_save_failures: int = 0
    """Number of saves in a row that may fail, for example on a full disk: training continues, and
    the next interval saves again. The last save of a run must succeed."""
    ckpt_format: str = flag(
        "torch_dist",
        "--ckpt-format",
        "--dist-ckpt-format",
        choices=("torch", "torch_dist", "torch_dcp", "fsdp_dtensor"),
        note_values=dict.fromkeys(("torch", "torch_dcp", "fsdp_dtensor"), _WRITES_NATIVE),
    )
    """Format. The native sharded format, torch_dist, can be loaded in any layout."""
    ckpt_step: int | None = None
    """Load this step instead of the newest."""
    finetune: bool = False
    """Load weights only and start at step 0."""
    pretrained_checkpoint: str | None = None
    """Directory of weights to start from if --load contains no checkpoint yet."""
    load_hf: str | None = None
    """Start from the Hugging Face model in this directory: its shape, its weights and, without
    --tokenizer-type, its tokenizer. A checkpoint in --load takes precedence, so a run resumes."""
    load_adapter: str | None = None
    """Start from the PEFT adapters in this directory, whose config sets rank, scale and target
    modules; needs --load-hf. A checkpoint in --load takes precedence."""
    moe_use_upcycling: bool = flag(False, part_of="num_experts")
    """When loading a checkpoint of a dense model, initialize every expert with the dense MLP."""
    save_hf: str | None = None
    """Write the weights as a Hugging Face model into this directory when training ends."""
    save_hf_dtype: str | None = flag(
        None, choices=("fp32", "bf16", "fp16", "fp8-block"), part_of="save_hf"
    )
    """Precision of the weights that --save-hf writes; fp8-block: FP8 in blocks of 128 x 128, as
    DeepSeek-V3 is published. Default: the precision in the checkpoint, or with adapters the
    precision of the base model, which may round away small updates."""
    no_load_optim: bool = False
    """Do not load optimizer state."""
    no_load_rng: bool = False
    """Do not load the random number generator state."""
    no_save_optim: bool = False
    """Do not save optimizer state."""
    no_save_rng: bool = False
    """Do not save the random number generator state."""
    use_checkpoint_args: bool = False
    """Take the shape of the model and the type of the tokenizer from the checkpoint, unless a flag
    gives them."""
    use_tokenizer_model_from_checkpoint_args: bool = flag(False, part_of="use_checkpoint_args")
    """Also open the tokenizer files that the checkpoint names."""
    exit_on_missing_checkpoint: bool = False
    """Fail if --load contains no checkpoint, instead of starting at step 0."""
    async_save: bool = False
    """Write in the background while training continues."""
    ckpt_fully_parallel_save: bool = flag(True, "--no-ckpt-fully-parallel-save")
    """Write with the first replica only, not with all replicas."""
    dist_ckpt_strictness: str = flag(
        "assume_ok_unexpected",
        choices=(
            "assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all",
            "return_unexpected", "return_all", "ignore_all",
        ),
    )  # fmt: skip
    """Handling of tensors that only the checkpoint (unexpected) or only the model (missing) has."""
    non_persistent_save_interval: int | None = None
    """Steps between non-persistent checkpoints for fast restarts; each replaces the last one."""
    non_persistent_ckpt_type: str | None = flag(
        None,
        choices=("global", "local", "in_memory"),
        refuse_values={
            "in_memory": "use local, with --non-persistent-local-ckpt-dir on a memory disk"
        },
    )
    """Storage of non-persistent checkpoints: global is one directory shared by all ranks, local is
    each node's own storage."""
    non_persistent_global_ckpt_dir: str | None = None
    """Directory of global non-persistent checkpoints. Default: non_persistent in the directory of
    --save."""
    non_persistent_local_ckpt_dir: str | None = None
    """Directory of local non-persistent checkpoints on each node, for example on /dev/shm."""
    replication: bool = False
    """Copy local checkpoints to other nodes."""
    replication_jump: int | None = None
    """Distance in ranks between a rank and the rank with its copy. Default: ranks per node."""
    replication_factor: int = 2
    """Number of copies of a local checkpoint, including the copy on its own node."""
