"""YaRN: rotary positions for a context longer than the one a model was trained with.

B. Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", sections 3.2
("NTK-by-parts") and 3.4 (temperature), arXiv 2309.00071: channels that turn often within the
original context keep their frequency, the frequency of channels that turn less than once is divided
by the factor, and between the two the result is interpolated linearly in the channel's index.
Scores are scaled up a little, because more keys compete.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.config.attention import LatentAttentionConfig


def yarn_inverse_frequencies(
    num_channels: int,
    base: float,
    *,
    factor: float,
    original_context: int,
    beta_fast: float,
    beta_slow: float,
    rounds_range: bool = True,
) -> Tensor:
    """Return the angle per position of each pair of channels, fp32 [num_channels/2].

    Args:
        factor: new context length / original context length.
        original_context: context length of the first training.
        beta_fast, beta_slow: turns within that context above which a channel keeps its frequency,
            and below which its frequency is divided by the whole factor.
        rounds_range: round the ends of the interpolation to whole channels.
    """
    exponent = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    inverse = 1.0 / (base**exponent)

    def channel_that_turns(turns: float) -> float:
        """Solve turns = original_context / (2 pi base^(2i/num_channels)) for the pair i."""
        ratio = original_context / (turns * 2 * math.pi)
        return num_channels * math.log(ratio) / (2 * math.log(base))

    begin, end = channel_that_turns(beta_fast), channel_that_turns(beta_slow)
    if rounds_range:
        begin, end = math.floor(begin), math.ceil(end)
    first, last = max(begin, 0), min(end, num_channels - 1)
    width = max(last - first, 1e-3)
    slowed = ((torch.arange(num_channels // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return inverse * (1 - slowed) + inverse / factor * slowed


def yarn_attention_factor(factor: float, strength: float = 1.0) -> float:
    """Return the factor on cosine and sine, 0.1 * strength * ln(factor) + 1."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def yarn_of_config(num_channels: int, base: float, config: LatentAttentionConfig) -> Tensor:
    """Return the angles per position, fp32 [num_channels/2], of a config."""
    return yarn_inverse_frequencies(
        num_channels,
        base,
        factor=config.rotary_scaling_factor,
        original_context=config.original_max_position_embeddings,
        beta_fast=config.beta_fast,
        beta_slow=config.beta_slow,
        rounds_range=config.yarn_correction_range_round_to_int,
    )


def yarn_softmax_scale(
    head_dim: int, factor: float, strength: float = 1.0, strength_of_all: float = 0.0
) -> float:
    """Return the factor on the scores of heads whose channels all rotate, temperature included.

    The factor on cosine and sine multiplies queries and keys, so the scores get its square.

    Args:
        strength, strength_of_all: the settings `mscale` and `mscale_all_dim`.
    """
    of_all = yarn_attention_factor(factor, strength_of_all)
    return float(head_dim**-0.5 * (yarn_attention_factor(factor, strength) / of_all) ** 2)


_NAMES_OF_DECODERS = {
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_original_max_position_embeddings": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Megatron's names on configs of decoders without latent attention -> the fields."""


def derive_yarn(config: Any) -> None:
    """Read YaRN's settings under the names of `_NAMES_OF_DECODERS`, and derive the softmax scale.

    Subclasses of Megatron-Bridge define these names; None counts as absent.
    """
    factor = getattr(config, "yarn_rotary_scaling_factor", None)
    if factor is None:
        return
    given = {ours: getattr(config, name, None) for name, ours in _NAMES_OF_DECODERS.items()}
    vars(config).update({name: value for name, value in given.items() if value is not None})
    if config.softmax_scale is None:
        strengths = [getattr(config, f"yarn_{name}", None) for name in ("mscale", "mscale_all_dim")]
        known = () if None in strengths else strengths
        config.softmax_scale = yarn_softmax_scale(config.kv_channels, factor, *known)
