"""Maximal update parametrisation (muP): what is tuned at one width holds at others.

G. Yang et al., "Tensor Programs V: Tuning Large Neural Networks via Zero-Shot Hyperparameter
Transfer", table 8 and appendix B.1, arXiv 2203.03466. Initial values and factors of the forward
pass are here; learning rates in `optimizer.param_groups`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag


@dataclass
class MaximalUpdateConfig:
    """How a model is scaled with its width, relative to a base width."""

    use_mup: bool = False
    """Scale initial values, learning rates, attention and logits with the width, so that the best
    learning rate of a narrow model is that of a wide one (muP, arXiv 2203.03466)."""
    mup_base_hidden_size: int | None = flag(None, part_of="use_mup")
    """Width at which hyperparameters were tuned; the width multiplier is hidden-size / this."""
    mup_width_mult: float = flag(1.0, part_of="use_mup")
    """Width multiplier where --mup-base-hidden-size is not given."""
    mup_base_head_dim: float | None = flag(None, part_of="use_mup")
    """Width of a head at which attention has its usual scale, 1 / sqrt(width). None is 1."""
    mup_attn_scale_power: float = flag(1.0, part_of="use_mup")
    """Power of the head's width that divides attention scores."""
    mup_embedding_mult: float = flag(1.0, part_of="use_mup")
    """Factor on the word embeddings."""
    mup_output_mult: float = flag(1.0, part_of="use_mup")
    """Factor on the logits, which are divided by the width multiplier."""

    def derive_maximal_update(self, hidden_size: int) -> None:
        """Fill the width multiplier."""
        base = self.mup_base_hidden_size
        if self.use_mup and base is not None and base > 0:
            self.mup_width_mult = hidden_size / base

    @property
    def width_multiplier(self) -> float:
        """How many times wider than the base the model is; 1 without muP."""
        return self.mup_width_mult if self.use_mup else 1.0

    @property
    def hidden_init_factor(self) -> float:
        """Factor on the initial values of weights whose inputs grow with the width."""
        return self.width_multiplier**-0.5

    @property
    def logits_factor(self) -> float:
        """Factor on the logits."""
        return self.mup_output_mult / self.mup_width_mult if self.use_mup else 1.0

    def attention_scale(self, head_width: int) -> float:
        """Return the factor on attention scores of heads of this width."""
        if not self.use_mup:
            return 1.0 / math.sqrt(head_width)
        power = self.mup_attn_scale_power
        # Equal to the usual scale where the head is as wide as the base's.
        return (self.mup_base_head_dim or 1.0) ** (power - 0.5) * float(head_width) ** -power

    def check_maximal_update(self) -> list[MegatronError]:
        """Return the problems of these settings."""
        if not self.use_mup:
            return []
        problems: list[MegatronError] = []
        for name in (
            "mup_base_hidden_size",
            "mup_width_mult",
            "mup_base_head_dim",
            "mup_attn_scale_power",
            "mup_embedding_mult",
            "mup_output_mult",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                spelling = "--" + name.replace("_", "-")
                problems.append(
                    ConfigError(
                        f"{name}={value}.",
                        rule="it is a positive number",
                        flags=[spelling],
                        fix=f"leave {spelling} out",
                    )
                )
        return problems
