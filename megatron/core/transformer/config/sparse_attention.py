"""Sparse attention through latents: the sizes of the indexer that chooses keys, and its loss."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag

_MIXER = "experimental_attention_variant", "hybrid_layer_pattern"
_NO_KERNELS = "use none, which computes blocks of queries in PyTorch on every device"


@dataclass
class SparseAttentionConfig:
    """Attention to the keys that an indexer scores highest (DeepSeek-V3.2, arXiv 2512.02556)."""

    dsa_indexer_head_dim: int | None = flag(None, part_of=_MIXER)
    """Width of a head of the indexer; its first channels rotate, as many as
    --qk-pos-emb-head-dim."""
    dsa_indexer_n_heads: int | None = flag(None, part_of=_MIXER)
    """Query heads of the indexer; they share one key."""
    dsa_indexer_topk: int | None = flag(None, part_of=_MIXER)
    """Keys that a query attends to: of those with the highest scores, and of equal ones the
    earliest."""
    dsa_indexer_loss_coeff: float | None = flag(
        None, part_of=_MIXER, per_micro_batch="the loss is a mean over the tokens of a micro batch"
    )
    """Factor on the loss by which the indexer learns the distribution of attention. None or 0: the
    indexer stays as it is."""
    dsa_indexer_use_sparse_loss: bool = flag(False, part_of=_MIXER)
    """Compare the two distributions over the chosen keys alone, instead of all keys."""
    dsa_indexer_k_norm_epsilon: float | None = flag(None, part_of=_MIXER)
    """Added to the variance in the norm of the indexer's key; None is that of --norm-epsilon."""
    dsa_indexer_k_norm_fp32: bool = flag(False, part_of=_MIXER)
    """Norm the indexer's key in fp32, and keep it so."""
    dsa_indexer_rope_interleaved: bool = flag(False, part_of=_MIXER)
    """Rotate neighbouring channels (2i, 2i+1) in the indexer, instead of (i, i + d/2)."""
    dsa_indexer_scoring_relu: bool = flag(
        True, part_of=_MIXER, help="Indexer: let a head's negative scores count as they are."
    )
    """Count the positive scores of each head of the indexer alone."""
    dsa_kernel_backend: str = flag(
        "none",
        choices=("none", "tilelang", "cudnn"),
        refuse_values={"tilelang": _NO_KERNELS, "cudnn": _NO_KERNELS},
        part_of=_MIXER,
    )
    """Library of the kernels of sparse attention; none is PyTorch."""

    @property
    def trains_indexer(self) -> bool:
        """Whether the indexer has a loss to learn from."""
        return bool(self.dsa_indexer_loss_coeff)

    def check_sparse_attention(
        self, *, is_used: bool, has_latents: bool, q_lora_rank: int | None, rotated: int
    ) -> list[MegatronError]:
        """Return the problems of these settings.

        Args:
            is_used: a layer of the model has sparse attention.
            has_latents: the model has multi-latent attention.
            rotated: channels that rotate.
        """
        if not is_used:
            return []
        problems: list[MegatronError] = []
        if not has_latents or q_lora_rank is None:
            problems.append(
                ConfigError(
                    f"sparse attention with multi_latent_attention={has_latents} and"
                    f" q_lora_rank={q_lora_rank}.",
                    rule="the indexer reads the latent of the queries",
                    flags=["--multi-latent-attention", "--q-lora-rank"],
                    fix="add --multi-latent-attention --q-lora-rank 1536",
                )
            )
        for name, example in (("dsa_indexer_n_heads", 64), ("dsa_indexer_topk", 2048)):
            value = getattr(self, name)
            if value is None or value < 1:
                problems.append(_of_size(name, value, "it is a positive number", example))
        width = self.dsa_indexer_head_dim
        if width is None or width < rotated:
            rule = f"a head has at least the {rotated} channels that rotate"
            problems.append(_of_size("dsa_indexer_head_dim", width, rule, max(128, rotated)))
        if self.dsa_indexer_loss_coeff is not None and self.dsa_indexer_loss_coeff < 0:
            value = self.dsa_indexer_loss_coeff
            problems.append(_of_size("dsa_indexer_loss_coeff", value, "it is not negative", 0.01))
        return problems


def _of_size(name: str, value: float | None, rule: str, example: float) -> ConfigError:
    spelling = "--" + name.replace("_", "-")
    return ConfigError(
        f"{name}={value}.", rule=rule, flags=[spelling], fix=f"use {spelling} {example}"
    )
