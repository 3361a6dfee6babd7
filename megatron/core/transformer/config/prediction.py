"""What a model predicts besides the next token."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag


@dataclass
class PredictionConfig:
    """Multi-token prediction (DeepSeek-V3, section 2.2, arXiv 2412.19437)."""

    mtp_num_layers: int | None = None
    """Further tokens that are predicted, each by one more layer, or by the layers after / in
    --hybrid-layer-pattern; None or 0 is none."""
    mtp_loss_scaling_factor: float = flag(0.1, part_of="mtp_num_layers")
    """Weight of the mean of their losses beside the loss of the next token."""

    mtp_use_repeated_layer: bool = flag(False, part_of="mtp_num_layers")
    """Predict all of them by one layer, which is passed once for each."""

    @property
    def num_built_prediction_layers(self) -> int:
        """Layers that predict later tokens, as they are held."""
        depths = self.mtp_num_layers or 0
        return min(depths, 1) if self.mtp_use_repeated_layer else depths

    def check_prediction(self) -> list[MegatronError]:
        """Return the problems of these settings."""
        if (self.mtp_num_layers or 0) >= 0 and self.mtp_loss_scaling_factor >= 0:
            return []
        return [
            ConfigError(
                f"mtp_num_layers={self.mtp_num_layers} with"
                f" mtp_loss_scaling_factor={self.mtp_loss_scaling_factor}.",
                rule="neither is negative",
                flags=["--mtp-num-layers", "--mtp-loss-scaling-factor"],
                fix="use --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1",
            )
        ]
