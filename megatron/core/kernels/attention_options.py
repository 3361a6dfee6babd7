"""Options that every attention kernel receives in addition to query, key and value.

Legend: s sequence, b micro batch, n query heads and g key/value heads of this rank, d and e widths
of key and value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from megatron.core.foundation.device import seeded_generators
from megatron.core.kernels.block_mask import MaskSpec, masked_keys
from megatron.core.parameters.keyed_draws import keyed_attention_keep_mask
from megatron.core.parameters.rng import derive_seed, rng_state


@dataclass(frozen=True)
class AttentionOptions:
    """Attributes of one attention.

    Attributes:
        scale: factor on the scores.
        mask: which keys a query may see, by position and document.
        attention_mask: bool, True where a key is hidden too, broadcastable to [b, n, sq, sk].
        attention_bias: added to the scaled scores, broadcastable to [b, n, sq, sk].
        first_query: position of the first query among the keys.
        dropout: probability of dropping a probability. `keep_mask` draws it independently of the
            layout; under `seeded_dropout` the kernel draws.
        first_head: index in the whole model of this rank's first query head; a key of the dropout.
        sink: [n], scores of a key without value that every query sees.
        softcap: bound c of the scaled scores, c * tanh(score / c).
        layer_scaling: divides the scores while they are in the activations' dtype.
        softmax_in_fp32: for the kernel that holds all scores.
        max_logits: fp32 [n], raised in place to the largest score of each head that entered a
            softmax: scaled, capped and not hidden. None does not record it.
    """

    scale: float
    mask: MaskSpec
    attention_mask: Tensor | None = None
    attention_bias: Tensor | None = None
    first_query: int = 0
    dropout: float = 0.0
    first_head: int = 0
    sink: Tensor | None = None
    softcap: float | None = None
    layer_scaling: int = 1
    softmax_in_fp32: bool = True
    max_logits: Tensor | None = None

    def of_heads(self, begin: int, end: int) -> AttentionOptions:
        """Return the options of some of the heads."""

        def part(x: Tensor | None, dim: int) -> Tensor | None:
            if x is None or x.dim() < -dim or x.shape[dim] == 1:
                return x
            return x.narrow(dim, begin, end - begin)

        return replace(
            self,
            attention_mask=part(self.attention_mask, -3),
            attention_bias=part(self.attention_bias, -3),
            first_head=self.first_head + begin,
            sink=part(self.sink, -1),
            max_logits=part(self.max_logits, -1),
        )

    def keep_mask(self, query: Tensor, num_keys: int) -> Tensor | None:
        """Draw dropout: [b, n, sq, sk], 0 where a probability is dropped, else 1/(1-p).

        Args:
            query: [sq, b, n, d]; the mask has its dtype.
        """
        if not self.dropout:
            return None
        sq, b, n, _ = query.shape
        keep = 1.0 - self.dropout
        return keyed_attention_keep_mask(
            (b, n, sq, num_keys),
            keep,
            first_head=self.first_head,
            dtype=query.dtype,
            device=query.device,
        ).div_(keep)

    @contextmanager
    def seeded_dropout(self, query: Tensor) -> Iterator[None]:
        """Seed the generator of a kernel that draws its own dropout, per layout.

        Recomputation and a resumed run drop the same probabilities again.

        Args:
            query: [sq, b, n, d]; its device draws.
        """
        if not self.dropout:
            yield
            return
        state = rng_state()
        key = (*state.next_key(), state.first_sample, self.first_head)
        with seeded_generators(query.device, derive_seed(*key)):
            yield

    def masked_keys(self, num_queries: int, num_keys: int, device: torch.device) -> Tensor | None:
        """Return bool [sq, sk] or [b, 1, sq, sk], True where position or document hide a key.

        None where they hide nothing. Document ids require a sequence that attends to itself.
        """
        end = self.first_query + num_queries
        hidden = masked_keys(self.first_query, end, 0, num_keys, self.mask.window, device)
        ids = self.mask.document_ids
        if ids is None:
            return hidden
        crosses = (ids.unsqueeze(2) != ids.unsqueeze(1)).unsqueeze(1)
        return crosses if hidden is None else crosses | hidden


def raise_max_logits(max_logits: Tensor, rows: Tensor, groups: int) -> None:
    """Raise the recorded largest score of each head to the largest score of some queries.

    Args:
        max_logits: fp32 [n], changed in place.
        rows: [b*g, rows*r], the largest score of each row; the r heads of a group follow each
            other.
        groups: g.
    """
    r = len(max_logits) // groups
    by_head = rows.detach().view(-1, groups, rows.shape[1] // r, r)
    highest = by_head.amax((0, 2)).flatten()
    torch.maximum(max_logits, highest.to(max_logits.dtype), out=max_logits)


AttentionKernel: TypeAlias = Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor]
"""(query [sq, b, n, d], key [sk, b, g, d], value [sk, b, g, e], options) -> [sq, b, n*e]; query
head i uses key/value head i // (n/g)."""
