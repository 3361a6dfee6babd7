"""The indexer of sparse attention: it scores keys by cheap queries, one key head and weights.

(The "lightning indexer" of DeepSeek-V3.2; the paper is named in `kernels.sparse_attention`.) The
keys of a window may be joined to one, with a softmax weight for each channel (GLM-5.3). Without
latent attention the queries are computed from the hidden states, and each head of the indexer
chooses for its group of heads of attention, without weights (MiniMax M3).

It is replicated over tensor-parallel ranks. Under sequence parallelism a rank projects its own
tokens, and the results are gathered; without it all ranks compute the same. No gradient flows
from its inputs back into the model.

Legend: s sequence, b micro batch, h hidden, c width of the queries' latent, j heads, i width of a
head, r channels that rotate.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation import device
from megatron.core.kernels.windows import Windows, softmax_sum
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.parallel_parameters import device_of_parameters
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.query_scale import QueryScale
from megatron.core.transformer.replicated_linear import ReplicatedLinear
from megatron.core.transformer.rotary import rotate
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import torch_collectives


class PoolGate(ReplicatedLinear):
    """Project tokens to logits of their keys in a window; each place in a window has a bias."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any
    ) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.position_bias = self.new_parameter(
            config.dsa_indexer_block_size, output_size, init_method=None, split_dim=None
        )


@dataclass
class IndexerSubmodules:
    """Parts of an indexer."""

    linear_wq_b: ModuleSpec | type | Any = None
    linear_wk: ModuleSpec | type | Any = None
    k_norm: ModuleSpec | type | Any = None
    linear_weights_proj: ModuleSpec | type | Any = None
    q_norm: ModuleSpec | type | Any = None
    input_norm: ModuleSpec | type | Any = None
    """Norm of the hidden states before `linear_wq_b`, if there is no latent of queries."""


class Indexer(MegatronModule):
    """Projections to the queries, the key and the weights that score keys.

    Without an indexer loss its parameters are frozen.
    """

    pg_collection: ProcessGroupCollection

    def __init__(
        self,
        config: TransformerConfig,
        submodules: IndexerSubmodules,
        pg_collection: ProcessGroupCollection,
    ) -> None:
        super().__init__(config)
        self.pg_collection = pg_collection
        assert config.dsa_indexer_n_heads and config.dsa_indexer_head_dim
        self.num_heads, self.head_dim = config.dsa_indexer_n_heads, config.dsa_indexer_head_dim

        def linear(spec: object, rows: int, columns: int) -> Any:
            return build_module(
                spec,
                rows,
                columns,
                config=config,
                init_method=config.init_method,
                tp_group=pg_collection.tp,
            )

        width = self.num_heads * self.head_dim
        has_latents = config.multi_latent_attention
        rank = config.q_lora_rank if has_latents else None
        latent = rank or config.hidden_size
        self.linear_wq_b = linear(submodules.linear_wq_b, latent, width)
        self.linear_wk = linear(submodules.linear_wk, config.hidden_size, self.head_dim)
        epsilon = config.dsa_indexer_k_norm_epsilon
        input_norm = submodules.input_norm if rank is None else None
        self.q_norm, self.k_norm, self.input_norm = (
            build_module(
                norm or IdentityOp,
                width,
                config.layernorm_epsilon if epsilon is None else epsilon,
                sequence_parallel=config.sequence_parallel,
                zero_centered_gamma=config.layernorm_zero_centered_gamma,
                dtype=config.params_dtype,
                device=device_of_parameters(config),
            )
            for norm, width in (
                (submodules.q_norm, self.head_dim),
                (submodules.k_norm, self.head_dim),
                (input_norm, config.hidden_size),
            )
        )
        self.query_scale: QueryScale | None = None
        if config.scalable_softmax:
            self.query_scale = QueryScale(
                self.num_heads, config=config, tp_group=pg_collection.tp, is_split=False
            )
        self.linear_weights_proj = None
        if has_latents:
            self.linear_weights_proj = linear(
                submodules.linear_weights_proj, config.hidden_size, self.num_heads
            )
        self.pool_gate: PoolGate | None = None
        if has_latents and config.dsa_indexer_block_size > 1:
            self.pool_gate = linear(PoolGate, config.hidden_size, self.head_dim)
        if not config.trains_indexer:
            self.requires_grad_(False)

    def forward(
        self,
        hidden_states: Tensor,
        query_latent: Tensor,
        cos_sin: tuple[Tensor, Tensor] | None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Project, and rotate the first channels of queries and key.

        Args:
            hidden_states: [s, b, h], and query_latent: [s, b, c] ([s/tp, b, ...] under sequence
                parallelism).
            cos_sin: [s, 1 or b, 1, r] each; None in a layer that does not rotate.
            positions: [s, 1 or b], of the tokens of all tensor-parallel ranks, from 0; with
                `scalable_softmax`.
        Returns:
            queries [s, b, j, i], weights [s, b, j] with all factors of the scores, key [s, b, i];
            for keys of windows key and logits [s, b, 2i]. Without latent attention the queries of
            this rank's groups, without weights.
        Communication:
            under sequence parallelism three all-gathers over `tp`; backward keeps the gradient of
            the rank's own tokens, because the computation after the gather is replicated.
        """
        config = self.config
        hidden_states, query_latent = hidden_states.detach(), query_latent.detach()
        query, _ = self.linear_wq_b(self.input_norm(query_latent))
        key, _ = self.linear_wk(hidden_states)
        if config.dsa_indexer_k_norm_fp32:
            key = key.to(torch.promote_types(key.dtype, torch.float32))
        key = self.k_norm(key)
        others = [
            layer(hidden_states)[0]
            for layer in (self.linear_weights_proj, self.pool_gate)
            if layer is not None
        ]
        if config.sequence_parallel:
            query, key, *others = (
                gather_from_sequence_parallel_region(x, False, group=self.pg_collection.tp)
                for x in (query, key, *others)
            )
        how = {
            "interleaved": config.dsa_indexer_rope_interleaved,
            "fuses": config.apply_rope_fusion,
        }
        query = self.q_norm(query.unflatten(-1, (self.num_heads, self.head_dim)))
        if self.query_scale is not None and positions is not None:
            query = self.query_scale(query, positions)
        if cos_sin is not None:
            cos, sin = cos_sin
            query = rotate(query, cos, sin, **how)
            key = rotate(key.unsqueeze(2), cos, sin, **how).squeeze(2)
        if self.linear_weights_proj is None:
            rank, size = self.pg_collection.tp.rank(), self.pg_collection.tp.size()
            own = rank * self.num_heads // size
            return query[:, :, own : own + max(1, self.num_heads // size)], None, key
        weights, *logits = others
        weights = weights * (self.num_heads * self.head_dim) ** -0.5
        return query, weights, torch.cat((key, *logits), -1)

    def pooled(self, keys: Tensor, windows: Windows | None) -> Tensor:
        """Return the keys [w, b, i] of windows of a whole sequence, from keys and logits [s, b, 2i]
        of its tokens; without `pool_gate` the keys."""
        if self.pool_gate is None:
            return keys
        assert windows is not None
        keys, logits = windows.tokens(keys).chunk(2, -1)
        return softmax_sum(keys, logits + self.pool_gate.position_bias.unsqueeze(1))


class IndexerLoss:
    """The loss of one layer's indexer: of the running step on this rank, and of the last step.

    Attributes:
        layer_number: 1-based, in the whole model.
        step_loss: [], the mean over the queries of the last step on all ranks; None before it.
    """

    def __init__(self, layer_number: int) -> None:
        self.layer_number = layer_number
        self.step_loss: Tensor | None = None
        self._sum: Tensor | None = None
        self._count = 0

    def add(self, part: Tensor) -> None:
        """Add this rank's part of the loss of one micro batch, []."""
        part = part.detach().double()
        self._sum = part if self._sum is None else self._sum + part
        self._count += 1

    def packed(self, where: torch.device) -> Tensor:
        """Return sum and number of the parts of the running step, fp64 [2], and reset them."""
        total = torch.zeros((), dtype=torch.float64, device=where)
        if self._sum is not None:
            total = self._sum
        count = torch.full_like(total, self._count)
        self._sum, self._count = None, 0
        return torch.stack((total, count))


class IndexedAttention(nn.Module):
    """Base of attentions with an indexer; `finish_indexer_step` finds them by this class."""

    indexer_loss: IndexerLoss | None
    """None if the indexer is not trained."""


def indexer_losses(model: Sequence[nn.Module]) -> Iterator[IndexerLoss]:
    """Yield the losses of the indexers of model chunks, in order."""
    for chunk in model:
        for module in chunk.modules():
            if isinstance(module, IndexedAttention) and module.indexer_loss is not None:
                yield module.indexer_loss


def finish_indexer_step(model: Sequence[nn.Module], groups: ProcessGroupCollection) -> None:
    """Average the losses of the indexers of this stage over all micro batches of the step.

    Communication: one all-reduce over dp x cp, if the stage has trained indexers.
    """
    losses = list(indexer_losses(model))
    if not losses:
        return
    where = device.current_device()
    packed = torch.stack([loss.packed(where) for loss in losses])
    torch_collectives.all_reduce(packed, groups.dp_cp)
    for loss, (total, count) in zip(losses, packed, strict=True):
        # Each rank of a context-parallel group counts the micro batch, but sums a part of its loss.
        loss.step_loss = total * groups.cp.size() / count.clamp(min=1)
