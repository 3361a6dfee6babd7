"""Angles of the rotary position embedding, and its scalings for longer contexts.

Rotary embedding: arXiv 2104.09864. Position interpolation: S. Chen et al., "Extending Context
Window of Large Language Models via Positional Interpolation", arXiv 2306.15595. Scaling by
frequency bands: "The Llama 3 Herd of Models", section 3.4.2, arXiv 2407.21783, with the band
limits of its published weights. Positions in time, height and width: P. Wang et al., "Qwen2-VL:
Enhancing Vision-Language Model's Perception of the World at Any Resolution", section 2.1, arXiv
2409.12191; interleaved over the channels: "Qwen3-VL Technical Report", section 2.1, arXiv
2511.21631.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.foundation.device import current_device
from megatron.core.foundation.errors import ConfigError
from megatron.core.inference.contexts.static_context import BaseInferenceContext
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import resolve_group
from megatron.core.step_context.context import current_step
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.rotary import cos_sin, rotate
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.yarn import yarn_of_config

ORIGINAL_CONTEXT = 8192
"""Context length of Llama 3's pretraining; band limits are relative to it."""
LOW_FREQUENCY_FACTOR, HIGH_FREQUENCY_FACTOR = 1.0, 4.0


def inverse_frequencies(num_channels: int, base: float) -> Tensor:
    """Return [num_channels/2] fp32: base^(-2i/num_channels)."""
    exponent = torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels
    return 1.0 / (base**exponent)


def scale_by_frequency_band(inverse: Tensor, factor: float) -> Tensor:
    """Divide low frequencies [r/2] by `factor`, keep high ones, interpolate between them."""
    wavelength = 2 * math.pi / inverse
    longest_kept = ORIGINAL_CONTEXT / HIGH_FREQUENCY_FACTOR
    shortest_slowed = ORIGINAL_CONTEXT / LOW_FREQUENCY_FACTOR
    share_kept = (ORIGINAL_CONTEXT / wavelength - LOW_FREQUENCY_FACTOR) / (
        HIGH_FREQUENCY_FACTOR - LOW_FREQUENCY_FACTOR
    )
    blended = (1 - share_kept) * inverse / factor + share_kept * inverse
    slowed = torch.where(wavelength > shortest_slowed, inverse / factor, blended)
    return torch.where(wavelength < longest_kept, inverse, slowed)


class RotaryEmbedding(nn.Module):
    """Angles for positions 0, 1, ...; no parameters, nothing in the state dict.

    Args:
        kv_channels: head dim.
        rotary_percent: fraction of the channels that rotate.
        rotary_interleaved: pairs are neighbouring channels.
        proportional: pair channels and compute frequencies as with `rotary_percent` 1; then set the
            frequencies of the last pairs to 0.
        seq_len_interpolation_factor: positions are divided by it.
        rope_scaling: apply Llama 3's scaling by frequency band with `rope_scaling_factor`.
        use_cpu_initialization: accepted and unused; the angles are always on the step's device.
        yarn: config with YaRN's settings, or None without YaRN.
        longrope: config with LongRoPE's settings, or None without LongRoPE (Y. Ding et al.,
            "LongRoPE: Extending LLM Context Window Beyond 2 Million Tokens", arXiv 2402.13753).
    """

    def __init__(
        self,
        kv_channels: int,
        rotary_percent: float = 1.0,
        rotary_interleaved: bool = False,
        seq_len_interpolation_factor: float | None = None,
        rotary_base: float = 10000,
        rope_scaling: bool = False,
        rope_scaling_factor: float = 8.0,
        use_cpu_initialization: bool = False,
        cp_group: Group | None = None,
        yarn: TransformerConfig | None = None,
        longrope: TransformerConfig | None = None,
        proportional: bool = False,
    ) -> None:
        super().__init__()
        num_channels = int(kv_channels * rotary_percent)
        if num_channels < 2 or num_channels % 2:
            raise ConfigError(
                f"rotary_percent={rotary_percent} of {kv_channels} channels rotates"
                f" {num_channels} channels.",
                rule="channels rotate in pairs",
                flags=["--rotary-percent", "--kv-channels"],
                fix="choose a percentage that gives a positive even number of channels",
            )
        self.cp_group = resolve_group(cp_group, "cp")
        self.rotary_interleaved = rotary_interleaved
        self.seq_len_interpolation_factor = seq_len_interpolation_factor
        inverse = inverse_frequencies(kv_channels if proportional else num_channels, rotary_base)
        inverse[num_channels // 2 :] = 0.0
        if yarn is not None:
            inverse = yarn_of_config(num_channels, rotary_base, yarn)
        if rope_scaling:
            inverse = scale_by_frequency_band(inverse, rope_scaling_factor)
        # Not a buffer: converting the model to half precision must not round the angles.
        self.inv_freq = inverse.to(current_device())
        self._divisors: tuple[Tensor, Tensor] | None = None
        if longrope is not None:
            self._original_context = longrope.original_max_position_embeddings
            self._divisors = _divisors(longrope, self.inv_freq)
        self._cached: tuple[tuple[int, ...], Tensor] | None = None

    def forward(
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: Group | None = None,
    ) -> Tensor:
        """Return the angles of positions offset ... offset + max_seq_len - 1.

        Args:
            packed_seq: return the angles of all positions; otherwise a context-parallel rank gets
                the angles of its zigzag shard.
            cp_group: overrides the group of the constructor.
        Returns:
            [max_seq_len/cp, 1, 1, r] fp32; entry i is the angle of channel i of a head.
        """
        group = SINGLE_RANK if packed_seq else cp_group or self.cp_group
        wanted = (max_seq_len, offset, group.rank(), group.size())
        if self._cached is None or self._cached[0] != wanted:
            rows = sequence_shard_of_rank(max_seq_len // group.size(), cp=group, sp=SINGLE_RANK)
            positions = rows.positions(self.inv_freq.device) + offset
            self._cached = (wanted, self.freqs_of(positions, max_seq_len + offset))
        return self._cached[1]

    def freqs_of(self, positions: Tensor, length: int = 0) -> Tensor:
        """Return the angles of the given positions [s]: [s, 1, 1, r] fp32.

        Args:
            length: of the whole sequence, which determines the divisors of LongRoPE.
        """
        positions = positions.float()
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        inverse = self.inv_freq
        if self._divisors is not None:
            inverse = inverse / self._divisors[length > self._original_context]
        freqs = torch.outer(positions, inverse)
        if self.rotary_interleaved:
            freqs = freqs.repeat_interleave(2, dim=1)
        else:
            freqs = torch.cat((freqs, freqs), dim=1)
        return freqs[:, None, None, :]

    @staticmethod
    def get_rotary_seq_len(
        inference_context: BaseInferenceContext | None,
        transformer: object,
        transformer_input: Tensor | None,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int:
        """Return the length of the whole sequence, from the length of this rank's shard."""
        held = getattr(transformer, "input_tensor", None)
        rows = held if transformer_input is None else transformer_input
        assert rows is not None
        length = rows.shape[0]
        if transformer_config.sequence_parallel:
            length *= transformer_config.tensor_model_parallel_size
        shared = current_step().cp_group
        return length * (
            transformer_config.context_parallel_size if shared is None else shared.size()
        )


def _divisors(config: TransformerConfig, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return LongRoPE's divisors of the frequencies [r/2], of short and of long sequences."""
    short, long = config.rotary_short_factors or [], config.rotary_long_factors or []
    if not len(short) == len(long) == len(inverse):
        raise ConfigError(
            f"{len(short)} short and {len(long)} long rotary factors for {len(inverse)} pairs of"
            " channels.",
            rule="each rotating pair of channels has a factor for short and for long sequences",
            flags=["--rotary-short-factors", "--rotary-long-factors", "--rotary-percent"],
            fix=f"give {len(inverse)} factors to both flags",
        )
    return inverse.new_tensor(short), inverse.new_tensor(long)


class MultimodalRotaryEmbedding(RotaryEmbedding):
    """Angles for positions in time, height and width; each pair of channels has one of the three.

    Args: see `RotaryEmbedding`.
        interleaved_sections: pairs alternate between time, height and width until the sections of
            height and width are used up, then use time; otherwise the sections are consecutive.
    """

    def __init__(
        self, kv_channels: int, *, interleaved_sections: bool = False, **options: Any
    ) -> None:
        super().__init__(kv_channels, **options)
        self.interleaved_sections = interleaved_sections

    def forward(  # type: ignore[override]
        self, position_ids: Tensor, mrope_section: Sequence[int], cp_group: Group | None = None
    ) -> Tensor:
        """Return the angles of positions.

        Args:
            position_ids: [3, b, s], time, height and width of every token.
            mrope_section: number of channel pairs for time, height and width.
        Returns:
            [s, b, 1, r] fp32.
        """
        axes = self.axis_of_pairs(mrope_section).to(position_ids.device)
        positions = position_ids.float()
        if self.seq_len_interpolation_factor is not None:
            positions = positions / self.seq_len_interpolation_factor
        freqs = positions.permute(2, 1, 0)[..., axes] * self.inv_freq.to(position_ids.device)
        if self.rotary_interleaved:
            freqs = freqs.repeat_interleave(2, dim=-1)
        else:
            freqs = torch.cat((freqs, freqs), dim=-1)
        return freqs.unsqueeze(2)

    def axis_of_pairs(self, section: Sequence[int]) -> Tensor:
        """Return the axis of each pair of channels, int64 [r/2]: 0 time, 1 height, 2 width.

        Raises:
            ConfigError: the sections do not add up to the pairs of a head.
        """
        num_pairs = len(self.inv_freq)
        if len(section) != 3 or sum(section) != num_pairs or min(section) < 0:
            raise ConfigError(
                f"mrope_section={list(section)} for heads of {num_pairs} pairs of channels.",
                rule="the sum of the three sections is the number of rotating pairs of channels",
                flags=["--mrope-section", "--kv-channels", "--rotary-percent"],
                fix=f"use --mrope-section {num_pairs - 2 * (num_pairs // 3)} {num_pairs // 3}"
                f" {num_pairs // 3}",
            )
        if not self.interleaved_sections:
            return torch.arange(3).repeat_interleave(torch.tensor(section))
        axes = torch.zeros(num_pairs, dtype=torch.long)
        for axis in (1, 2):
            axes[axis : 3 * section[axis] : 3] = axis
        return axes


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    config: TransformerConfig,
    cu_seqlens: Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Group | None = None,
) -> Tensor:
    """Rotate t [s, b, n, d] by the angles `freqs` [s, 1, 1, r].

    Args:
        mscale: factor on cosine and sine.
    """
    if cu_seqlens is not None:
        raise ConfigError(
            "packed sequences (cu_seqlens) reached the rotary embedding.",
            rule="the angles belong to the positions of one sequence",
            fix="pass the angles of each token, from RotaryEmbedding.freqs_of(positions)",
        )
    cos, sin = cos_sin(freqs, t.dtype)
    if mscale != 1.0:
        cos, sin = cos * mscale, sin * mscale
    return rotate(t, cos, sin, config.rotary_interleaved, fuses=config.apply_rope_fusion)
