"""Run this process as one rank of a run of any size, with fake tensors and without communication.

The training code itself runs. torch's "fake" process group gives this process a rank in a world of
any size, and its collectives return at once; under `FakeTensorMode`, operations compute shapes
only. This module returns plausible values where the host reads a tensor: a router distributes its
tokens evenly, and gradients are finite. On CPUs, expert inputs are padded to whole tiles; the
padding counts as half a tile per expert, its average.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.weak import WeakIdKeyDictionary

from megatron.core import parallel_state
from megatron.core.foundation.errors import TopologyError
from megatron.core.kernels import triton_kernels
from megatron.core.kernels.block_mask import MaskSpec, Tile, tiles
from megatron.core.kernels.grouped_products import ROWS_OF_A_TILE
from megatron.core.kernels.vocab_softmax import row_blocks
from megatron.core.step_context.random_scope import SequenceShard

_SIMPLE = {
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.view.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.select.int,
    torch.ops.aten.mul_.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.segment_reduce.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.amax.default,
    torch.ops.aten.neg.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.permute.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.expand.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.mul.out,
}
"""Operations whose result has the device of their tensors and depends on shapes only. For other
operations, the cache of `FakeTensorMode` is faster."""

_MOVES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
"""Operations of `_SIMPLE` that may read a tensor of another device."""


def _norm(
    x: Tensor,
    _order: float = 2,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor of the shape and dtype of `vector_norm` with these arguments."""
    removed = {d % x.dim() for d in dim} if dim else set(range(x.dim()))
    sizes = [
        1 if d in removed else size for d, size in enumerate(x.shape) if keepdim or d not in removed
    ]
    return torch.empty(sizes, dtype=dtype or x.dtype, device="meta")


def _added(
    total: Tensor, left: Tensor, right: Tensor, *_: object, out: Tensor, **__: object
) -> Tensor:
    """Return total [m, n] in place of total + left [m, t] @ right [t, n], written to total."""
    shape = (left.shape[0], right.shape[1])
    if not (out is total and left.shape[1] == right.shape[0] and total.shape == shape):
        raise RuntimeError(f"{left.shape} @ {right.shape} does not fit {total.shape}")
    return out


_SHAPES: Mapping[Any, Callable[..., Tensor]] = {
    torch.ops.aten.linalg_vector_norm.default: _norm,
    torch.ops.aten.pow_.Scalar: lambda x, _: x,
} | ({torch.ops.aten.addmm.dtype_out: _added} if hasattr(torch.ops.aten.addmm, "dtype_out") else {})
"""Shape functions that replace torch's: torch's take a millisecond each, for hundreds of buffers,
and torch 2.11 has none for the last operation."""


class QuickFakeTensorMode(FakeTensorMode):
    """Calls torch's shape functions directly for the most frequent operations.

    Most operations of a large model's step are views of gradient buffers at different offsets.
    `FakeTensorMode` would search a decomposition and a cached result for each view.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `MemoryTimeline`."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the result [...] of one operation."""
        options = dict(kwargs or {})
        if func.namespace == "c10d":
            with in_kernel_invocation_manager(self):
                return func(*args, **options)
        shape_of = _SHAPES.get(func, func if func in _SIMPLE else None)
        place = getattr(args[0], "fake_device", None) if shape_of else None
        if (
            shape_of is None
            or place is None
            or options.pop("device", place) != place
            or (func not in _MOVES and any(_device_of(x) not in (None, place) for x in args[1:]))
        ):
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        with in_kernel_invocation_manager(self):
            made = shape_of(*args, **options)
        # In-place operations return their argument.
        return made if isinstance(made, FakeTensor) else FakeTensor(self, made, place)


def _device_of(argument: Any) -> torch.device | None:
    """Return the device of a tensor, None for other arguments."""
    return device_of(argument) if isinstance(argument, Tensor) else None


def device_of(tensor: Tensor) -> torch.device:
    """Return the device of a tensor; `FakeTensor.device` would dispatch an operation."""
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


class HostAnswers:
    """Returns plausible values where the host reads fake tensors.

    Args:
        routed_share: share of the (token, expert) pairs that a router chooses.
    """

    def __init__(self, routed_share: float = 0.0) -> None:
        self._routed_share = routed_share
        self._num_assignments: int | None = None
        """Assumed number of entries in the last routing map, until the host reads its counts."""
        self._known: Any = WeakIdKeyDictionary()  # tensor -> argument of `torch.tensor`
        self._addresses: Any = WeakIdKeyDictionary()
        self._numbers = itertools.count(1)

    @contextmanager
    def given(self) -> Iterator[None]:
        """Let fake tensors return values in this block."""
        answers = {
            "tolist": lambda x: self.tolist(x),
            "item": lambda x: self._item(x),
            "__bool__": lambda x: bool(self._item(x)),
            "__int__": lambda x: int(self._item(x)),
            "__float__": lambda x: float(self._item(x)),
            "nonzero": lambda x: self._nonzero(x),
            "data_ptr": lambda x: self._data_ptr(x),
        }
        make, find = torch.tensor, torch.nonzero_static

        def found(x: Tensor, *, size: int, fill_value: int = -1) -> Tensor:
            self._num_assignments = size
            return find(x, size=size, fill_value=fill_value)

        def remembered(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> Tensor:
            made = make(data, *args, **kwargs)
            # If torch had the values, copies of the tensor would have memory.
            made = torch.empty(made.shape, dtype=made.dtype, device=device or made.device)
            self._known[made] = data
            return made

        with ExitStack() as stack:
            for name, answer in answers.items():
                stack.enter_context(mock.patch.object(FakeTensor, name, answer, create=True))
            stack.enter_context(mock.patch.object(torch, "tensor", remembered))
            stack.enter_context(mock.patch.object(torch, "nonzero_static", found))
            yield

    def tolist(self, x: Tensor) -> Any:
        """Return the values [...] at once instead of one `item` per element."""
        if x in self._known:
            return self._known[x]
        if x.is_floating_point() or x.dtype == torch.bool:
            return _filled(x.shape, 1.0)
        count, self._num_assignments = self._num_assignments or 0, None
        return _rows(x.shape, _shares(count, x.shape[-1])) if x.dim() else count

    def _item(self, x: Tensor) -> Any:
        if x in self._known:
            value = self._known[x]
            while isinstance(value, Sequence):
                (value,) = value
            return value
        return 1.0 if x.is_floating_point() else 0

    def _nonzero(self, x: Tensor) -> Tensor:
        rows = 0
        if x.dim() == 2:
            self._num_assignments = rows = round(x.numel() * self._routed_share)
        return torch.empty((rows, x.dim()), dtype=torch.int64, device=x.device)

    def _data_ptr(self, x: Tensor) -> int:
        storage = x.untyped_storage()
        if storage not in self._addresses:
            self._addresses[storage] = next(self._numbers) << 48
        return self._addresses[storage] + x.storage_offset() * x.element_size()


def _filled(shape: Sequence[int], value: float) -> Any:
    if not shape:
        return value
    return [_filled(shape[1:], value) for _ in range(shape[0])]


def _rows(shape: Sequence[int], row: list[int]) -> Any:
    if len(shape) == 1:
        return list(row)
    return [_rows(shape[1:], row) for _ in range(shape[0])]


def _shares(total: int, parts: int) -> list[int]:
    """Return `total` in parts that differ by at most one."""
    return [(i + 1) * total // parts - i * total // parts for i in range(parts)]


def _take_data(parameter: Tensor, converted: Tensor) -> None:
    parameter.data = converted.data


def _answers_of_others(backend: str) -> dict[str, Callable[..., Any]]:
    """Return functions of torch.distributed that return this rank's object for all ranks."""

    def all_gather_object(gathered: list[Any], value: object, **_: object) -> None:
        gathered[:] = [value] * len(gathered)

    def gather_object(value: object, gathered: list[Any] | None = None, **_: object) -> None:
        if gathered is not None:
            gathered[:] = [value] * len(gathered)

    # Other backends than gloo are assumed to have NCCL's collectives.
    named = {"get_backend": lambda group=None: backend} if backend == "gloo" else {}
    return named | {
        "all_gather_object": all_gather_object,
        "gather_object": gather_object,
        "broadcast_object_list": lambda *_, **__: None,
    }


def _largest_tile(
    queries: SequenceShard, keys: SequenceShard, mask: MaskSpec, max_rows: int, max_keys: int
) -> Iterator[Tile]:
    """Yield the largest tile of attention only: each tile frees its memory before the next."""
    find = _found_tile if mask.document_ids is None else _found_tile.__wrapped__
    largest = find(queries, keys, mask, max_rows, max_keys)
    if largest is not None:
        yield largest


@functools.lru_cache
def _found_tile(*args: Any) -> Tile | None:
    """Return the largest tile of `tiles(*args)`; it is equal for all layers and micro batches."""
    return max(
        tiles(*args), key=lambda tile: _rows_of(tile.query) * _rows_of(tile.key), default=None
    )


def _first_block(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Yield the first block of rows only; no other block is larger."""
    yield from itertools.islice(row_blocks(rows, columns, device), 1)


def _rows_of(rows: slice) -> int:
    return rows.stop - rows.start


_WITHOUT_VALUES: Sequence[tuple[str, Callable[..., Any]]] = (
    ("megatron.core.parameters.initialization.draw_parameter", lambda *_, **__: None),
    (
        "megatron.core.transformer.add_adapters.refuse_missing_targets",
        lambda *_, **__: None,
    ),
)
"""Functions that only write values or compare ranks -> functions without effect."""

_PARTS: Sequence[tuple[str, Callable[..., Any]]] = (
    ("megatron.core.kernels.blockwise_attention.tiles", _largest_tile),
    ("megatron.core.kernels.vocab_softmax.row_blocks", _first_block),
)
"""Functions that split a tensor into parts -> functions that return the largest part only."""

_MISSING_ROWS = "megatron.core.kernels.grouped_products.missing_rows"


def _rows_that_miss(backend: str) -> int:
    """Return the average number of padding rows of an expert; accelerators pad no tiles."""
    return ROWS_OF_A_TILE // 2 if backend == "gloo" else 0


@contextmanager
def fake_place(rank: int, world_size: int, *, backend: str = "gloo") -> Iterator[None]:
    """Make this process one rank of `world_size` ranks, with real tensors and without peers.

    Args:
        backend: "gloo" or "nccl", which selects the code paths of communication.
    Raises:
        TopologyError: this process is a rank of a real run.
    """
    if dist.is_initialized():
        raise TopologyError(
            "this process is a rank of a run that has started.",
            rule="a fake rank needs a process without a process group",
            fix="plan before torch.distributed.init_process_group, or in a separate process",
        )
    report = sys.excepthook  # torch prefixes each line with the rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            for name, answer in _answers_of_others(backend).items():
                stack.enter_context(mock.patch.object(dist, name, answer))
            yield
    finally:
        if parallel_state.model_parallel_is_initialized():
            parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        sys.excepthook = report


@contextmanager
def fake_rank(
    rank: int,
    world_size: int,
    *,
    backend: str = "gloo",
    routed_share: float = 0.0,
    repeats: bool = False,
) -> Iterator[FakeTensorMode]:
    """Make this process a rank as in `fake_place`, with fake tensors.

    Args:
        rank, world_size, backend: see `fake_place`.
        routed_share: see `HostAnswers`.
        repeats: whether to process all parts of split tensors instead of the largest part only.
    Raises:
        TopologyError: this process is a rank of a real run.
    """
    with fake_place(rank, world_size, backend=backend), ExitStack() as stack:
        stack.enter_context(mock.patch(_MISSING_ROWS, return_value=_rows_that_miss(backend)))
        for function, without_values in (*_WITHOUT_VALUES, *(() if repeats else _PARTS)):
            stack.enter_context(mock.patch(function, without_values))
        # As `Module.to` handles real tensors.
        stack.enter_context(mock.patch.object(torch.utils, "swap_tensors", _take_data))
        if triton_kernels.missing() is None:  # a launch would read addresses; outputs are allocated
            launcher = importlib.import_module("triton.runtime").JITFunction
            stack.enter_context(mock.patch.object(launcher, "run"))
        mode = stack.enter_context(QuickFakeTensorMode())
        stack.enter_context(HostAnswers(routed_share).given())
        yield mode
