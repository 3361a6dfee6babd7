"""The output head and its cross entropy in one function: never all logits of a batch exist.

Logits are computed for a chunk of tokens and turned into their own gradient in place. The two
gradient GEMMs read them before the next chunk reuses their memory. All of this is possible before
the loss is reduced: only its scale is missing. So forward computes the input gradient of each token
for a loss weight of one, and the weight gradient for given token weights; backward multiplies.
(Liger Kernel, arXiv 2410.10989, section 3.2, introduced gradients in forward; it needs one common
weight, while here any weights are exact.) The weight gradient then waits for backward, in fp32. If
it is as large as all logits, nothing would be saved: forward computes the losses only, and backward
computes the logits again, with the scale, and adds each chunk's product to the main gradient.

Shapes: `s` sequence, `b` micro batch, `h` hidden, `v` padded vocabulary, `t` = s*b; a slash
divides by the tensor-parallel size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.device import value_on_host
from megatron.core.kernels.registry import OTHER_DEVICES
from megatron.core.kernels.vocab_softmax import arithmetic_dtype
from megatron.core.kernels.weight_gradient import main_grad_addmm
from megatron.core.parameters.param_meta import accumulate_main_grad, has_main_grad
from megatron.core.process_groups_config import resolve_group
from megatron.core.tensor_parallel.vocab_parallel_softmax import (
    Labels,
    VocabShard,
    cross_entropy_gradient,
    cross_entropy_statistics,
)
from megatron.core.topology.group import SINGLE_RANK, Group
from megatron.core.transport import collectives

MAX_CHUNK_BYTES = {"cpu": 64 * 2**20, OTHER_DEVICES: 512 * 2**20}
"""Logits of one chunk of tokens, by device type: enough rows for a GEMM at full speed. Each chunk
also reads and writes the fp32 weight gradient [v/tp, h]: on an H100, 2,000 rows of a vocabulary of
128,256 ids spend 15 % of the products' time on it, 256 rows spend more than the products."""


@dataclass(frozen=True)
class _Head:
    """Values that are the same for all chunks of one call."""

    weight: Tensor
    shard: VocabShard
    label_smoothing: float


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    label_smoothing: float = 0.0,
    tp_group: Group | None = None,
    num_valid: int | None = None,
    sequence_parallel: bool = False,
    token_weights: Tensor | None = None,
    recomputes_logits: bool = False,
    fuses_main_grad: bool = True,
) -> Tensor:
    """Return the loss of every token: cross entropy of hidden @ weight.T.

    The same numbers as `vocab_parallel_cross_entropy(F.linear(hidden, weight), target)` up to
    rounding.

    Args:
        hidden: [s, b, h], equal on all ranks; with `sequence_parallel` [s/tp, b, h].
        weight: [v/tp, h].
        target: labels [s, b]; `IGNORED_LABEL` (-100) gives a loss of zero.
        label_smoothing, num_valid: as in `vocab_parallel_cross_entropy`.
        tp_group: None is the tensor-parallel group of the current collection.
        token_weights: [s, b], up to a common factor the weights that the caller will apply to the
            losses (the loss mask); None means equal weights. They are not applied here, they save
            work: if the caller applies others, backward recomputes the weight gradient.
        recomputes_logits: compute the logits twice, and no gradient in forward. For schedules that
            keep several micro batches between forward and backward: each micro batch would hold a
            weight gradient [v/tp, h]. Without the argument, this happens if that gradient would
            take as much memory as the logits.
        fuses_main_grad: write the weight gradient into `weight.main_grad` where it exists.
    Returns:
        fp32 [s, b], the same bits on all ranks.
    Communication:
        an all-gather of three numbers per token and chunk; an all-reduce of the input gradient,
        in forward (in backward if the logits are recomputed). With `sequence_parallel` an
        all-gather of the input and a reduce-scatter of its gradient.
    """
    group = resolve_group(tp_group, "tp")
    shard = VocabShard.of(weight.shape[0], num_valid, group)
    is_scattered = sequence_parallel and group.size() > 1
    # Autograd is always off inside forward(), so test it here.
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    recomputes_logits |= weight.requires_grad and not _saves_memory(hidden, weight, target.numel())
    return _LinearCrossEntropy.apply(
        hidden,
        weight,
        target,
        token_weights,
        shard,
        float(label_smoothing),
        is_scattered,
        needs_grad and not recomputes_logits,
        fuses_main_grad,
    )


class LinearCrossEntropy(nn.Module):
    """`linear_cross_entropy` as a module, so that wrappers find the reader of the weight."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Call `linear_cross_entropy`."""
        return linear_cross_entropy(*args, **kwargs)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target: Tensor,
        token_weights: Tensor | None,
        shard: VocabShard,
        label_smoothing: float,
        is_scattered: bool,
        computes_gradients: bool,
        fuses_main_grad: bool,
    ) -> Tensor:
        labels = Labels.locate(target, shard)
        ctx.head = _Head(weight, shard, label_smoothing)
        ctx.is_scattered, ctx.fuses_main_grad = is_scattered, fuses_main_grad
        ctx.token_weights = None
        if computes_gradients:
            ctx.token_weights = _row_weights(token_weights, labels, arithmetic_dtype(hidden))
        full = collectives.all_gather(hidden, shard.group) if is_scattered else hidden
        x = full.reshape(-1, full.shape[-1])
        needs_hidden, needs_weight = (n and computes_gradients for n in ctx.needs_input_grad[:2])
        loss, grad_x, grad_weight = _pass_over_chunks(
            ctx.head, x, labels, ctx.token_weights, None, needs_hidden, needs_weight
        )
        if grad_x is not None:
            grad_x = _sum_over_ranks(grad_x.view(full.shape), shard.group, is_scattered)
        ctx.grad_x, ctx.grad_weight, ctx.computes_gradients = (
            grad_x,
            grad_weight,
            computes_gradients,
        )
        ctx.save_for_backward(hidden, target)
        return loss.view(target.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, target = ctx.saved_tensors
        shard: VocabShard = ctx.head.shard
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        labels = Labels.locate(target, shard)
        scale = grad.reshape(-1).masked_fill(labels.is_ignored, 0.0)  # [t]
        grad_x, grad_weight, factor = ctx.grad_x, ctx.grad_weight, 1.0
        ctx.grad_x = ctx.grad_weight = None
        if grad_weight is not None:
            common = _common_factor(scale, ctx.token_weights)
            grad_weight, factor = (None, 1.0) if common is None else (grad_weight, common)

        if grad_x is not None:
            grad_x = _scale_rows(grad_x, scale, shard.group if ctx.is_scattered else SINGLE_RANK)
        forms_x = needs_hidden and grad_x is None
        forms_weight = needs_weight and grad_weight is None
        if forms_x or forms_weight:
            full = collectives.all_gather(hidden, shard.group) if ctx.is_scattered else hidden
            x = full.reshape(-1, full.shape[-1])
            takes_sums = ctx.fuses_main_grad and _takes_sums(ctx.head.weight)
            _, new_x, new_weight = _pass_over_chunks(
                ctx.head, x, labels, None, scale, forms_x, forms_weight, takes_sums
            )
            if new_x is not None:
                grad_x = _sum_over_ranks(new_x.view(full.shape), shard.group, ctx.is_scattered)
            grad_weight = grad_weight if new_weight is None else new_weight
        if grad_weight is not None:
            grad_weight = _deliver(ctx.head.weight, grad_weight, factor, ctx.fuses_main_grad)
        return grad_x, grad_weight, None, None, None, None, None, None, None


def _row_weights(token_weights: Tensor | None, labels: Labels, dtype: torch.dtype) -> Tensor | None:
    """Return the weights as [t], zero for ignored labels; None if all are one."""
    if token_weights is not None:
        return token_weights.reshape(-1).to(dtype).masked_fill(labels.is_ignored, 0.0)
    if value_on_host(labels.is_ignored.any()) is False:
        return None
    return (~labels.is_ignored).to(dtype)


def _pass_over_chunks(
    head: _Head,
    x: Tensor,
    labels: Labels,
    token_weights: Tensor | None,
    scale: Tensor | None,
    needs_x: bool,
    needs_weight: bool,
    fills_main_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute losses and gradients, chunk by chunk.

    Args:
        x: [t, h].
        token_weights: weights [t] in the weight gradient only; None for ones.
        scale: gradient [t] of each loss, in both gradients; None for ones.
        fills_main_grad: add the weight gradient to `head.weight.main_grad`.
    Returns:
        losses [t]; input gradient [t, h] (partial over the ranks); weight gradient [v/tp, h], in
        the weight's dtype, or fp32 where chunks of half precision were added; None if it is in the
        main gradient.
    """
    weight, shard, smoothing = head.weight, head.shard, head.label_smoothing
    tokens, step = x.shape[0], _chunk_rows(x, x.shape[0], weight.shape[0])
    memory = torch.empty((step, weight.shape[0]), dtype=x.dtype, device=x.device)
    loss = torch.empty(tokens, dtype=arithmetic_dtype(x), device=x.device)
    grad_x = torch.empty_like(x) if needs_x else None
    grad_weight: Tensor | None = None
    total: Any = weight if fills_main_grad else None
    if needs_weight and total is None and step < tokens:
        grad_weight = torch.empty(weight.shape, dtype=arithmetic_dtype(x), device=x.device)
        total = _Sum(grad_weight)
    for begin in range(0, tokens, step):
        rows = slice(begin, min(begin + step, tokens))
        chunk, logits = x[rows], memory[: rows.stop - begin]
        torch.mm(chunk, weight.t(), out=logits)
        statistics = cross_entropy_statistics(
            logits, labels[rows], shard, smoothing, in_place=needs_x or needs_weight
        )
        loss[rows] = statistics.loss
        if not (needs_x or needs_weight):
            continue
        part_scale = None if scale is None else scale[rows]
        gradient = cross_entropy_gradient(
            logits, logits, statistics, labels[rows], shard, smoothing, part_scale
        )
        if grad_x is not None:
            torch.mm(gradient, weight, out=grad_x[rows])
        if needs_weight:
            if token_weights is not None:
                chunk = (chunk * token_weights[rows].unsqueeze(-1)).to(chunk.dtype)
            if total is None:
                grad_weight = gradient.t() @ chunk
            else:
                main_grad_addmm(total, gradient.t(), chunk)
    return loss, grad_x, grad_weight


def _chunk_rows(x: Tensor, tokens: int, columns: int) -> int:
    """Return the rows per chunk: as equal as possible, at most `MAX_CHUNK_BYTES` of logits."""
    budget = MAX_CHUNK_BYTES.get(x.device.type, MAX_CHUNK_BYTES[OTHER_DEVICES])
    most = max(1, budget // (columns * x.element_size()))
    num_chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // num_chunks))


def _saves_memory(hidden: Tensor, weight: Tensor, tokens: int) -> bool:
    """Return whether a sum of weight gradients [v/tp, h] is smaller than the logits [t, v/tp].

    One chunk has no sum, and is fast.
    """
    sum_row = weight.shape[1] * arithmetic_dtype(hidden).itemsize
    is_one_chunk = _chunk_rows(hidden, tokens, weight.shape[0]) >= tokens
    return is_one_chunk or sum_row < tokens * hidden.element_size()


@dataclass
class _Sum:
    """A sum [v/tp, h] with the attributes of a parameter that `main_grad_addmm` uses."""

    main_grad: Tensor
    main_grad_is_fresh: bool = True


def _takes_sums(weight: Any) -> bool:
    """Return whether the main gradient [v/tp, h] is as precise as the sum of chunks would be."""
    return has_main_grad(weight) and bool(weight.main_grad.dtype == arithmetic_dtype(weight))


def _sum_over_ranks(grad: Tensor, group: Group, is_scattered: bool) -> Tensor:
    """Add the partial input gradients [s, b, h] of the ranks; keep own rows if scattered."""
    if group.size() == 1:
        return grad
    if is_scattered:
        return collectives.reduce_scatter(grad, group)
    return collectives.all_reduce(grad, group)


def _scale_rows(grad: Tensor, scale: Tensor, scattered_group: Group) -> Tensor:
    """Multiply each token's gradient [s, b, h] (or own rows of it) by its scale [t], in place."""
    scale = scale.chunk(scattered_group.size())[scattered_group.rank()]
    rows = grad.view(-1, grad.shape[-1])
    if rows.dtype == scale.dtype:
        return rows.mul_(scale.unsqueeze(-1)).view(grad.shape)
    return (rows * scale.unsqueeze(-1)).to(rows.dtype).view(grad.shape)


def _common_factor(scale: Tensor, token_weights: Tensor | None) -> float | None:
    """Return c with scale = c * token_weights up to rounding, or None if there is no such c.

    Reads one number back from the device.
    """
    if scale.numel() == 0:
        return 1.0
    if token_weights is None:
        token_weights = torch.ones_like(scale)
    largest = token_weights.abs().argmax()
    factor = scale.take(largest) / token_weights.take(largest)  # an index would be read back too
    deviation = (scale - factor * token_weights).abs().max()
    limit = 4 * torch.finfo(scale.dtype).eps * scale.abs().max()
    factor = torch.where(deviation <= limit, factor, torch.nan)
    found = float(factor)
    return None if found != found else found


def _deliver(weight: Tensor, grad: Tensor, factor: float, fuses: bool) -> Tensor | None:
    """Add factor * grad to the main gradient (and return None), or return it."""
    if fuses and has_main_grad(weight):
        accumulate_main_grad(weight, grad, scale=factor)
        return None
    return grad.mul_(factor).to(weight.dtype)
