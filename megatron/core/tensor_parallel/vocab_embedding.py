"""The input embedding, its rows split over the tensor-parallel ranks.

Shapes: `s` sequence, `b` micro batch, `h` hidden, `v` padded vocabulary, `t` = s*b tokens; a
slash divides by the tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.exact_sum import on_grid
from megatron.core.parameters.param_meta import has_main_grad
from megatron.core.process_groups_config import ProcessGroupCollection, resolve_group
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.parallel_parameters import ParallelLayer
from megatron.core.tensor_parallel.vocab_parallel_softmax import check_token_ids
from megatron.core.topology.group import Group
from megatron.core.utils import divide


class VocabParallelEmbedding(ParallelLayer):
    """Look up token ids in a table; each rank holds v/tp consecutive rows.

    Args:
        num_embeddings: v, padded so that it splits evenly.
        embedding_dim: h.
        init_method: fills the full table.
        reduce_scatter_embeddings: return only this rank's tokens (sequence parallelism).
        config: `unpadded_vocab_size`, if it has one, is the number of ids that are real.
        tp_group, pg_collection: None falls back to the current collection.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: Callable[[Tensor], object],
        reduce_scatter_embeddings: bool = False,
        config: ModelParallelConfig,
        tp_group: Group | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config, tp_group=resolve_group(tp_group, "tp", pg_collection))
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.reduce_scatter_embeddings = reduce_scatter_embeddings
        self.num_valid = getattr(config, "unpadded_vocab_size", None) or num_embeddings
        self.num_embeddings_per_partition = divide(num_embeddings, self.tp_size)
        self.vocab_start_index = self.tp_rank * self.num_embeddings_per_partition
        self.vocab_end_index = self.vocab_start_index + self.num_embeddings_per_partition
        self.weight = self.new_parameter(
            self.num_embeddings_per_partition,
            embedding_dim,
            init_method=init_method,
            split_dim=0,
            is_embedding_or_output=True,
            num_rows=self.num_valid,
        )

    def forward(self, input_: Tensor) -> Tensor:
        """Return the embeddings of `input_`.

        Args:
            input_: ids [b, s], equal on all ranks of the group.
        Returns:
            [b, s, h]; [s/tp, b, h] with `reduce_scatter_embeddings`.
        Communication:
            one all-reduce, or one reduce-scatter forward and all-gather backward. One rank
            contributes each row and the others zeros, so the sum is exact.
        Raises:
            DataError: an id outside the vocabulary, with the same text in every layout.
        """
        check_token_ids(input_, self.num_valid)
        if self.reduce_scatter_embeddings:
            # Looked up in [s, b] order, the result needs no transposing copy.
            input_ = input_.t()
        first_row = self.vocab_start_index
        fuses = self.config.gradient_accumulation_fusion and torch.is_grad_enabled()
        is_exact = self.config.layout_invariant_mode
        if self.tp_size == 1 and not (is_exact or (fuses and has_main_grad(self.weight))):
            return F.embedding(input_, self.weight)
        is_split = self.tp_size > 1
        partial = _LookUp.apply(input_, self.weight, first_row, is_split, fuses, is_exact)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(partial, self.tp_group)
        return reduce_from_tensor_model_parallel_region(partial, self.tp_group)


def exact_rows(ids: Tensor, weight: Tensor) -> Tensor:
    """Look up ids [...] in a table [n, h] of this rank: [..., h]; its gradient is an exact sum."""
    return _LookUp.apply(ids, weight, 0, False, True, True)


class _LookUp(torch.autograd.Function):
    """Rows of the local table; zeros for ids of other ranks.

    Backward adds to the touched rows of the main gradient; no [v, h] tensor is allocated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        first_row: int,
        is_split: bool,
        fuses: bool,
        is_exact: bool,
    ) -> Tensor:
        ctx.weight, ctx.fuses, ctx.is_exact = weight, fuses, is_exact
        if not is_split:
            ctx.save_for_backward(ids, None)
            return F.embedding(ids, weight)
        rows = ids - first_row
        is_elsewhere = (rows < 0) | (rows >= weight.shape[0])
        rows.masked_fill_(is_elsewhere, 0)
        ctx.save_for_backward(rows, is_elsewhere)
        return F.embedding(rows, weight).masked_fill_(is_elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, is_elsewhere = ctx.saved_tensors
        weight = ctx.weight
        if is_elsewhere is not None:
            grad = grad.masked_fill(is_elsewhere.unsqueeze(-1), 0.0)
        if ctx.is_exact:
            return None, _exact_gradient(weight, rows, grad), *[None] * 4
        if not (ctx.fuses and has_main_grad(weight)):
            dense = torch.ops.aten.embedding_dense_backward(grad, rows, weight.shape[0], -1, False)
            return None, dense, *[None] * 4
        main_grad = weight.main_grad
        if weight.main_grad_is_fresh:
            main_grad.zero_()
            weight.main_grad_is_fresh = False
        add_rows(main_grad, rows.reshape(-1), grad.reshape(-1, grad.shape[-1]))
        return (None,) * 6


def _exact_gradient(weight: Any, rows: Tensor, grad: Tensor) -> Tensor | None:
    """Add the gradient [t, h] of each token exactly: to the main gradient, or to a new tensor."""
    has_main = has_main_grad(weight)
    total = weight.main_grad if has_main else grad.new_zeros(weight.shape, dtype=torch.float64)
    if has_main and weight.main_grad_is_fresh:
        total.zero_()
        weight.main_grad_is_fresh = False
    add_rows(total, rows.reshape(-1), on_grid(grad.reshape(-1, grad.shape[-1])))
    return None if has_main else total


def index_add(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [t, h] to rows [t] of table [v, h], one after the other."""
    table.index_add_(0, rows, values)


def sorted_index_put(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [t, h] to rows [t] of table [v, h], sorted by row.

    `index_add_` uses atomics on GPUs, so its order changes from run to run.
    """
    table.index_put_((rows,), values, accumulate=True)


ROW_SUMS: KernelTable[Callable[[Tensor, Tensor, Tensor], None]] = KernelTable(
    "sums into rows",
    {
        "cpu": (Kernel("index-add", index_add),),
        OTHER_DEVICES: (Kernel("sorted-index-put", sorted_index_put),),
    },
)
"""Functions of (table [v, h], rows [t], values [t, h])."""


def add_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """Add values [t, h] to the given rows [t] of table [v, h], in a fixed order."""
    values = values.to(table.dtype)
    ROW_SUMS.choose(Request.of(table)).kernel.run(table, rows, values)
