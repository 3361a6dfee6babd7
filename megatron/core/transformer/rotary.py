"""Rotary position embedding: rotate pairs of channels of queries and keys by position.

Legend: s sequence, b micro-batch, n heads, d head dim, r rotated channels (r <= d).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.context_parallel import sequence_shard_of_rank
from megatron.core.kernels.registry import Request
from megatron.core.kernels.rotary import ROTARY, UNFUSED
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transformer.transformer_config import TransformerConfig

Rotary = tuple[Tensor | tuple[Tensor, Tensor] | None, Tensor | None, Tensor | None]
"""Angles [s, 1 or b, 1, r], cosine and sine of rotary positions."""


def angles_of(
    rotary: Rotary, dtype: torch.dtype, config: TransformerConfig
) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine [s, 1 or b, 1, r]; None without rotary positions."""
    angles, cos, sin = rotary
    if angles is None:
        return None
    if cos is None or sin is None:
        angles = angles[0] if isinstance(angles, tuple) else angles
        return cos_sin(angles, dtype, config.rotary_amplitude)
    return cos, sin


def cos_sin(freqs: Tensor, dtype: torch.dtype, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return cosine and sine of the angles [s, 1, 1, r], computed in fp32, in `dtype`.

    Args:
        amplitude: factor on both.
    """
    cos, sin = freqs.float().cos(), freqs.float().sin()
    if amplitude != 1.0:
        cos, sin = cos * amplitude, sin * amplitude
    return cos.to(dtype), sin.to(dtype)


def positions_of(
    num_tokens: int,
    device: torch.device,
    cp: Group,
    packed: PackedSeqParams | None = None,
    batch: int = 1,
) -> Tensor:
    """Return the positions of this rank's tokens: [s/cp, 1], or [s/cp, b] in documents."""
    positions = sequence_shard_of_rank(num_tokens, cp=cp, sp=SINGLE_RANK).positions(device)
    if packed is None:
        return positions[:, None]
    documents = packed.resolve(batch, num_tokens * cp.size(), device)
    return documents.positions.t()[positions]


def positions_of_rank(
    hidden_states: Tensor,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    packed: PackedSeqParams | None = None,
) -> Tensor:
    """Return the positions of the tokens of all tensor-parallel ranks; see `positions_of`.

    Args:
        hidden_states: [s/cp, b, h] ([s/cp/tp, b, h] under sequence parallelism).
    """
    s, b = hidden_states.shape[:2]
    num_tokens = s * (groups.tp.size() if config.sequence_parallel else 1)
    return positions_of(num_tokens, hidden_states.device, groups.microbatch_cp, packed, b)


def rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, *, fuses: bool = True
) -> Tensor:
    """Rotate the first r channels of x [s, b, n, d]; the others pass unchanged.

    Args:
        cos, sin: [s, 1, 1, r]; entry i belongs to channel i, so each angle appears twice.
        interleaved: pairs are channels (2i, 2i+1) instead of (i, i + r/2).
        fuses: False prefers plain operations to fused kernels.
    """
    kernel = ROTARY.choose(Request.of(x), () if fuses else UNFUSED).kernel
    return kernel.run(x, cos, sin, interleaved)


def rotate_last(x: Tensor, cos: Tensor, sin: Tensor, **how: bool) -> Tensor:
    """Rotate the last r channels of x [s, b, n, d], as `rotate` does with the first."""
    kept, turned = x.split([x.shape[-1] - cos.shape[-1], cos.shape[-1]], -1)
    return torch.cat((kept, rotate(turned, cos, sin, **how)), -1)
