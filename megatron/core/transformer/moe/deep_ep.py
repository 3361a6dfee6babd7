"""Dispatchers by the library DeepEP: its `Buffer`, and its `HybridEPBuffer`.

Both send a token once to each *rank* that holds one of its experts, where an all-to-all sends it
once for each expert; the rank then copies it for its experts (`Buffer`: here, by the kernels of
`kernels.permutation`; `HybridEPBuffer`: in the same kernel). The way back sums the copies before
they travel. Backward of a dispatch is a combine with the same handle, and the reverse.

DeepEP: "DeepSeek-V3 Technical Report", section 3.2.2, arXiv 2412.19437. **Run against a stand-in
for the library on the CPU; never on a GPU.**

Legend: t tokens of this rank, h hidden, e experts, l experts of a rank, r ranks of `tp_ep`, k
choices of a token times shards of an expert, m tokens that reach this rank, n rows for its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.foundation.device import is_host_memory
from megatron.core.foundation.optional_imports import require, why_missing
from megatron.core.kernels.row_counts import RowCounts
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SingleRank, keep_for_group
from megatron.core.transformer.moe.static_exchange import OverlapFn
from megatron.core.transformer.moe.token_dispatcher import (
    DispatchedTokens,
    ExchangeCapacity,
    TokenDispatcherBase,
    permutation_of,
)
from megatron.core.transformer.transformer_config import TransformerConfig

PURPOSE = "--moe-token-dispatcher-type flex"


def why_not_deep_ep() -> str | None:
    """Return what this installation lacks for `Buffer`; None if nothing."""
    return why_missing("deep_ep")


def why_not_hybrid_ep() -> str | None:
    """Return what this installation lacks for `HybridEPBuffer`; None if nothing."""
    reason = why_missing("deep_ep")
    if reason is None and not hasattr(require("deep_ep", purpose=PURPOSE), "HybridEPBuffer"):
        return "needs a DeepEP with HybridEPBuffer (its branch hybrid-ep)"
    return reason


class _KeptBuffer:
    """Memory of the library for one group: made anew where rows are wider or more than before.

    All ranks of the group have equally many tokens, so they make it together.
    """

    def __init__(self) -> None:
        self.size: tuple[int, ...] = ()
        self.buffer: Any = None

    def fits(self, size: tuple[int, ...]) -> bool:
        """Return whether it does; if not, remember the size that the next one must have."""
        if self.buffer is not None and all(a <= b for a, b in zip(size, self.size, strict=True)):
            return True
        self.size = tuple(map(max, zip(size, self.size or size, strict=True)))
        return False


class _Exchange(Protocol):
    """Tokens that one call of the library has sent, and the way back."""

    def dispatch_again(self, tokens: Tensor) -> Tensor:
        """Send other values [t, h] the same way: [m, h], or [n, h]."""
        ...

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send them back and sum what belongs to one token: [t, h], and its weights."""
        ...


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.combine(rows)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.dispatch_again(grad), None


class _Sent(NamedTuple):
    """What this rank has received for its experts."""

    rows: Tensor
    """[n, h], by expert."""
    weights: Tensor
    """Router weights of the rows, [n]."""
    tokens_per_expert: list[int] | RowCounts
    exchange: _Exchange
    to_received: Callable[[Tensor], Tensor]
    """Brings rows of the experts [n, h] into the form that the library takes back."""


class _FusedDispatcher(TokenDispatcherBase):
    """What both libraries need: their ranks are those of `tp_ep`, with l experts each.

    An expert that is split over `expt_tp` is one expert on each of these ranks; the sums on the
    way back add what its shards have made.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(num_local_experts, local_expert_indices, groups)
        assert groups.layout is not None
        self.num_choices = config.moe_router_topk
        self.num_sms = config.exchange_num_sms
        grid = groups.layout.expert
        held = [grid.coordinates(rank)["ep"] for rank in groups.ranks["tp_ep"]]
        self._part_of_rank = torch.tensor(held)
        """Which l experts each rank of `tp_ep` holds, [r]."""

    def dispatch(
        self,
        tokens: Tensor,
        probs: Tensor,
        routing_map: Tensor,
        overlap_fn: OverlapFn = None,
        num_assignments: int | None = None,
        capacity: ExchangeCapacity | None = None,
    ) -> DispatchedTokens:
        """See `TokenDispatcher`; nothing is computed while tokens travel."""
        if overlap_fn is not None:
            overlap_fn()
        sent = self.send(tokens, probs, routing_map)

        def combine(output: Tensor, overlap_fn: OverlapFn = None) -> Tensor:
            if overlap_fn is not None:
                overlap_fn()
            summed: Tensor = _Combine.apply(sent.to_received(output), sent.exchange)
            return summed

        weights = sent.weights.to(probs.dtype)
        return DispatchedTokens(sent.rows, weights, sent.tokens_per_expert, combine)

    def send(self, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> _Sent:
        """Send tokens [t, h] with their weights [t, e] by a map [t, e]."""
        raise NotImplementedError

    @property
    def num_ranks(self) -> int:
        """How many ranks hold the experts once, each shard counted."""
        return self.tp_ep.size()

    def kept(self, name: str) -> _KeptBuffer:
        """Return the memory of the library for the group."""
        assert not isinstance(self.tp_ep, SingleRank)
        return keep_for_group(self.tp_ep, name, lambda _: _KeptBuffer())

    def for_each_rank(self, of_experts: Tensor) -> Tensor:
        """Return values [t, e] of experts for the experts of every rank: [t, r*l]."""
        parts = of_experts.view(len(of_experts), -1, self.num_local_experts)
        chosen = parts.index_select(1, self._part_of_rank.to(of_experts.device))
        return chosen.flatten(1)


class _DeepEPExchange:
    """One exchange by `deep_ep.Buffer`: its handle is known once tokens have been sent."""

    def __init__(self, buffer: Any, num_experts: int) -> None:
        self.buffer, self.num_experts = buffer, num_experts
        self.handle: Any = None
        self.tokens_per_expert: list[int] = []

    def first_dispatch(
        self, tokens: Tensor, choices: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Send tokens [t, h]: (received [m, h], choices [m, k] or -1, weights [m, k])."""
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            choices, self.num_experts
        )
        received, its_choices, its_weights, counts, self.handle, _ = self.buffer.dispatch(
            tokens.contiguous(),
            topk_idx=choices,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        self.tokens_per_expert = list(counts)
        return received, its_choices, its_weights

    def dispatch_again(self, tokens: Tensor) -> Tensor:
        """Send other values [t, h] the same way: [m, h]."""
        received: Tensor = self.buffer.dispatch(tokens.contiguous(), handle=self.handle)[0]
        return received

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send back [m, h] and sum what belongs to one token: [t, h], and weights [t, k]."""
        summed, its_weights, _ = self.buffer.combine(
            rows.contiguous(), self.handle, topk_weights=weights
        )
        return summed, its_weights


class _DeepEPDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, choices: Tensor, exchange: _DeepEPExchange
    ) -> tuple[Tensor, Tensor, Tensor]:
        received, its_choices, its_weights = exchange.first_dispatch(tokens, choices, weights)
        ctx.exchange = exchange
        ctx.mark_non_differentiable(its_choices)
        return received, its_weights, its_choices

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor, grad_of_weights: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        summed, of_weights = ctx.exchange.combine(grad, grad_of_weights.contiguous())
        return summed, of_weights, None, None


class MoEDeepEPTokenDispatcher(_FusedDispatcher):
    """By `deep_ep.Buffer`, which sends bf16. The host waits for the counts of rows."""

    def send(self, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> _Sent:
        """See `_FusedDispatcher`."""
        exchange = _DeepEPExchange(self._buffer(tokens), self.num_ranks * self.num_local_experts)
        is_chosen = self.for_each_rank(routing_map)
        most = min(self.num_choices * self.expt_tp.size(), is_chosen.shape[1])
        marks, choices = is_chosen.to(torch.uint8).topk(most, -1)
        weights = self.for_each_rank(probs).gather(1, choices).float()
        choices = choices.masked_fill(marks == 0, -1)
        received, its_weights, its_choices = _DeepEPDispatch.apply(
            tokens, weights, choices, exchange
        )
        local_map, local_probs = self._map_of_rows(its_choices, its_weights)
        counts = exchange.tokens_per_expert
        permutation = permutation_of(received, local_map, sum(counts))
        rows, weights_of_rows = permutation.permute(received), permutation.weights(local_probs)
        return _Sent(rows, weights_of_rows, counts, exchange, permutation.unpermute)

    def _map_of_rows(self, choices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return a map bool [m, l] and weights [m, l] of choices [m, k], -1 for none here."""
        local = self.num_local_experts
        column = torch.where(choices < 0, local, choices)
        chosen = torch.zeros(len(choices), local + 1, dtype=torch.bool, device=choices.device)
        chosen.scatter_(1, column, True)
        spread = weights.new_zeros(chosen.shape).scatter(1, column, weights)
        return chosen[:, :local], spread[:, :local]

    def _buffer(self, tokens: Tensor) -> Any:
        library = require("deep_ep", purpose=PURPOSE)
        # The library's own measure: rows of at least two bytes an element.
        hidden_bytes = tokens.shape[1] * max(tokens.element_size(), 2)
        kept = self.kept("deep_ep.Buffer")
        if not kept.fits((hidden_bytes,)):
            if self.num_sms is not None:
                library.Buffer.set_num_sms(self.num_sms)
            of_node, of_network = 0, 0
            for ask in (library.Buffer.get_dispatch_config, library.Buffer.get_combine_config):
                hints = ask(self.num_ranks)
                asked = kept.size[0], self.num_ranks
                of_node = max(of_node, hints.get_nvl_buffer_size_hint(*asked))
                of_network = max(of_network, hints.get_rdma_buffer_size_hint(*asked))
            kept.buffer = library.Buffer(self.tp_ep, of_node, of_network)
        return kept.buffer


class _HybridEPExchange:
    """One exchange by `deep_ep.HybridEPBuffer`."""

    def __init__(self, buffer: Any, num_local_experts: int) -> None:
        self.buffer, self.num_local_experts = buffer, num_local_experts
        self.handle: Any = None
        self.counts: Tensor | None = None
        self.num_rows = 0

    def first_dispatch(
        self, tokens: Tensor, probs: Tensor, routing_map: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send tokens [t, h] by a map [t, r*l]: rows [n, h] by expert, their weights [n]."""
        rows, weights, _, self.counts, self.handle = self.buffer.dispatch_with_permute(
            hidden=tokens.contiguous(),
            routing_map=routing_map,
            probs=probs,
            scaling_factor=None,
            num_of_experts_per_rank=self.num_local_experts,
            pad_multiple=None,
        )
        self.num_rows = len(rows)
        return rows, weights

    def dispatch_again(self, tokens: Tensor) -> Tensor:
        """Send other values [t, h] the same way: [n, h]; the host knows how many, and waits not."""
        rows: Tensor = self.buffer.dispatch_with_permute(
            hidden=tokens.contiguous(),
            scaling_factor=None,
            handle=self.handle,
            pad_multiple=None,
            num_permuted_tokens=self.num_rows,
        )[0]
        return rows

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send back [n, h] and sum what belongs to one token: [t, h], and weights [t, r*l]."""
        summed, of_weights = self.buffer.combine_with_unpermute(
            hidden=rows.contiguous(), probs=weights, handle=self.handle, pad_multiple=None
        )
        return summed, of_weights


class _HybridEPDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, probs: Tensor, routing_map: Tensor, exchange: _HybridEPExchange
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return exchange.first_dispatch(tokens, probs, routing_map)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_of_weights: Tensor) -> tuple[Tensor | None, ...]:
        summed, of_weights = ctx.exchange.combine(grad, grad_of_weights.contiguous())
        return summed, of_weights, None, None


class MoEHybridEPTokenDispatcher(_FusedDispatcher):
    """By `deep_ep.HybridEPBuffer`, which also brings rows into the order of experts and back."""

    def send(self, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> _Sent:
        """See `_FusedDispatcher`."""
        exchange = _HybridEPExchange(self._buffer(tokens), self.num_local_experts)
        of_ranks = self.for_each_rank(probs).float()
        rows, weights = _HybridEPDispatch.apply(
            tokens, of_ranks, self.for_each_rank(routing_map), exchange
        )
        counts = exchange.counts
        assert counts is not None
        of_experts = counts.tolist() if is_host_memory(counts.device) else RowCounts(counts.long())
        return _Sent(rows, weights, of_experts, exchange, lambda output: output)

    def _buffer(self, tokens: Tensor) -> Any:
        library = require("deep_ep", purpose=PURPOSE)
        kept = self.kept(f"deep_ep.HybridEPBuffer {tokens.shape[1]} {self.num_local_experts}")
        if not kept.fits((len(tokens),)):
            sms = {}
            if self.num_sms is not None:
                sms = {"num_sms_dispatch_api": self.num_sms, "num_sms_combine_api": self.num_sms}
            kept.buffer = library.HybridEPBuffer(
                group=self.tp_ep,
                hidden_dim=tokens.shape[1],
                max_num_of_tokens_per_rank=kept.size[0],
                num_local_experts=self.num_local_experts,
                use_fp8=False,
                **sms,
            )
        return kept.buffer
