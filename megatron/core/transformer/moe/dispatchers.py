"""Choose the dispatcher of a layer: by name, or by the device and the installed libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from megatron.core.foundation import device
from megatron.core.foundation.optional_imports import why_missing
from megatron.core.kernels.registry import OTHER_DEVICES, Choice, Kernel, KernelTable, Request
from megatron.core.kernels.registry import dtype_name as name_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SingleRank
from megatron.core.transformer.moe.deep_ep import (
    MoEDeepEPTokenDispatcher,
    MoEHybridEPTokenDispatcher,
    why_not_hybrid_ep,
)
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    TokenDispatcher,
)
from megatron.core.transformer.transformer_config import TransformerConfig

DEEP_EP, HYBRID_EP, NCCL_EP = (
    f"--moe-flex-dispatcher-backend {name}" for name in ("deepep", "hybridep", "ncclep")
)
KNOWN_SIZES = "--moe-expert-rank-capacity-factor"

MakeDispatcher = Callable[
    [TransformerConfig, int, Sequence[int], ProcessGroupCollection], TokenDispatcher
]


def _without_config(
    kind: Callable[..., TokenDispatcher],
    _config: TransformerConfig,
    num_local_experts: int,
    local_expert_indices: Sequence[int],
    groups: ProcessGroupCollection,
) -> TokenDispatcher:
    return kind(num_local_experts, local_expert_indices, groups)


_ALL_TO_ALL: Kernel[MakeDispatcher] = Kernel(
    "all-to-all",
    partial(_without_config, MoEAlltoAllTokenDispatcher),
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
    "allgather": partial(_without_config, MoEAllGatherTokenDispatcher),
    "alltoall": partial(_without_config, MoEAlltoAllTokenDispatcher),
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
    if make is None:
        make = choose_exchange(config, device.device_type()).kernel.run
        if isinstance(groups.tp_ep, SingleRank) or groups.tp_ep.size() == 1:
            make = _BY_NAME["alltoall"]  # without communication on one rank
    return make(config, num_local_experts, local_expert_indices, groups)
