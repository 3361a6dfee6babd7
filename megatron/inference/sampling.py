"""Choose the next tokens from logits.

Draws are keyed by (seed, sequence, position), so a continuation does not depend on the layout, on
the other sequences of the batch or on its index in the batch.

Legend: b rows, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.core.foundation.errors import ConfigError
from megatron.core.parameters.rng import derive_seed
from megatron.core.settings.field_types import check_types

NO_TOKEN = -1
"""Returned where the largest logit is not finite: the model is broken."""

LOWEST_TEMPERATURE = 1e-6
"""Below it the most likely token is chosen: logits divided by a smaller number overflow fp32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to choose a token; by default the most likely one."""

    temperature: float = 0.0
    """Divides the logits; 0, or less than 1e-6, chooses the most likely token (greedy)."""
    top_k: int = 0
    """Keep only the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this (nucleus sampling: A.
    Holtzman et al., "The Curious Case of Neural Text Degeneration", arXiv 1904.09751)."""
    seed: int = 1234
    """Key of the draws."""

    def __post_init__(self) -> None:
        check_types(self)
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


@dataclass(frozen=True)
class Draw:
    """How to choose one token."""

    sampling: Sampling
    sequence: int
    """Index of the sequence among the sequences that share a seed."""
    position: int
    """Position of the token in its sequence."""

    def uniform(self) -> float:
        """Return the random number in [0, 1) of this draw."""
        key = derive_seed(self.sampling.seed, "sample", self.sequence, self.position)
        return (key >> 10) / 2**53


def choose_tokens(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Choose a token id [b] for every sequence.

    Args:
        logits: [b, v], any float dtype; -inf where a token must not be chosen.
        draws: one for each sequence; they may differ.
    Returns:
        ids; `NO_TOKEN` where the largest logit is NaN or infinite.
    """
    largest, chosen = logits.max(dim=-1)
    is_broken = ~largest.isfinite()
    sampled = [
        row for row, draw in enumerate(draws) if draw.sampling.temperature >= LOWEST_TEMPERATURE
    ]
    if sampled:
        rows = torch.tensor(sampled, device=logits.device)
        chosen[rows] = _sample(logits[rows].float(), [draws[row] for row in sampled])
    return chosen.masked_fill_(is_broken, NO_TOKEN)


def _sample(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Return a drawn id for every row of fp32 logits [b, v]."""
    settings = [draw.sampling for draw in draws]

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=logits.device).unsqueeze(1)

    logits = logits / column([s.temperature for s in settings])
    v = logits.shape[-1]
    limits = [min(s.top_k or v, v) for s in settings]
    widest = max((limit for limit in limits if limit < v), default=0)
    if widest:
        values = logits.topk(widest, dim=-1).values
        at = torch.tensor([min(k, widest) - 1 for k in limits], device=logits.device)
        threshold = values.gather(1, at.unsqueeze(1))
        unlimited = torch.tensor([k == v for k in limits], device=logits.device)
        threshold.masked_fill_(unlimited.unsqueeze(1), -torch.inf)
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if any(s.top_p < 1 for s in settings):
        ordered, order = probabilities.sort(dim=-1, descending=True)
        # Keep a token if the sum of the more likely ones is below top_p; always keep the first.
        before = ordered.cumsum(dim=-1) - ordered
        is_beyond = before >= column([s.top_p if s.top_p < 1 else 2.0 for s in settings])
        is_beyond[:, 0] = False  # fp32 has no number for the smallest top_p
        ordered[is_beyond] = 0
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    # Inverse transform sampling. fp64: a sum over a large vocabulary.
    reached = probabilities.double().cumsum(dim=-1)
    numbers = torch.tensor([draw.uniform() for draw in draws], dtype=torch.float64)
    target = numbers.to(logits.device).unsqueeze(1) * reached[:, -1:]
    # `right`: a token of probability 0 adds nothing to the sum, so no number falls on it.
    return torch.searchsorted(reached, target, right=True).squeeze(1).clamp_(max=v - 1)


def gather_logprobs(
    logits: Tensor,
    chosen: Tensor,
    num_top_logprobs: int,
    normalizer: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities at temperature 1 over all tokens, independent of the sampling.

    Args:
        logits: [b, v].
        chosen: ids [b].
        num_top_logprobs: number of most likely tokens to list in addition.
        normalizer: terms [b, 1] that are subtracted from the logits; None computes them.
    Returns:
        ids [b, 1 + num_top_logprobs], the chosen id first, and their log-probabilities in fp32.
    """
    # fp64, rounded once: the trainer must compute equal log-probabilities of the same tokens.
    wide = logits.double()
    if normalizer is None:
        logprobs = wide.log_softmax(dim=-1).float()
    else:
        logprobs = (wide - normalizer[0] - normalizer[1]).float()
    best = logprobs.topk(min(num_top_logprobs, logprobs.shape[-1]), dim=-1)
    chosen = chosen.unsqueeze(1)
    return (
        torch.cat((chosen, best.indices), dim=1),
        torch.cat((logprobs.gather(1, chosen.clamp(min=0)), best.values), dim=1),
    )
