"""Choose the next token from logits.

Draws are keyed by (seed, row, position), so a continuation does not depend on the layout, on the
rows beside it or on where in the batch generation started.

Legend: b rows, v vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.errors import ConfigError
from megatron.core.rng import seeded_generator


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose. The default takes the most likely token."""

    temperature: float = 0.0
    """Divides the logits; 0 takes the most likely token (greedy)."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (nucleus sampling: A.
    Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751)."""
    seed: int = 1234
    """Key of the draws."""

    def __post_init__(self) -> None:
        for found, rule, flag, fix, is_wrong in (
            (f"temperature={self.temperature:g}", "it divides the logits", "--temperature",
             "use 0 (greedy) or a number such as 0.8", not 0 <= self.temperature < float("inf")),
            (f"top_k={self.top_k}", "it is a number of tokens", "--top-k",
             "use 0 (all) or a number such as 40", self.top_k < 0),
            (f"top_p={self.top_p:g}", "it is a probability", "--top-p",
             "use 1 (all) or a number such as 0.9", not 0 < self.top_p <= 1),
        ):  # fmt: skip
            if is_wrong:
                raise ConfigError(f"{found} cannot be used.", rule=rule, flags=[flag], fix=fix)


def choose_tokens(logits: Tensor, position: int, sampling: Sampling) -> Tensor:
    """Return the chosen ids [b] for `position` of each row.

    Args:
        logits: [b, v], any float dtype; -inf where a token must not be chosen.
    """
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)
    scaled = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scaled.shape[-1]:
        threshold = scaled.topk(sampling.top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    probabilities = scaled.softmax(dim=-1)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # What comes before a token must not have reached top_p yet; the first always stays.
        ordered[ordered.cumsum(dim=-1) - ordered >= sampling.top_p] = 0
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return torch.stack(
        [
            torch.multinomial(
                row,
                num_samples=1,
                generator=seeded_generator(row.device, sampling.seed, "sample", index, position),
            )[0]
            for index, row in enumerate(probabilities)
        ]
    )
