"""Flags of mixture-of-experts layers."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import SettingsGroup, flag
from megatron.core.transformer.config.experts import ExpertConfig

_NO_LIBRARY = "tokens travel by the collectives of torch.distributed"
_NO_PADDING = "products of 16 and 32 bits take any number of tokens"


@dataclass(kw_only=True)
class ExpertSettings(ExpertConfig, SettingsGroup):
    """Routed experts, their router, dispatcher and balance."""

    moe_flex_dispatcher_backend: str = flag(
        "deepep",
        choices=("deepep", "hybridep", "ncclep"),
        part_of="num_experts",
        note=_NO_LIBRARY,
    )
    """Library of the flex dispatcher."""
    moe_enable_deepep: bool = flag(False, part_of="num_experts", note=_NO_LIBRARY)
    """Older spelling of the DeepEP backend."""
    moe_router_padding_for_fp8: bool = flag(False, part_of="num_experts", note=_NO_PADDING)
    """Give every expert a number of tokens that FP8 products take."""
    moe_router_padding_for_quantization: bool = flag(False, part_of="num_experts", note=_NO_PADDING)
    """The same for all number formats below 16 bits."""
    moe_permute_fusion: bool = flag(
        False, part_of="num_experts", note="the fused kernel is taken where it runs"
    )
    """Fuse the permutation of tokens."""
    moe_router_fusion: bool = flag(
        False, part_of="num_experts", note="there is one implementation of the router"
    )
    """Fuse the router."""
    moe_per_layer_logging: bool = flag(False, part_of="num_experts")
    """Log the balance of each layer."""
    delay_wgrad_compute: bool = flag(
        False,
        part_of="overlap_moe_expert_parallel_comm",
        note="the other micro batch hides communication; --pipeline-schedule dualpipe-v puts weight"
        " gradients off",
    )
    """Split the backward so that weight gradients hide communication."""
