"""Activation recomputation (arXiv 2205.05198, section 5)."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag

RECOMPUTE_MODULES = (
    "core_attn", "mla_up_proj", "mlp", "layernorm", "moe", "moe_act", "shared_experts",
)  # fmt: skip
"""Parts of a layer that selective recomputation can drop and recompute."""


@dataclass
class RecomputeConfig:
    """Which activations are dropped after forward and recomputed in backward."""

    recompute_granularity: str | None = flag(None, choices=("full", "selective"))
    """Which activations are recomputed in backward: whole layers, or parts of each."""
    recompute_method: str | None = flag(None, choices=("uniform", "block"))
    """For "full": "uniform" (groups of layers) or "block" (the first layers of each chunk)."""
    recompute_num_layers: int | None = None
    """Layers of a group, or recomputed layers of a chunk."""
    recompute_modules: list[str] | None = flag(None, nargs="+")
    """Selective: any of core_attn, mla_up_proj (queries, keys and values of latents), mlp, moe,
    moe_act (what an expert's second layer multiplies), shared_experts, layernorm. Default
    core_attn. Norms whose output is the residual stream
    (--apply-residual-connection-post-layernorm) keep it."""
    distribute_saved_activations: bool = False
    """Shard the saved layer inputs over the tensor-parallel ranks."""
    mlp_chunks_for_training: int = 1
    """Runs of tokens that the MLP is computed for one after the other, each again in backward, so
    that the wide activations of one run exist at a time (tiled MLP: arXiv 2506.13996, section
    3.1)."""

    def derive_recompute(self) -> None:
        """Fill the default module list."""
        if self.recompute_granularity == "selective" and self.recompute_modules is None:
            self.recompute_modules = ["core_attn"]

    def recomputes(self, module: str) -> bool:
        """Return whether selective recomputation has this part of a layer."""
        modules = self.recompute_modules or []
        return self.recompute_granularity == "selective" and module in modules

    def check_recompute(
        self, sequence_parallel: bool, has_latents: bool, overlaps_shared_expert: bool
    ) -> list[MegatronError]:
        """Return the problems of the recompute settings."""
        problems: list[MegatronError] = []
        granularity, method = self.recompute_granularity, self.recompute_method
        if granularity not in (None, "full", "selective"):
            problems.append(
                ConfigError(
                    f"recompute_granularity={granularity!r} is unknown.",
                    rule="it is full or selective",
                    flags=["--recompute-granularity"],
                    fix="use --recompute-granularity selective",
                )
            )
        if granularity == "full" and (
            method not in ("uniform", "block") or not self.recompute_num_layers
        ):
            problems.append(
                ConfigError(
                    f"full recomputation with method={method} and"
                    f" num_layers={self.recompute_num_layers}.",
                    rule="it needs a method and a positive number of layers",
                    flags=["--recompute-method", "--recompute-num-layers"],
                    fix="add --recompute-method uniform --recompute-num-layers 1",
                )
            )
        if granularity != "full" and method is not None:
            problems.append(
                ConfigError(
                    f"recompute_method={method!r} with recompute_granularity={granularity!r}.",
                    rule="a method belongs to full recomputation",
                    flags=["--recompute-method", "--recompute-granularity"],
                    fix="use --recompute-granularity full or drop --recompute-method",
                )
            )
        if self.mlp_chunks_for_training < 1:
            problems.append(
                ConfigError(
                    f"mlp_chunks_for_training={self.mlp_chunks_for_training}.",
                    rule="it is a positive number",
                    flags=["--mlp-chunks-for-training"],
                    fix="use --mlp-chunks-for-training 1",
                )
            )
        unknown = set(self.recompute_modules or []) - set(RECOMPUTE_MODULES)
        if unknown:
            problems.append(
                ConfigError(
                    f"recompute_modules names {sorted(unknown)}.",
                    rule=f"selective recomputation knows {', '.join(RECOMPUTE_MODULES)}",
                    flags=["--recompute-modules"],
                    fix="use --recompute-modules core_attn",
                )
            )
        if self.recomputes("mla_up_proj") and not has_latents:
            problems.append(
                ConfigError(
                    "recompute_modules names mla_up_proj.",
                    rule="only multi-latent attention projects up from latents",
                    flags=["--recompute-modules", "--multi-latent-attention"],
                    fix="drop mla_up_proj",
                )
            )
        if self.recomputes("shared_experts") and overlaps_shared_expert:
            problems.append(
                ConfigError(
                    "recompute_modules names shared_experts beside moe_shared_expert_overlap.",
                    rule="parts of an overlapped shared expert run at other times",
                    flags=["--recompute-modules", "--moe-shared-expert-overlap"],
                    fix="drop one of the two",
                )
            )
        if self.distribute_saved_activations and sequence_parallel:
            problems.append(
                ConfigError(
                    "distribute_saved_activations is on together with sequence_parallel.",
                    rule="under sequence parallelism layer inputs are sharded already",
                    flags=["--distribute-saved-activations", "--sequence-parallel"],
                    fix="drop --distribute-saved-activations",
                )
            )
        return problems
