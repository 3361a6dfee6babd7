"""Metadata of a parameter, and the arithmetic of its shards.

The metadata of a parameter describes its split, the axes over which its gradient is partial, its
tied parameter and its initialisation. Checkpoints, gradient finalisation, clipping and
initialisation read the metadata only; they do not depend on the class of the model.

Shapes: `full` is the tensor of the one-device model, `local` the piece of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.device import prefers_cache_blocks
from megatron.core.parameters.exact_sum import add_on_grid, on_grid

_ATTRIBUTE = "_param_meta"


@dataclass(frozen=True, kw_only=True)
class ParamMeta:
    """How one parameter relates to the parameter of the one-device model."""

    split_dim: int | None = None
    """Dimension that is split over `split_axis`; None means replicated."""
    split_axis: str | None = None
    """Process axis of the split: "tp", or "expt_tp" inside experts."""
    stride: int = 1
    """Number of equal blocks of the full tensor along `split_dim`; each block is split over the
    axis. A gated first MLP layer has 2: every rank holds [gate_shard; up_shard]."""
    init_method: Callable[[Tensor], object] | None = None
    """Fills the *full* tensor in place; None if the owning module resets itself."""
    partial_grad_axes: tuple[str, ...] = ()
    """Axes whose ranks hold partial sums of the gradient after backward, for example ("tp",) for
    norm weights under sequence parallelism, because a rank processes s/tp of the tokens."""
    is_expert: bool = False
    """Belongs to a routed expert: data-parallel reduction uses the expert grid."""
    tied_to: str | None = None
    """Canonical name of the parameter that this one is a copy of (a tied head on another stage)."""
    is_on_all_stages: bool = False
    """Every model chunk of the pipeline holds a copy, used or not; the gradient is the sum over all
    copies. All copies except the original have `tied_to`."""
    is_embedding_or_output: bool = False
    """Input embedding or output head, which some optimizers treat differently."""
    fused_row_sizes: tuple[int, ...] = ()
    """Numbers of rows of the matrices that are stacked in this parameter, in a pattern that repeats
    over the rows of the full tensor: (rows of q, k, v) of one query group. By default the parameter
    is one matrix, or one per block of `stride`."""
    num_rows: int | None = None
    """Number of rows of the one-device model's tensor. Further rows are padding for an even split,
    and no result may depend on them. By default there is no padding."""


_DEFAULT = ParamMeta()


def set_param_meta(parameter: Tensor, meta: ParamMeta) -> None:
    """Attach `meta`, and the attributes that code written for Megatron reads."""
    setattr(parameter, _ATTRIBUTE, meta)
    parameter.tensor_model_parallel = meta.split_dim is not None
    parameter.partition_dim = -1 if meta.split_dim is None else meta.split_dim
    parameter.partition_stride = meta.stride
    parameter.allreduce = not meta.is_expert
    parameter.sequence_parallel = "tp" in meta.partial_grad_axes
    if meta.tied_to is not None and not meta.is_on_all_stages:
        parameter.shared_embedding = True
    if meta.is_embedding_or_output:
        parameter.is_embedding_or_output_parameter = True


def num_elements_before_padding(parameter: Tensor, meta: ParamMeta, axis_rank: int) -> int:
    """Return the number of elements of the flattened local parameter before its padding.

    Args:
        axis_rank: this rank's position on `meta.split_axis`.
    """
    if meta.num_rows is None or not parameter.shape or not parameter.shape[0]:
        return parameter.numel()
    rows = parameter.shape[0]
    first = axis_rank * rows if meta.split_dim == 0 else 0
    return min(max(meta.num_rows - first, 0), rows) * (parameter.numel() // rows)


def get_param_meta(parameter: Tensor) -> ParamMeta:
    """Return the metadata of `parameter`.

    A parameter of a third party's module has no `ParamMeta`; its Megatron attributes
    (`tensor_model_parallel`, `partition_dim`, `partition_stride`, `sequence_parallel`,
    `allreduce`) are read instead. A plain torch parameter is replicated.
    """
    meta = getattr(parameter, _ATTRIBUTE, None)
    if meta is not None:
        # The one attribute that custom modules commonly set after construction.
        if getattr(parameter, "sequence_parallel", False) and not meta.partial_grad_axes:
            return ParamMeta(**{**meta.__dict__, "partial_grad_axes": ("tp",)})
        return meta
    is_split = getattr(parameter, "tensor_model_parallel", False)
    is_expert = not getattr(parameter, "allreduce", True)
    is_sequence_parallel = getattr(parameter, "sequence_parallel", False)
    if not (is_split or is_expert or is_sequence_parallel):
        return _DEFAULT
    return ParamMeta(
        split_dim=getattr(parameter, "partition_dim", 0) if is_split else None,
        split_axis=("expt_tp" if is_expert else "tp") if is_split else None,
        stride=getattr(parameter, "partition_stride", 1),
        partial_grad_axes=("tp",) if is_sequence_parallel else (),
        is_expert=is_expert,
    )


def full_shape(local_shape: Sequence[int], meta: ParamMeta, axis_size: int) -> tuple[int, ...]:
    """Return the shape of the one-device tensor whose shards have `local_shape`."""
    shape = list(local_shape)
    if meta.split_dim is not None:
        shape[meta.split_dim] *= axis_size
    return tuple(shape)


def local_ranges(
    full_length: int, stride: int, axis_rank: int, axis_size: int
) -> list[tuple[int, int]]:
    """Return the [begin, end) ranges of the split dimension that one rank owns, in local order.

    One range per block of `stride`; `full_length` must be divisible by stride * axis_size.
    """
    assert full_length % (stride * axis_size) == 0, (full_length, stride, axis_size)
    block, piece = full_length // stride, full_length // (stride * axis_size)
    begins = [i * block + axis_rank * piece for i in range(stride)]
    return [(begin, begin + piece) for begin in begins]


def shard_of(full: Tensor, meta: ParamMeta, axis_rank: int, axis_size: int) -> Tensor:
    """Return the shard [.., n/tp, ..] of one rank of the full tensor [.., n, ..].

    The shard is a view of `full` unless it has several ranges.
    """
    if meta.split_dim is None or axis_size == 1:
        return full
    dim = meta.split_dim
    ranges = local_ranges(full.shape[dim], meta.stride, axis_rank, axis_size)
    pieces = [full.narrow(dim, begin, end - begin) for begin, end in ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def unshard(shards: Sequence[Tensor], meta: ParamMeta) -> Tensor:
    """Join the pieces [.., n/tp, ..] of all ranks, in rank order, to [.., n, ..]."""
    if meta.split_dim is None or len(shards) == 1:
        return shards[0]
    blocks = [shard.chunk(meta.stride, meta.split_dim) for shard in shards]
    return torch.cat([b[i] for i in range(meta.stride) for b in blocks], meta.split_dim)


def as_one_tensor(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the view [l, ...] of l tensors [...] at equal distances in one storage, else None."""
    first, begin = tensors[0], tensors[0].storage_offset()
    step = tensors[1].storage_offset() - begin if len(tensors) > 1 else first.numel()
    layouts = {
        (x.untyped_storage()._cdata, x.storage_offset() - number * step, x.shape, x.stride())
        for number, x in enumerate(tensors)
    }
    if len(layouts) > 1 or step < first.numel():
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()), begin)


# Main gradients -----------------------------------------------------------------------------
#
# A data-parallel wrapper gives each parameter `main_grad`, a view into its gradient buffer, and
# sets `main_grad_is_fresh` at the start of a step. The first writer of a step overwrites, so the
# buffer needs no zeroing pass; later writers add. A fused backward that has written here returns
# None as the weight's gradient.


MIXED_SUM_ELEMENTS = 2**20
"""On the CPU a sum of two dtypes converts one operand to a temporary tensor. In pieces of this size
the temporary fits in the cache; a whole embedding would take five times as long."""


def has_main_grad(parameter: Tensor) -> bool:
    """Return whether a data-parallel wrapper has given `parameter` a main gradient."""
    return getattr(parameter, "main_grad", None) is not None


def accumulate_main_grad(parameter: Tensor, grad: Tensor, scale: float = 1.0) -> None:
    """Add scale * grad (same shape as the parameter, any float dtype) into the main gradient."""
    main_grad = parameter.main_grad
    if main_grad.dtype == torch.float64 and parameter.dtype != torch.float64:
        terms = grad if scale == 1.0 else grad * scale
        add_on_grid(main_grad, terms, is_first=parameter.main_grad_is_fresh)
        parameter.main_grad_is_fresh = False
        return
    if abs(scale) > torch.finfo(torch.result_type(main_grad, grad)).max:
        # `add_` refuses such a factor: an initial fp16 loss scale may be this large.
        grad, scale = grad * scale, 1.0
    if parameter.main_grad_is_fresh:
        if scale == 1.0:
            main_grad.copy_(grad)
        elif main_grad.dtype == grad.dtype:
            torch.mul(grad, scale, out=main_grad)
        else:
            main_grad.copy_(grad).mul_(scale)
        parameter.main_grad_is_fresh = False
    elif main_grad.dtype == grad.dtype or not prefers_cache_blocks(main_grad.device):
        main_grad.add_(grad, alpha=scale)
    else:
        pieces = main_grad.view(-1).split(MIXED_SUM_ELEMENTS)
        for piece, part in zip(pieces, grad.reshape(-1).split(MIXED_SUM_ELEMENTS), strict=True):
            piece.add_(part, alpha=scale)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        ctx.parameter = parameter
        return parameter.to(dtype).expand(shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        total = on_grid(grad.reshape(-1, *ctx.parameter.shape)).sum(0)
        if has_main_grad(ctx.parameter):
            accumulate_main_grad(ctx.parameter, total)
            return None, None, None
        return total, None, None


def in_rows(parameter: Tensor, shape: torch.Size, dtype: torch.dtype | None = None) -> Tensor:
    """Expand a parameter [h, ...] to [n, h, ...]; its gradient is the exact sum over copies.

    Args:
        dtype: of the copies and of their gradients; default the parameter's dtype.
    """
    return _Rows.apply(parameter, shape, dtype or parameter.dtype)


def accumulate_main_grads(parameters: Sequence[Tensor], grads: Tensor) -> None:
    """Add grads [l, ...] into l main gradients [...]; launches do not depend on l."""
    totals = [parameter.main_grad for parameter in parameters]
    if totals[0].dtype == torch.float64 and parameters[0].dtype != torch.float64:
        grads = on_grid(grads)
    are_fresh = [parameter.main_grad_is_fresh for parameter in parameters]
    joined = as_one_tensor(totals)
    if joined is not None and len(set(are_fresh)) == 1:
        joined.copy_(grads) if are_fresh[0] else joined.add_(grads)
    else:
        # Sums of lists are one launch only if all dtypes are equal.
        parts = grads.to(totals[0].dtype).unbind()
        for is_fresh, write in ((True, torch._foreach_copy_), (False, torch._foreach_add_)):
            if chosen := [index for index, fresh in enumerate(are_fresh) if fresh == is_fresh]:
                write([totals[i] for i in chosen], [parts[i] for i in chosen])
    for parameter in parameters:
        parameter.main_grad_is_fresh = False


def add_gradient(parameter: Tensor, grad: Tensor) -> None:
    """Add a gradient to the main gradient or to `.grad`, as a backward pass does."""
    if has_main_grad(parameter):
        accumulate_main_grad(parameter, grad)
    elif parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad
