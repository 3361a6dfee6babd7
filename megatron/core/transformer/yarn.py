"""YaRN: rotary positions for a context longer than the one a model was trained with.

B. Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2
("NTK-by-parts") and 3.4 (temperature), arXiv 2309.00071: channels that turn often within the
original context keep their speed, those that turn less than once are slowed down by the factor, and
between the two the share changes linearly with the channel's index. Scores are scaled up a little,
because more keys compete.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def yarn_inverse_frequencies(
    num_channels: int,
    base: float,
    *,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
) -> Tensor:
    """Return the angle per position of each pair of channels, fp32 [num_channels/2].

    Args:
        factor: how many times longer the context becomes.
        original_context: positions that the model was trained with first.
        beta_fast, beta_slow: turns within that context above which a channel keeps its speed,
            and below which it is slowed down by the whole factor.
    """
    exponent = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    inverse = 1.0 / (base**exponent)

    def channel_that_turns(turns: float) -> float:
        """Solve turns = original_context / (2 pi base^(2i/num_channels)) for the pair i."""
        ratio = original_context / (turns * 2 * math.pi)
        return num_channels * math.log(ratio) / (2 * math.log(base))

    first = max(math.floor(channel_that_turns(beta_fast)), 0)
    last = min(math.ceil(channel_that_turns(beta_slow)), num_channels - 1)
    width = max(last - first, 1e-3)
    slowed = ((torch.arange(num_channels // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inverse * (1 - slowed) + inverse / factor * slowed


def yarn_attention_factor(factor: float, strength: float = 1.0) -> float:
    """Return 0.1 * strength * ln(factor) + 1: what cosine and sine are multiplied by."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0
