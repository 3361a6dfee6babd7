"""Constants of the updates, which the definitions of optimizers read. Names are Megatron's."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag

SCALE_MODES = ("spectral", "unit_rms_norm", "shape_scaling")
TP_MODES = ("duplicated", "distributed", "blockwise")


@dataclass
class UpdateFlags:
    """Learning rate, weight decay and constants of the updates."""

    lr: float | None = None
    """Highest learning rate; a scheduler sets the rate of each step."""
    weight_decay: float = 0.01
    """Weight decay of matrices; biases and other 1-d parameters have none."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-08
    """Added to the root of the second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    lion_beta1: float = flag(0.95, part_of="optimizer")
    """Weight of the moment in Lion's update."""
    lion_beta2: float = flag(0.98, part_of="optimizer")
    """Decay of Lion's moment."""
    muon_momentum: float = flag(0.9, part_of="optimizer")
    """Momentum of Muon."""
    muon_use_nesterov: bool = flag(
        False, "--muon-use-nesterov", "--muon-nesterov", part_of="optimizer"
    )
    """Use Nesterov momentum in Muon."""
    muon_num_ns_steps: int = flag(5, part_of="optimizer")
    """Newton-Schulz steps of Muon."""
    muon_scale_mode: str = flag("spectral", choices=SCALE_MODES, part_of="optimizer")
    """Factor on Muon's update by the shape of the matrix; see `muon.update_scale`."""
    muon_extra_scale_factor: float = flag(1.0, part_of="optimizer")
    """One more factor; 0.2 with spectral gives updates the size of Adam's (arXiv 2502.16982)."""
    muon_tp_mode: str = flag(
        "duplicated", choices=("blockwise", "duplicated", "distributed"), part_of="optimizer"
    )
    """Muon on matrices split over tensor-parallel ranks: gather the full matrix on each rank
    (duplicated), sum Gram matrices in each step (distributed), or treat each part as a separate
    matrix (blockwise)."""
    muon_split_qkv: bool = flag(
        True,
        "--muon-no-split-qkv",
        help="Orthogonalise stacked matrices (q, k, v; gate and up) as one.",
        part_of="optimizer",
    )
    """Treat stacked matrices (q, k, v; gate and up) as separate matrices."""


@dataclass
class UpdateSettings(UpdateFlags):
    """The flags, and a setting for callers of the library only."""

    decoupled_weight_decay: bool = True
    """Decay weights directly (AdamW); otherwise add weight_decay * weight to the gradient."""
