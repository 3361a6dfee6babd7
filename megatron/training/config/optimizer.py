"""Flags of the optimizer and of regularisation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.training.config.flag import flag

_NO_OPTIMIZER = "use adam"


@dataclass(frozen=True, kw_only=True)
class OptimizationConfig:
    """Update rule, weight decay, clipping, dropout, precision of optimizer state."""

    optimizer: str = flag(
        "adam",
        choices=("adam", "sgd", "muon", "dist_muon", "lion", "soap", "adaptive_muon"),
        refuse_values=dict.fromkeys(
            ("muon", "dist_muon", "lion", "soap", "adaptive_muon"), _NO_OPTIMIZER
        ),
    )
    """Update rule; adam decouples weight decay (arXiv 1711.05101)."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    muon_momentum: float = flag(0.9, part_of="optimizer")
    """Momentum of Muon."""
    muon_num_ns_steps: int = flag(5, part_of="optimizer")
    """Newton-Schulz steps of Muon."""
    muon_scale_mode: str = flag(
        "spectral", choices=("spectral", "unit_rms_norm", "shape_scaling"), part_of="optimizer"
    )
    """Scale of Muon's update."""
    muon_tp_mode: str = flag(
        "duplicated", choices=("blockwise", "duplicated", "distributed"), part_of="optimizer"
    )
    """How Muon treats split matrices."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices; biases and norms have none."""
    start_weight_decay: float | None = None
    """First value of a weight decay that changes over time."""
    end_weight_decay: float | None = None
    """Last value of it."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """How it changes."""
    clip_grad: float = 1.0
    """Largest global norm of the gradient; 0 does not clip."""
    attention_dropout: float = 0.1
    """Dropout probability of attention weights."""
    hidden_dropout: float = 0.1
    """Dropout probability of the embedding and of residual branches."""
    use_precision_aware_optimizer: bool = flag(
        False, refuse="use --use-distributed-optimizer to save memory of optimizer state"
    )
    """Keep optimizer state in low precision."""
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
    optimizer_cpu_offload: bool = flag(False, refuse="use --use-distributed-optimizer")
    """Keep optimizer state in host memory."""
    optimizer_offload_fraction: float = flag(1.0, part_of="optimizer_cpu_offload")
    """Share of it."""
