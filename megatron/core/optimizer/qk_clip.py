"""Scale down the query and key weights of heads whose attention logits have grown (QK-Clip).

Kimi Team, "Kimi K2: Open Agentic Intelligence", section 2.1 and algorithm 1, arXiv 2507.20534.

The forward passes of the step record the largest logit of each head; no product is computed again.
Heads are split over tensor-parallel ranks, tokens over data- and context-parallel ranks.

Legend: n query heads of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.parameters.param_meta import get_param_meta, shard_of
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import Attention
from megatron.core.transport import torch_collectives

RowFactors = Mapping[int, Tensor]
"""id of a parameter -> fp32 factor on each of its rows on this tensor-parallel rank."""


class AttentionLogits:
    """The largest attention logits of one step, of the layers on this pipeline stage."""

    def __init__(self, model_chunks: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
        """
        Args:
            model_chunks: wrapped or bare; duplicates are ignored.
        """
        found = {
            module: None
            for chunk in model_chunks
            for module in chunk.modules()
            if isinstance(module, Attention) and module.config.records_max_logits
        }
        self.layers, self.groups = list(found), groups
        first = next((p for chunk in model_chunks for p in chunk.parameters()), None)
        self._device = torch.device("cpu") if first is None else first.device
        configs = {id(chunk): getattr(chunk, "config", None) for chunk in model_chunks}
        self._is_logged = any(
            getattr(config, "log_max_attention_logit", False) for config in configs.values()
        )
        self.is_used = any(
            getattr(config, "records_max_logits", False) for config in configs.values()
        )
        """Whether the config of the model records logits; equal on all ranks."""
        self.largest: float | None = None
        """Largest logit of all heads and layers in the last step, if it is logged."""

    def forget(self) -> None:
        """Drop the recorded logits, because the step is not taken."""
        for layer in self.layers:
            layer.core_attention.max_logits = None

    @torch.no_grad()
    def take(self) -> RowFactors:
        """Return the factors on the rows of query and key projections, and reset the logits.

        Communication:
            one all-reduce of a number per head and layer on `dp_cp` and on `tp`; if the largest
            logit is logged, one of a single number on `pp`.
        """
        measured = self._measured()
        if self._is_logged:
            self.largest = self._over_stages(measured)
        factors: dict[int, Tensor] = {}
        highest = torch.stack([logits.max() for logits in measured]).tolist() if measured else []
        for layer, logits, largest in zip(self.layers, measured, highest, strict=True):
            config = layer.config
            if not config.qk_clip or largest <= config.qk_clip_threshold:
                continue
            gamma = config.qk_clip_threshold / logits.clamp_min(config.qk_clip_threshold)
            for linear, rows in layer.query_key_row_factors(gamma, config.qk_clip_alpha):
                for parameter in (linear.weight, getattr(linear, "bias", None)):
                    if parameter is not None:
                        tp, meta = self.groups.tp, get_param_meta(parameter)
                        factors[id(parameter)] = shard_of(rows, meta, tp.rank(), tp.size())
        return factors

    def _measured(self) -> list[Tensor]:
        """Return the largest logit of each head of the model, fp32 [n], for each layer."""
        rank, lowest = self.groups.tp.rank(), torch.finfo(torch.float32).min
        rows = []
        for layer in self.layers:
            local = layer.num_attention_heads_per_partition
            heads = layer.config.num_attention_heads
            logits = torch.full((heads,), lowest, dtype=torch.float32, device=self._device)
            own = layer.core_attention.max_logits
            if own is not None:
                logits[rank * local : (rank + 1) * local] = own
            rows.append(logits)
        self.forget()
        if not rows:
            return []
        joined = torch.cat(rows)
        for group in (self.groups.dp_cp, self.groups.tp):
            torch_collectives.all_reduce(joined, group, dist.ReduceOp.MAX)
        return list(joined.split([len(row) for row in rows]))

    def _over_stages(self, measured: Sequence[Tensor]) -> float:
        lowest = torch.full((1,), torch.finfo(torch.float32).min, device=self._device)
        largest = torch.cat([*measured, lowest]).amax(0, keepdim=True)
        return float(torch_collectives.all_reduce(largest, self.groups.pp, dist.ReduceOp.MAX))


def factors_of_range(rows: Tensor, begin: int, end: int, num_elements: int) -> Tensor:
    """Return the factor on each of the elements [begin, end) of a flattened parameter.

    Args:
        rows: [r], the factor on each row of the parameter.
        num_elements: number of elements of the parameter.
    """
    width = num_elements // len(rows)
    first, last = begin // width, -(-end // width)
    spread = rows[first:last].repeat_interleave(width)
    return spread[begin - first * width : end - first * width]
