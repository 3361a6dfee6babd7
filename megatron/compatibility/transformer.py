"""Names of Megatron's modules of layers: transformer, fusions, embeddings, layer specs.

Legend: s sequence, b micro batch, h hidden, n heads, d head dim, r rotated channels, v vocabulary.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.context_parallel import shift_left
from megatron.core.context_parallel.partition import shard_sequence
from megatron.core.foundation.errors import ConfigError
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_submodules,
    get_gpt_layer_with_transformer_engine_submodules,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import (
    ProcessGroupCollection,
    resolve_group,
    resolve_groups,
)
from megatron.core.step_context.context import current_step
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.backend import LocalBackend
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.moe.load_balancing import AUX_LOSS_NAMES, loads_of_last_step
from megatron.core.transformer.rotary import cos_sin, rotate
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from megatron.core.transformer.yarn import yarn_attention_factor, yarn_inverse_frequencies
from megatron.core.transport.object_collectives import all_gather_object
from megatron.core.utils import get_pg_rank, get_pg_size

# Layer specs ----------------------------------------------------------------------------


class LocalSpecProvider:
    """The local classes, each as the result of a method, as Megatron's providers have them."""

    def column_parallel_linear(self) -> Any:
        """Return the linear layer that is split along its output."""
        return LocalBackend.column_linear

    def row_parallel_linear(self) -> Any:
        """Return the linear layer that is split along its input."""
        return LocalBackend.row_linear

    def core_attention(self) -> Any:
        """Return the softmax attention."""
        return LocalBackend.core_attention


def mamba_layer_submodules(
    norm: object = IdentityOp, mixer: object = IdentityOp, mamba_bda: object = IdentityFuncOp
) -> TransformerLayerSubmodules:
    """Return the parts of a layer whose only part is a mixer, which has its attention's place."""
    return TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=mixer, self_attn_bda=mamba_bda
    )


def get_gpt_heterogeneous_layer_spec(
    config: TransformerConfig,
    use_te: bool = False,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> TransformerBlockSubmodules:
    """Return the specs of a stage; the blocks of the config give each layer its sizes and parts."""
    return get_gpt_decoder_block_spec(config, use_te, vp_stage=vp_stage, pp_rank=pp_rank)


# Elementwise ----------------------------------------------------------------------------

bias_dropout_add_fused_train = get_bias_dropout_add(True, True)
bias_dropout_add_fused_inference = get_bias_dropout_add(False, True)


def bias_gelu(bias: Tensor, y: Tensor) -> Tensor:
    """Return gelu(y + bias), with the tanh approximation."""
    return bias_gelu_impl(y, bias)


def bias_swiglu(y: Tensor, bias: Tensor) -> Tensor:
    """Return silu(gate) * up of y + bias [..., 2f] (gate first) as [..., f]."""
    return bias_swiglu_impl(y, bias)


def openai_gelu(x: Tensor) -> Tensor:
    """Return GELU in its tanh form."""
    return F.gelu(x, approximate="tanh")


def attention_mask_func(attention_scores: Tensor, attention_mask: Tensor) -> Tensor:
    """Set scores to -10000 where the mask is True, in place, and return them."""
    return attention_scores.masked_fill_(attention_mask, -10000.0)


def SplitAlongDim(tensor: Tensor, dim: int, sections: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of `tensor`, split along `dim` into pieces of these sizes."""
    return torch.split(tensor, list(sections), dim)


def fused_vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor, target: Tensor, tp_group: Group | None = None
) -> Tensor:
    """Return the loss of every token, fp32 [s, b], of logits [s, b, v/tp]."""
    return vocab_parallel_cross_entropy(vocab_parallel_logits, target, tp_group=tp_group)


def is_layer_window_attention(
    window_size: Any, window_attn_skip_freq: Any, layer_number: int | None = None
) -> bool:
    """Return whether a layer's attention has a window.

    Args:
        window_attn_skip_freq: if an int n, every nth layer has full attention; if a list, its entry
            is 1 for layers with a window.
        layer_number: counted from 1. If it is left out, the first argument is the frequency and the
            second one the layer number.
    """
    if layer_number is None:
        return is_layer_window_attention(True, window_size, window_attn_skip_freq)
    if not window_size:
        return False
    if window_attn_skip_freq is None:
        return True
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return bool(window_attn_skip_freq[layer_number - 1])


# Positions ------------------------------------------------------------------------------


def get_pos_emb_on_this_cp_rank(
    pos_emb: Tensor, seq_dim: int, cp_group: Group | None = None
) -> Tensor:
    """Return this context-parallel rank's positions of `pos_emb`, which holds all positions."""
    group = resolve_group(cp_group, "cp")
    if get_pg_size(group) == 1:
        return pos_emb
    return shard_sequence(pos_emb, seq_dim, get_pg_rank(group), get_pg_size(group), "pos_emb")


def _apply_rotary_pos_emb_bshd(
    t: Tensor,
    freqs: Tensor,
    rotary_interleaved: bool = False,
    multi_latent_attention: bool = False,
    mscale: float = 1.0,
    **options: Any,
) -> Tensor:
    """Rotate t [s, b, n, d] by the angles `freqs` [s, 1, 1, r].

    Args:
        multi_latent_attention: a pair of rotated channels is adjacent in `t`. In the result, the
            first half holds the first channel of all pairs, the second half the second channel.
    """
    wanted = sorted(name for name, value in options.items() if value)
    if wanted:
        raise ConfigError(
            f"rotary positions with {', '.join(wanted)} are not supported.",
            rule="pairs of rotated channels are adjacent or half a head apart, in one direction",
            fix="leave these options out",
        )
    if multi_latent_attention:
        width = freqs.shape[-1]
        turned = t[..., :width]
        t = torch.cat((turned[..., 0::2], turned[..., 1::2], t[..., width:]), -1)
    cos, sin = cos_sin(freqs, t.dtype)
    return rotate(t, cos * mscale, sin * mscale, rotary_interleaved)


def fused_apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, transpose_output_memory: bool = False, interleaved: bool = False
) -> Tensor:
    """Rotate t [s, b, n, d] by the angles `freqs` [s, 1, 1, r]."""
    return _apply_rotary_pos_emb_bshd(t, freqs, interleaved)


def _yarn_get_mscale(scale: float = 1.0, mscale: float = 1.0) -> float:
    """Return YaRN's factor on cosine and sine for a context `scale` times as long."""
    return yarn_attention_factor(scale, mscale)


def _yarn_get_concentration_factor(
    scaling_factor: float, mscale: float | None, mscale_all_dim: float | None
) -> float:
    """Return YaRN's factor on cosine and sine; without both strengths it has strength 1."""
    if mscale is None or mscale_all_dim is None:
        return yarn_attention_factor(scaling_factor)
    full = yarn_attention_factor(scaling_factor, mscale_all_dim)
    return yarn_attention_factor(scaling_factor, mscale) / full


class YarnRotaryEmbedding(RotaryEmbedding):
    """Rotary angles scaled by YaRN, and YaRN's factor on cosine and sine.

    Args:
        scaling_factor: length of the new context divided by the original one.
        original_max_position_embeddings: number of positions in the original training.
        beta_fast, beta_slow, correction_range_round_to_int: see `yarn_inverse_frequencies`.
        mscale, mscale_all_dim: the returned factor is the attention factor of `mscale` divided by
            the attention factor of `mscale_all_dim`.
        others: as in `RotaryEmbedding`.
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000.0,
        scaling_factor: float = 1.0,
        original_max_position_embeddings: int = 4096,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
        mscale: float = 1.0,
        mscale_all_dim: float = 0.0,
        correction_range_round_to_int: bool = True,
        use_cpu_initialization: bool = False,
        cp_group: Group | None = None,
    ) -> None:
        super().__init__(
            kv_channels,
            rotary_percent,
            rotary_interleaved,
            seq_len_interpolation_factor,
            rotary_base,
            cp_group=cp_group,
        )
        self.inv_freq = yarn_inverse_frequencies(
            int(kv_channels * rotary_percent),
            rotary_base,
            factor=scaling_factor,
            original_context=original_max_position_embeddings,
            beta_fast=beta_fast,
            beta_slow=beta_slow,
            rounds_range=correction_range_round_to_int,
        ).to(self.inv_freq.device)
        self.mscale = _yarn_get_concentration_factor(scaling_factor, mscale, mscale_all_dim)

    def forward(  # type: ignore[override]
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: Group | None = None,
    ) -> tuple[Tensor, float]:
        """Return the angles [s, 1, 1, r] and the factor on cosine and sine."""
        return super().forward(max_seq_len, offset, packed_seq, cp_group), self.mscale


# Tokens ---------------------------------------------------------------------------------


def roll_tensor(
    tensor: Tensor,
    shifts: int = -1,
    dims: int = -1,
    cp_group: Group | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> tuple[Tensor, Tensor]:
    """Shift token ids or masks [b, s/cp] towards the beginning by one or more positions.

    Returns:
        the shifted tensor, with zeros at the end of the sequence, and its sum.
    """
    if packed_seq_params is not None or shifts >= 0 or dims not in (-1, tensor.dim() - 1):
        raise ConfigError(
            f"roll_tensor(shifts={shifts}, dims={dims}, packed_seq_params="
            f"{'given' if packed_seq_params is not None else None}) is not supported.",
            rule="it shifts the last dimension towards the beginning, without packed sequences",
            fix="use a negative shift along the last dimension; for packed sequences mask the last"
            " tokens of each document",
        )
    moved = shift_left(tensor, -shifts, cp_group or SINGLE_RANK)
    return moved, moved.sum()


def sort_chunks_by_idxs(
    input: Tensor,
    split_sizes: Tensor,
    sorted_idxs: Tensor,
    probs: Tensor | None = None,
    fused: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Reorder consecutive chunks of tokens.

    Args:
        split_sizes: number of tokens of each chunk.
        sorted_idxs: the index of each chunk in the result's order.
        probs: a weight of each token, reordered in the same way.
    """
    sizes, order = split_sizes.tolist(), sorted_idxs.tolist()

    def sort(rows: Tensor) -> Tensor:
        runs = torch.split(rows, sizes)
        return torch.cat([runs[i] for i in order])

    return sort(input), None if probs is None else sort(probs)


# Specs ----------------------------------------------------------------------------------


def get_mlp_module_spec(
    use_te: bool | None = True,
    num_experts: int | None = None,
    moe_grouped_gemm: bool | None = False,
    **options: Any,
) -> Any:
    """Return the spec of the MLP of a GPT layer, dense or with experts."""
    make = (
        get_gpt_layer_with_transformer_engine_submodules
        if use_te
        else get_gpt_layer_local_submodules
    )
    parts = make(num_experts=num_experts, moe_grouped_gemm=bool(moe_grouped_gemm), **options)
    return parts.mlp


_get_mlp_module_spec = get_mlp_module_spec


# Metrics --------------------------------------------------------------------------------


class MTPLossLoggingHelper:
    """Do nothing: each step already reports the loss of each depth as `mtp_1 loss` and so on."""

    @staticmethod
    def clean_loss_in_tracker() -> None:
        """Do nothing."""

    reduce_loss_in_tracker = clean_loss_in_tracker

    @staticmethod
    def track_mtp_metrics(*_: object, **options: object) -> None:
        """Do nothing."""


def track_moe_metrics(
    loss_scale: float,
    iteration: int,
    writer: Any = None,
    wandb_writer: Any = None,
    total_loss_dict: MutableMapping[str, Tensor] | None = None,
    per_layer_logging: bool = False,
    force_initialize: bool = False,
    track_names: Sequence[str] | None = None,
    num_layers: int | None = None,
    moe_layer_freq: int | Sequence[int] | None = None,
    mtp_num_layers: int | None = None,
    pg_collection: ProcessGroupCollection | None = None,
) -> None:
    """Log the balance losses of the last step, without coefficients, as means over its layers.

    All ranks call it.

    Args:
        writer, wandb_writer: log each loss under its name and, with `per_layer_logging`, as
            `moe/NAME_layer_N` with N from 0.
        total_loss_dict: the mean of each loss [] is added to its entry.
        track_names: log only these losses, as 0 if no router has them.
        num_layers: number of layers of the whole model; layers without experts are logged as 0.
    Communication:
        with pipeline stages, one all-gather of small Python objects over `pp`.
    """
    names = AUX_LOSS_NAMES.values() if track_names is None else track_names
    own = [(load.layer_number - 1, load.step_losses) for load in loads_of_last_step()]
    stages = all_gather_object(own, resolve_groups(pg_collection).pp)
    loads = [load for stage in stages for load in stage]
    scalars: dict[str, float] = {}
    for name in names:
        layers = dict.fromkeys(range(num_layers or 0), 0.0)
        for layer, losses in loads:
            values = [value for kind, value in losses.items() if AUX_LOSS_NAMES[kind] == name]
            layers[layer] = layers.get(layer, 0.0) + sum(values)
        mean = sum(layers.values()) / max(len(loads), 1)
        scalars[name] = mean
        if per_layer_logging:
            scalars |= {f"moe/{name}_layer_{n}": value for n, value in layers.items()}
        if total_loss_dict is not None:
            total_loss_dict[name] = total_loss_dict.get(name, torch.zeros(())) + mean
    if writer is not None:
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, iteration)
    if wandb_writer is not None:
        wandb_writer.log(scalars, iteration)


def get_mtp_ranks(pp_ranks: Sequence[int], config: TransformerConfig) -> list[int]:
    """Return which of the pipeline's ranks has the layers that predict further tokens, if any."""
    if not config.mtp_num_layers:
        return []
    layout = pipeline_layout(config)
    return [pp_ranks[layout.placement.location(layout.mtp_stage)[0]]]


def is_checkpointing() -> bool:
    """Return whether a layer runs whose activations are recomputed in the backward pass."""
    return current_step().is_checkpointed
