"""Activations that are offloaded to host memory or a file between forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

OFFLOAD_MODULES = (
    "attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act",
)  # fmt: skip
"""Parts of a layer whose saved activations can be offloaded."""
DROPPED_BY = {
    "core_attn": ("core_attn", "mla_up_proj"),
    "qkv_linear": ("layernorm",),
    "moe_act": ("moe_act", "moe"),
    "expert_fc1": ("moe",),
}
"""Part of a layer -> recomputed parts whose recomputation frees all its saved activations."""


@dataclass
class ActivationOffloadConfig:
    """Activations that are copied to host memory after forward and back before backward."""

    fine_grained_activation_offloading: bool = False
    """Keep the saved activations of --offload-modules in host memory until backward needs them;
    copies overlap with computation."""
    offload_modules: list[str] | None = flag(
        None, nargs="+", cli_default=[], part_of="fine_grained_activation_offloading"
    )
    """Any of attn_norm, qkv_linear, core_attn, attn_proj, mlp_norm, expert_fc1, moe_act. Recomputed
    activations are not saved, so they are not offloaded."""
    min_offloaded_tensor_size: int = flag(
        1024 * 1024,
        part_of=("fine_grained_activation_offloading", "cpu_offloading_num_layers"),
    )
    """Smallest number of elements of an offloaded tensor; smaller tensors stay on the device."""
    cpu_offloading_num_layers: int = 0
    """Number of layers at the start of each chunk whose activations are all offloaded. No effect
    with --overlap-moe-expert-parallel-comm, where layers of two micro batches alternate."""

    @property
    def modules_to_offload(self) -> Collection[str]:
        """The parts of layers to offload; empty without fine-grained offloading."""
        return (self.offload_modules or []) if self.fine_grained_activation_offloading else []

    @property
    def offloads_activations(self) -> bool:
        """Whether any activations are offloaded."""
        return self.fine_grained_activation_offloading or self.cpu_offloading_num_layers > 0


def activation_offload_problems(config: TransformerConfig) -> Iterator[MegatronError]:
    """Yield the problems of these settings."""
    granularity = config.recompute_granularity
    recomputed = config.recompute_modules or ()
    modules = config.modules_to_offload
    unknown = set(modules) - set(OFFLOAD_MODULES)
    if config.fine_grained_activation_offloading and (not modules or unknown):
        yield ConfigError(
            f"fine_grained_activation_offloading with offload_modules={modules}.",
            rule=f"offload_modules names parts of a layer: {', '.join(OFFLOAD_MODULES)}",
            flags=["--fine-grained-activation-offloading", "--offload-modules"],
            fix="use --offload-modules core_attn attn_proj",
        )
    if config.fine_grained_activation_offloading and config.cpu_offloading_num_layers:
        yield ConfigError(
            "fine_grained_activation_offloading with"
            f" cpu_offloading_num_layers={config.cpu_offloading_num_layers}.",
            rule="either whole layers are offloaded, or parts of all layers",
            flags=["--fine-grained-activation-offloading", "--cpu-offloading-num-layers"],
            fix="drop one of the two",
        )
    dropped = {"layernorm", "moe_act", "mla_up_proj"} & set(recomputed)
    if config.cpu_offloading_num_layers and granularity == "selective" and dropped:
        yield ConfigError(
            f"cpu_offloading_num_layers={config.cpu_offloading_num_layers} with recomputation"
            f" of {', '.join(sorted(dropped))}.",
            rule="outputs that are dropped after use cannot be copied",
            flags=["--cpu-offloading-num-layers", "--recompute-modules"],
            fix="use --fine-grained-activation-offloading for the other parts",
        )
