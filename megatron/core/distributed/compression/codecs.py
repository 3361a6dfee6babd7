"""What gradients look like on the wire when they are sent in fewer bytes than they have.

Rounding errors of one step are not lost: they are kept and added to the next one's gradient
("error feedback", S. Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient
Compression Schemes", arXiv 1901.09847), so over time all of the gradient arrives.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from megatron.core.distributed.sharding_arithmetic import BLOCK

SCALE_BYTES = 4


class Codec(Protocol):
    """Packs flat fp32 gradients, whole blocks of `BLOCK` elements."""

    @property
    def keeps_error(self) -> bool:
        """Whether the error is large enough to be fed back."""
        ...

    def num_bytes(self, numel: int) -> int:
        """Return the bytes of `numel` packed elements."""
        ...

    def pack(self, values: Tensor) -> Tensor:
        """Return uint8 [num_bytes] of fp32 [numel]."""
        ...

    def unpack(self, packed: Tensor) -> Tensor:
        """Return fp32 [numel] of uint8 [num_bytes]; not finite where the values were not."""
        ...


class BFloat16Codec:
    """bf16: half the bytes of fp32. Sums are computed in fp32 all the same."""

    keeps_error = False

    def num_bytes(self, numel: int) -> int:
        """See `Codec`."""
        return 2 * numel

    def pack(self, values: Tensor) -> Tensor:
        """Encode fp32 values [n]; see `Codec`."""
        return values.bfloat16().view(torch.uint8)

    def unpack(self, packed: Tensor) -> Tensor:
        """Decode to fp32 values [n]; see `Codec`."""
        return packed.view(torch.bfloat16).float()


class BlockInt8Codec:
    """int8 with an fp32 scale per block: 3.9 times fewer bytes than fp32.

    T. Dettmers et al., "8-bit Optimizers via Block-wise Quantization", section 2.1, arXiv
    2110.02861: one outlier spoils the resolution of its own block only.
    """

    keeps_error = True

    def num_bytes(self, numel: int) -> int:
        """See `Codec`."""
        return numel // BLOCK * (BLOCK + SCALE_BYTES)

    def pack(self, values: Tensor) -> Tensor:
        """Encode fp32 values [n]; see `Codec`."""
        blocks = values.view(-1, BLOCK)
        scale = blocks.abs().amax(dim=1, keepdim=True).mul_(1 / 127)
        packed = torch.empty(
            blocks.shape[0], BLOCK + SCALE_BYTES, dtype=torch.uint8, device=values.device
        )
        # An infinite or NaN scale travels, and makes the block NaN where it arrives.
        levels = (blocks / scale.clamp_min(1e-38)).nan_to_num_(0.0, 0.0, 0.0).round_()
        packed[:, :BLOCK].view(torch.int8).copy_(levels)
        packed[:, BLOCK:].view(torch.float32).copy_(scale)
        return packed.view(-1)

    def unpack(self, packed: Tensor) -> Tensor:
        """Decode to fp32 values [n]; see `Codec`."""
        blocks = packed.view(-1, BLOCK + SCALE_BYTES)
        scale = blocks[:, BLOCK:].view(torch.float32)
        return blocks[:, :BLOCK].view(torch.int8).float().mul_(scale).view(-1)
