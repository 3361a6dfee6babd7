"""The dispatchers of layers of experts: the choice of one, and the dispatchers by library DeepEP.

DeepEP has two buffers, `Buffer` and `HybridEPBuffer`. Both send a token once to each *rank* that
holds one of its experts; an all-to-all sends it once for each expert. The receiving rank copies it
for its experts (`Buffer`: here, by the kernels of `kernels.permutation`; `HybridEPBuffer`: in the
same kernel). A combine sums the copies before it sends them back. Backward of a dispatch is a
combine with the same handle, and the reverse.

"DeepSeek-V3 Technical Report", section 3.2.2, arXiv 2412.19437. **Tested on the CPU with a
substitute for the library; never run on a GPU.**

Legend: t tokens of this rank, h hidden, e experts, l experts of a rank, r ranks of `tp_ep`, k
choices of a token times shards of an expert, m tokens that reach this rank, n rows for its experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.core.foundation import device
from megatron.core.foundation.optional_imports import require, why_missing
from megatron.core.kernels.registry import OTHER_DEVICES, Choice, Kernel, KernelTable, Request
from megatron.core.kernels.registry import dtype_name as name_of
from megatron.core.kernels.row_counts import RowCounts
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SingleRank, keep_for_group
from megatron.core.transformer.moe.token_dispatcher import (
    DispatchedTokens,
    ExchangeCapacity,
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    OverlapFn,
    TokenDispatcher,
    permutation_of,
)
from megatron.core.transformer.moe.unit_dispatcher import MoEUnitTokenDispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

PURPOSE = "--moe-token-dispatcher-type flex"
DEEP_EP, HYBRID_EP, NCCL_EP = (
    f"--moe-flex-dispatcher-backend {name}" for name in ("deepep", "hybridep", "ncclep")
)
KNOWN_SIZES = "--moe-expert-rank-capacity-factor"


def why_not_hybrid_ep() -> str | None:
    """Return why `HybridEPBuffer` cannot be used, or None."""
    reason = why_missing("deep_ep")
    if reason is None and not hasattr(require("deep_ep", purpose=PURPOSE), "HybridEPBuffer"):
        return "needs a DeepEP with HybridEPBuffer (its branch hybrid-ep)"
    return reason


class _KeptBuffer:
    """Memory of the library for one group, allocated anew if more or wider rows are needed.

    All ranks of the group have the same number of tokens, so they allocate it together.
    """

    def __init__(self) -> None:
        self.size: tuple[int, ...] = ()
        self.buffer: Any = None

    def fits(self, size: tuple[int, ...]) -> bool:
        """Return whether the buffer is large enough; if not, set the size of the next one."""
        if self.buffer is not None and all(a <= b for a, b in zip(size, self.size, strict=True)):
            return True
        self.size = tuple(map(max, zip(size, self.size or size, strict=True)))
        return False


class _Exchange(Protocol):
    """One exchange by the library; both directions use the handle of its first dispatch."""

    def first_dispatch(
        self, tokens: Tensor, weights: Tensor, choices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send tokens [t, h] with weights: (received [m, h] or [n, h], their weights)."""
        ...

    def dispatch_again(self, tokens: Tensor) -> Tensor:
        """Send other values [t, h] the same way: [m, h], or [n, h]."""
        ...

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send rows back and sum the rows of each token: [t, h], and its weights."""
        ...


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, choices: Tensor, exchange: _Exchange
    ) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        return exchange.first_dispatch(tokens, weights, choices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_of_weights: Tensor) -> tuple[Tensor | None, ...]:
        summed, of_weights = ctx.exchange.combine(grad, grad_of_weights.contiguous())
        return summed, of_weights, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.combine(rows)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.dispatch_again(grad), None


class _Sent(NamedTuple):
    """The rows that this rank has received for its experts."""

    rows: Tensor
    """[n, h], by expert."""
    weights: Tensor
    """Router weights of the rows, [n]."""
    tokens_per_expert: list[int] | RowCounts
    exchange: _Exchange
    to_received: Callable[[Tensor], Tensor]
    """Converts output rows of the experts [n, h] to the form that the library sends back."""


class _FusedDispatcher(TokenDispatcher):
    """Common part of both dispatchers: the library exchanges over `tp_ep`, l experts a rank.

    A shard of an expert that is split over `expt_tp` counts as an expert of its rank; the combine
    sums the outputs of the shards.
    """

    def __init__(
        self,
        config: TransformerConfig,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        groups: ProcessGroupCollection,
    ) -> None:
        super().__init__(config, num_local_experts, local_expert_indices, groups)
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
        """Dispatch after `overlap_fn`: nothing is computed during the exchange."""
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
        """Number of ranks that together hold every shard of every expert once."""
        return self.tp_ep.size()

    def kept(self, name: str) -> _KeptBuffer:
        """Return the library's memory of the group."""
        assert not isinstance(self.tp_ep, SingleRank)
        return keep_for_group(self.tp_ep, name, lambda _: _KeptBuffer())

    def for_each_rank(self, of_experts: Tensor) -> Tensor:
        """Return values [t, e] of experts in the order of the ranks' experts: [t, r*l]."""
        parts = of_experts.view(len(of_experts), -1, self.num_local_experts)
        chosen = parts.index_select(1, self._part_of_rank.to(of_experts.device))
        return chosen.flatten(1)


class _DeepEPExchange:
    """One exchange by `deep_ep.Buffer`."""

    def __init__(self, buffer: Any, num_experts: int) -> None:
        self.buffer, self.num_experts = buffer, num_experts
        self.handle: Any = None
        self.tokens_per_expert: list[int] = []
        self.choices = torch.empty(0)
        """Experts of the received tokens [m, k], -1 for experts of other ranks."""

    def first_dispatch(
        self, tokens: Tensor, weights: Tensor, choices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send tokens [t, h]: (received [m, h], weights [m, k])."""
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            choices, self.num_experts
        )
        received, self.choices, its_weights, counts, self.handle, _ = self.buffer.dispatch(
            tokens.contiguous(),
            topk_idx=choices,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        self.tokens_per_expert = list(counts)
        return received, its_weights

    def dispatch_again(self, tokens: Tensor) -> Tensor:
        """Send other values [t, h] the same way: [m, h]."""
        received: Tensor = self.buffer.dispatch(tokens.contiguous(), handle=self.handle)[0]
        return received

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send back [m, h] and sum the rows of each token: [t, h], and weights [t, k]."""
        summed, its_weights, _ = self.buffer.combine(
            rows.contiguous(), self.handle, topk_weights=weights
        )
        return summed, its_weights


class MoEDeepEPTokenDispatcher(_FusedDispatcher):
    """Dispatch by `deep_ep.Buffer`, which sends bf16. The host waits for the counts of rows."""

    def send(self, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> _Sent:
        """Send tokens, and permute the received ones by expert."""
        exchange = _DeepEPExchange(self._buffer(tokens), self.num_ranks * self.num_local_experts)
        is_chosen = self.for_each_rank(routing_map)
        most = min(self.num_choices * self.expt_tp.size(), is_chosen.shape[1])
        marks, choices = is_chosen.to(torch.uint8).topk(most, -1)
        weights = self.for_each_rank(probs).gather(1, choices).float()
        choices = choices.masked_fill(marks == 0, -1)
        received, its_weights = _Dispatch.apply(tokens, weights, choices, exchange)
        local_map, local_probs = self._map_of_rows(exchange.choices, its_weights)
        counts = exchange.tokens_per_expert
        permutation = permutation_of(received, local_map, sum(counts))
        rows, weights_of_rows = permutation.permute(received), permutation.weights(local_probs)
        return _Sent(rows, weights_of_rows, counts, exchange, permutation.unpermute)

    def _map_of_rows(self, choices: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return a map bool [m, l] and weights [m, l] of choices [m, k], -1 for other ranks."""
        local = self.num_local_experts
        column = torch.where(choices < 0, local, choices)
        chosen = torch.zeros(len(choices), local + 1, dtype=torch.bool, device=choices.device)
        chosen.scatter_(1, column, True)
        spread = weights.new_zeros(chosen.shape).scatter(1, column, weights)
        return chosen[:, :local], spread[:, :local]

    def _buffer(self, tokens: Tensor) -> Any:
        library = require("deep_ep", purpose=PURPOSE)
        # The library sizes its buffer for at least two bytes an element.
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
        self, tokens: Tensor, weights: Tensor, choices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Send tokens [t, h] by a map [t, r*l]: rows [n, h] by expert, their weights [n]."""
        rows, weights, _, self.counts, self.handle = self.buffer.dispatch_with_permute(
            hidden=tokens.contiguous(),
            routing_map=choices,
            probs=weights,
            scaling_factor=None,
            num_of_experts_per_rank=self.num_local_experts,
            pad_multiple=None,
        )
        self.num_rows = len(rows)
        return rows, weights

    def dispatch_again(self, tokens: Tensor) -> Tensor:
        """Send other values [t, h] the same way: [n, h]; the host does not wait for n."""
        rows: Tensor = self.buffer.dispatch_with_permute(
            hidden=tokens.contiguous(),
            scaling_factor=None,
            handle=self.handle,
            pad_multiple=None,
            num_permuted_tokens=self.num_rows,
        )[0]
        return rows

    def combine(self, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Send back [n, h] and sum the rows of each token: [t, h], and weights [t, r*l]."""
        summed, of_weights = self.buffer.combine_with_unpermute(
            hidden=rows.contiguous(), probs=weights, handle=self.handle, pad_multiple=None
        )
        return summed, of_weights


class MoEHybridEPTokenDispatcher(_FusedDispatcher):
    """Dispatch by `deep_ep.HybridEPBuffer`, which also permutes rows by expert and back."""

    def send(self, tokens: Tensor, probs: Tensor, routing_map: Tensor) -> _Sent:
        """Send tokens; the library permutes them by expert."""
        exchange = _HybridEPExchange(self._buffer(tokens), self.num_local_experts)
        of_ranks = self.for_each_rank(probs).float()
        rows, weights = _Dispatch.apply(tokens, of_ranks, self.for_each_rank(routing_map), exchange)
        counts = exchange.counts
        assert counts is not None
        of_experts = (
            counts.tolist() if device.is_host_memory(counts.device) else RowCounts(counts.long())
        )
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


MakeDispatcher = Callable[
    [TransformerConfig, int, Sequence[int], ProcessGroupCollection], TokenDispatcher
]


_ALL_TO_ALL: Kernel[MakeDispatcher] = Kernel(
    "all-to-all",
    MoEAlltoAllTokenDispatcher,
    frozenset({DEEP_EP, HYBRID_EP, NCCL_EP, KNOWN_SIZES}),
)
_BF16 = frozenset({"bfloat16"})

EXCHANGE: KernelTable[MakeDispatcher] = KernelTable(
    "exchange of tokens",
    {
        "cpu": (_ALL_TO_ALL,),
        OTHER_DEVICES: (
            Kernel(
                "deepep", MoEDeepEPTokenDispatcher, frozenset({DEEP_EP}), _BF16,
                missing=partial(why_missing, "deep_ep"), library=True,
            ),
            Kernel(
                "hybridep", MoEHybridEPTokenDispatcher, frozenset({HYBRID_EP}), _BF16,
                missing=why_not_hybrid_ep, library=True,
            ),
            _ALL_TO_ALL,
        ),
    },
)  # fmt: skip
"""Dispatchers that `--moe-token-dispatcher-type flex` chooses from."""

_BY_NAME: dict[str, MakeDispatcher] = {
    "allgather": MoEAllGatherTokenDispatcher,
    "alltoall": MoEAlltoAllTokenDispatcher,
}


def choose_exchange(
    config: TransformerConfig, device_type: str, *, is_planned: bool = False
) -> Choice[MakeDispatcher]:
    """Choose the dispatcher of "flex" on a type of device, with the reasons against others."""
    needs = {f"--moe-flex-dispatcher-backend {config.exchange_library}"}
    if config.moe_expert_rank_capacity_factor is not None:
        needs.add(KNOWN_SIZES)
    dtype = name_of(config.params_dtype)
    return EXCHANGE.choose(Request(device_type, dtype, frozenset(needs), is_planned))


def build_dispatcher(
    config: TransformerConfig,
    num_local_experts: int,
    local_expert_indices: Sequence[int],
    groups: ProcessGroupCollection,
) -> TokenDispatcher:
    """Return the dispatcher of a layer.

    Args:
        num_local_experts, local_expert_indices: the experts of this rank.
    """
    make = _BY_NAME.get(config.moe_token_dispatcher_type)
    if config.layout_invariant_mode:
        make = MoEUnitTokenDispatcher
    elif make is None:
        make = choose_exchange(config, device.device_type()).kernel.run
        if isinstance(groups.tp_ep, SingleRank) or groups.tp_ep.size() == 1:
            make = _BY_NAME["alltoall"]  # without communication on one rank
    return make(config, num_local_experts, local_expert_indices, groups)
