"""The short causal convolution of each channel by itself, which goes before a recurrence.

Legend: s rows, b micro batch, c channels, k taps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide


def causal_convolution(
    x: Tensor, weight: Tensor, before: Tensor | None = None, ids: Tensor | None = None
) -> Tensor:
    """Return y_t = sum_j weight[c, j] x_{t - (k - 1) + j}, in fp32 or wider.

    Args:
        x: [s, b, c].
        weight: [c, k].
        before: [k - 1, b, c], the rows before the first; None is zeros.
        ids: [b, k - 1 + s], the documents of both; a row sees its own. None is one document.
    Returns:
        [s, b, c].
    """
    s, last = x.shape[0], weight.shape[1] - 1
    dtype = torch.promote_types(x.dtype, torch.float32)
    weight = weight.to(dtype)
    rows = F.pad(x, (0, 0, 0, 0, last, 0)) if before is None else torch.cat((before, x))
    out = x.to(dtype) * weight[:, last]
    for tap in range(last):
        taken = rows[tap : tap + s].to(dtype) * weight[:, tap]
        if ids is not None:
            taken = taken * (ids[:, tap : tap + s] == ids[:, last:]).t().unsqueeze(-1)
        out = out + taken
    return out


def fill_taps(weight: Tensor) -> None:
    """Fill [c, 1, k] with U(-1/sqrt(k), 1/sqrt(k)), as torch's convolutions begin."""
    bound = weight.shape[-1] ** -0.5
    nn.init.uniform_(weight, -bound, bound)


class ShortConvolution(ParallelLayer):
    """Convolve each channel with its own few taps, then SiLU; ranks split the channels.

    Args:
        channels: of all ranks together, c; each rank holds c/tp.
        taps: k, the row itself and those before it.
        has_bias: add a bias of each channel.
    """

    def __init__(
        self,
        channels: int,
        taps: int,
        *,
        config: TransformerConfig,
        tp_group: Group,
        has_bias: bool = False,
    ) -> None:
        super().__init__(config, tp_group=tp_group)
        width = divide(channels, tp_group.size())
        self.weight = self.new_parameter(width, 1, taps, init_method=fill_taps, split_dim=0)
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = self.new_parameter(width, init_method=nn.init.zeros_, split_dim=0)

    def forward(self, x: Tensor, before: Tensor | None = None, ids: Tensor | None = None) -> Tensor:
        """Convolve [s, b, c/tp]; of the arguments see `causal_convolution`.

        Returns:
            [s, b, c/tp] in the dtype of x.
        """
        out = causal_convolution(x, self.weight.squeeze(1), before, ids)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        return F.silu(out).to(x.dtype)
