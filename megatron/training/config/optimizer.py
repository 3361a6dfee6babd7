"""Flags of the optimizer and of regularisation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag

_NO_OPTIMIZER = "use --optimizer muon"


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Update rule, weight decay, clipping, dropout, precision of optimizer state."""

    optimizer: str = flag(
        "adam",
        choices=("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
        refuse_values={
            "dist_muon": "use --optimizer muon --use-distributed-optimizer: its work is shared",
            "soap": _NO_OPTIMIZER,
            "adaptive_muon": _NO_OPTIMIZER,
        },
    )
    """Update rule: adam decouples weight decay (arXiv 1711.05101), lion (arXiv 2302.06675) has one
    moment, muon orthogonalises updates of hidden matrices."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    lion_beta1: float = flag(0.95, part_of="optimizer")
    """Weight of the moment in Lion's update."""
    lion_beta2: float = flag(0.98, part_of="optimizer")
    """Decay of Lion's moment."""
    muon_momentum: float = flag(0.9, part_of="optimizer")
    """Momentum of Muon."""
    muon_use_nesterov: bool = flag(False, part_of="optimizer")
    """Let Muon look one step ahead along its momentum."""
    muon_num_ns_steps: int = flag(5, part_of="optimizer")
    """Newton-Schulz steps of Muon."""
    muon_scale_mode: str = flag(
        "spectral", choices=("spectral", "unit_rms_norm", "shape_scaling"), part_of="optimizer"
    )
    """Factor on Muon's update by the shape of the matrix."""
    muon_extra_scale_factor: float = flag(1.0, part_of="optimizer")
    """One more factor; 0.2 with spectral gives updates the size of Adam's (arXiv 2502.16982)."""
    muon_split_qkv: bool = flag(True, "--muon-no-split-qkv", part_of="optimizer")
    """Orthogonalise stacked matrices (q, k, v; gate and up) as one."""
    muon_scalar_optimizer: str = flag("adam", choices=("adam", "lion", "sgd"), part_of="optimizer")
    """Rule of embeddings, head, norms and biases under Muon."""
    muon_tp_mode: str = flag(
        "duplicated", choices=("blockwise", "duplicated", "distributed"), part_of="optimizer"
    )
    """Matrices split over tensor-parallel ranks under Muon: form the whole one on each rank, add
    Gram matrices in each step, or treat each part as a matrix of its own."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    start_weight_decay: float | None = None
    """First value of a weight decay that changes over time."""
    end_weight_decay: float | None = None
    """Last value of it."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """How it changes."""
    apply_wd_to_qk_layernorm: bool = False
    """Decay the weights of the query and key norms as well."""
    no_weight_decay_cond_type: str | None = flag(None, choices=("apply_wd_to_qk_layernorm",))
    """Another spelling of --apply-wd-to-qk-layernorm."""
    param_rules: list[str] = flag([], nargs="+")
    """Settings of single parameters, each PATTERN:NAME=VALUE,... with a shell pattern on names and
    any of lr_mult, wd_mult, max_lr, min_lr, start_wd, end_wd, optimizer; later ones win. Example:
    "*.mlp.*.weight:lr_mult=0.5,wd_mult=0"."""
    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""
    attention_dropout: float = 0.1
    """Dropout probability of attention weights."""
    hidden_dropout: float = 0.1
    """Dropout probability of the embedding and of residual branches."""
    use_precision_aware_optimizer: bool = False
    """Keep optimizer state in the types below, with random rounding and a scale per block; fp32
    main weights of a bf16 model take two bytes."""
    exp_avg_dtype: str = flag(
        "fp32", choices=("fp32", "fp16", "bf16", "fp8"), part_of="use_precision_aware_optimizer"
    )
    """Precision of the first moment."""
    exp_avg_sq_dtype: str = flag(
        "fp32", choices=("fp32", "fp16", "bf16", "fp8"), part_of="use_precision_aware_optimizer"
    )
    """Precision of the second moment."""
    main_grads_dtype: str = flag(
        "fp32", choices=("fp32", "bf16"), part_of="use_precision_aware_optimizer"
    )
    """Precision of main gradients."""
    main_params_dtype: str = flag(
        "fp32", choices=("fp32", "fp16"), part_of="use_precision_aware_optimizer"
    )
    """Precision of main weights."""
    optimizer_cpu_offload: bool = False
    """Keep optimizer state in host memory, and update there."""
    optimizer_offload_path: str | None = None
    """Directory on a local disk: keep optimizer state in a file there, read ahead and written back
    beside the update. Takes a few MiB of host memory."""
    optimizer_offload_fraction: float = 1.0
    """Share of the parameters whose state is offloaded."""
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False,
        note="copies between an accelerator and host memory are not overlapped yet; files are"
        " read ahead and written back beside the update in any case",
    )
    """Copy between device and host beside the update."""
