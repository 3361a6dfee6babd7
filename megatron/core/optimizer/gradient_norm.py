"""The norm of the whole model's gradient, which counts every parameter once in any layout.

Squares are summed in fp32 inside blocks of 128 elements that begin at the same elements of a
parameter in every layout, and in fp64 from there on; the sums of all parameters are added with
one rounding (`math.fsum`), so their order does not matter. The result does not depend on pipeline
stages, virtual stages, or on how gradients are sharded over data-parallel ranks; a tensor-parallel
split moves only fp32 rounding inside the blocks.

The same pass is the check for NaN and infinity: all ranks see all sums, so they agree.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.parameter_shard import ParameterShard, ShardSpan
from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.foundation.device import is_host_memory
from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request
from megatron.core.parameters.param_meta import get_param_meta, num_elements_before_padding
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.group import Group
from megatron.core.transport import torch_collectives

SMALLEST_FAST_NORM = 1e-15
"""Below it squares of fp32 elements underflow, so the norm is computed exactly in fp64."""
_EXACT_BLOCKS = 2**11
"""Blocks that are converted to fp64 at a time: 2 MiB."""
_PART = 64
EXACT = "squares in fp64"


def is_counted_on_rank(parameter: Tensor, groups: ProcessGroupCollection) -> bool:
    """Return whether this rank counts its piece of the parameter.

    Copies are not counted: copies of a tied weight on other stages, and copies of a replicated
    parameter on other tensor-parallel ranks.
    """
    meta = get_param_meta(parameter)
    if meta.tied_to is not None or getattr(parameter, "shared", False):
        return False
    if meta.split_dim is not None:
        return True
    return (groups.expt_tp if meta.is_expert else groups.tp).rank() == 0


def without_padding(
    shard: ParameterShard, values: Tensor, groups: ProcessGroupCollection
) -> Tensor:
    """Return the elements of `values` (flat or of the shard's shape) before the padding, [n]."""
    meta = get_param_meta(shard.parameter)
    if meta.num_rows is None:
        return values
    rank = (groups.expt_tp if meta.is_expert else groups.tp).rank()
    end = num_elements_before_padding(shard.parameter, meta, rank)
    return values.reshape(-1)[: max(end - shard.begin, 0)]


@dataclass(frozen=True)
class GradientReport:
    """The sums of squares of the gradient, read before the update."""

    sums_of_squares: list[float]
    """One per counted parameter piece of all model-parallel ranks; zeros for other pieces."""
    bad_shards: list[int] = field(default_factory=list)
    """Local shards whose reduced gradient is not finite."""

    @property
    def is_finite(self) -> bool:
        """Whether every gradient of the model is finite. Equal on all ranks."""
        return all(math.isfinite(value) for value in self.sums_of_squares)


@dataclass(frozen=True)
class DeviceReport:
    """The sum of squares of the gradient on the device, which the host has not read.

    Attributes:
        total: fp64 [], the sum of squares over the whole model; equal on all ranks.
        is_bad: bool [shards], local shards whose reduced gradient is not finite.
    """

    total: Tensor
    is_bad: Tensor


def joint_norm(reports: Sequence[GradientReport], inv_scale: float = 1.0) -> float:
    """Return the norm over several reports, times `inv_scale`, as an fp32 value.

    Rounded to fp32, because the last bits of the fp64 sums may differ between sharded and full
    gradients; they must not change the weights.
    """
    total = math.fsum(value for report in reports for value in report.sums_of_squares)
    return float(torch.tensor(math.sqrt(total) * inv_scale, dtype=torch.float32))


class GradientReader:
    """Reads the gradients of an optimizer's shards."""

    def __init__(
        self,
        spans: Sequence[ShardSpan],
        unbucketed: Sequence[ParameterShard],
        parameters: Sequence[nn.Parameter],
        groups: ProcessGroupCollection,
        shard_groups: tuple[Group, Group],
    ) -> None:
        """
        Args:
            spans: shards in gradient buffers.
            unbucketed: full parameters outside of buffers, whose gradient is in `.grad`.
            parameters: all parameters of this model-parallel rank, in one order on all its
                replicas, whether this rank owns a piece of them or not.
            shard_groups: the ranks that shard dense and expert gradients.
        """
        self.spans, self.unbucketed = list(spans), list(unbucketed)
        self.shards = [shard for span in self.spans for shard in span.shards] + self.unbucketed
        device = parameters[0].device if parameters else torch.device("cpu")
        counted = [is_counted_on_rank(shard.parameter, groups) for shard in self.shards]
        self._counts = torch.tensor(counted, dtype=torch.bool, device=device)
        self._segments = [Segments.of(span) for span in self.spans if span.shards]
        for span in self.spans:
            if span.shards:  # a precondition of `_segment_sums`
                assert min(span.num_blocks) >= 0
                assert sum(span.num_blocks) * BLOCK == span.gradients.numel()
        self.groups, self._device = groups, device
        self._dense = _Part(self.shards, parameters, False, shard_groups[0], groups.mp)
        self._expert = _Part(self.shards, parameters, True, shard_groups[1], groups.tp_ep_pp)
        self._agreed_parts: list[_Part] | None = None

    def _parts(self) -> list[_Part]:
        """Return dense parameters, and experts if any pipeline stage has experts."""
        if self._agreed_parts is None:
            # All model-parallel ranks send the largest number of parameters of any rank.
            lengths = torch.tensor([self._dense.length, self._expert.length], device=self._device)
            torch_collectives.all_reduce(lengths, self.groups.mp, dist.ReduceOp.MAX)
            self._dense.length, self._expert.length = lengths.tolist()
            self._agreed_parts = [self._dense] + [self._expert] * (self._expert.length > 0)
        return self._agreed_parts

    def read(self) -> GradientReport:
        """Read all gradients once.

        Communication: an all-reduce over the ranks that shard gradients and an all-gather over
        the model-parallel ranks, of one fp64 number per parameter.
        """
        report = self._read(exactly=False)
        total = math.fsum(report.sums_of_squares)
        if not SMALLEST_FAST_NORM**2 < total < math.inf:
            # The total is equal on all ranks, so all of them read again.
            report = self._read(exactly=True)
        return report

    @property
    def is_on_host(self) -> bool:
        """Whether the host reads these gradients without waiting for a device."""
        return is_host_memory(self._device)

    def read_on_device(self) -> DeviceReport:
        """Read all gradients once, and leave the sums on their device.

        The host does not wait. Elements whose squares overflow in fp32 (beyond about 1e19) count as
        not finite, because only the host could start a second, exact pass.

        Communication: as in `read`.
        """
        sums, is_bad = self._sums(exactly=False)
        parts = [part.gather(sums).sum() for part in self._parts()]
        return DeviceReport(torch.stack(parts).sum(), is_bad)

    def _read(self, exactly: bool) -> GradientReport:
        sums, is_bad = self._sums(exactly)
        values = [value for part in self._parts() for value in part.gather(sums).tolist()]
        bad = is_bad.nonzero().flatten().tolist() if exactly else []
        return GradientReport(values, bad)

    def _sums(self, exactly: bool) -> tuple[Tensor, Tensor]:
        """Return (sums of squares, whether they are not finite), fp64 and bool [shards]."""
        occupied = (span for span in self.spans if span.shards)
        parts = [
            SPAN_SQUARES.choose(Request.of(span.gradients, (EXACT,) * exactly)).kernel.run(
                span.gradients, segments, exactly
            )
            for span, segments in zip(occupied, self._segments, strict=True)
        ]
        parts += [
            _sum_of_squares(shard.reduced_gradient(), exactly).view(1) for shard in self.unbucketed
        ]
        if not parts:
            sums = torch.zeros(0, dtype=torch.float64, device=self._counts.device)
        else:
            sums = torch.cat([part.to(self._device) for part in parts])
        is_bad = ~sums.isfinite()
        # A copy is not counted, but a NaN in it must be reported.
        return torch.where(self._counts | is_bad, sums, 0.0), is_bad

    def count_zeros(self) -> int:
        """Count the elements of the whole model's gradient that are zero; each counts once."""
        local = torch.zeros(2, dtype=torch.int64, device=self._counts.device)
        for shard, counts in zip(self.shards, self._counts.tolist(), strict=True):
            gradient = shard.reduced_gradient()
            if counts and gradient is not None:
                gradient = without_padding(shard, gradient, self.groups)
                zeros = gradient.numel() - torch.count_nonzero(gradient)
                local[int(get_param_meta(shard.parameter).is_expert)] += zeros.to(self._device)
        total = 0
        for part in self._parts():
            number = local[int(part.is_expert)].clone()
            for group in (part.shard_group, part.across):
                torch_collectives.all_reduce(number, group)
            total += int(number)
        return total


class Segments(NamedTuple):
    """The shards of a span: int64 tensors on the device of its gradients.

    Attributes:
        num_blocks: [shards], with the padding after each shard.
        begins: [parts + 1], the first block of each part of a shard, and the end of the span.
        num_parts: [shards], parts of at most `most_blocks` blocks.
        most_blocks: blocks that one program of a kernel reads.
    """

    num_blocks: Tensor
    begins: Tensor
    num_parts: Tensor
    most_blocks: int

    @staticmethod
    def of(span: ShardSpan) -> Segments:
        """Return the segments of a span."""
        ends = [0, *itertools.accumulate(span.num_blocks)]
        parts = [range(*pair, _PART) for pair in itertools.pairwise(ends)]
        begins = [*itertools.chain(*parts), ends[-1]]
        lists = (span.num_blocks, begins, [len(part) for part in parts])
        tensors = [torch.tensor(x, device=span.gradients.device) for x in lists]
        return Segments(tensors[0], tensors[1], tensors[2], _PART)


class _Part:
    """Dense or expert parameters, whose sums are reduced over different groups."""

    def __init__(
        self,
        shards: Sequence[ParameterShard],
        parameters: Sequence[nn.Parameter],
        is_expert: bool,
        shard_group: Group,
        across: Group,
    ) -> None:
        self.is_expert, self.shard_group, self.across = is_expert, shard_group, across
        mine = [p for p in parameters if get_param_meta(p).is_expert == is_expert]
        self.length = len(mine)
        offset = {id(p): index for index, p in enumerate(mine)}
        chosen = [i for i, shard in enumerate(shards) if id(shard.parameter) in offset]
        device = mine[0].device if mine else None
        offsets = [offset[id(shards[i].parameter)] for i in chosen]
        self._chosen = torch.tensor(chosen, dtype=torch.int64, device=device)
        self._places = torch.tensor(offsets, dtype=torch.int64, device=device)

    def gather(self, sums: Tensor) -> Tensor:
        """Return the sums of squares of all parameters of all model-parallel ranks, fp64 [n]."""
        vector = torch.zeros(self.length, dtype=torch.float64, device=sums.device)
        vector.index_add_(0, self._places, sums[self._chosen])
        torch_collectives.all_reduce(vector, self.shard_group)
        return torch.cat(torch_collectives.all_gather(vector, self.across))


def _sum_of_squares(gradient: Tensor | None, exactly: bool) -> Tensor:
    """Return the sum of squares of any tensor, by the same blocks as in a buffer."""
    if gradient is None:
        return torch.zeros((), dtype=torch.float64)
    flat = gradient.detach().reshape(-1)
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK))
    one_segment = torch.full((1,), padded.numel() // BLOCK, device=flat.device)
    return _segment_sums(_block_squares(padded, exactly), one_segment).sum()


def _segment_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums of consecutive segments of `values` [n]; `lengths` add up to n.

    `unsafe` skips torch's check of the lengths, which would make the host wait for the device.
    """
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)


def _block_squares(flat: Tensor, exactly: bool) -> Tensor:
    """Return the sum of squares of each block of `BLOCK` elements, fp64."""
    blocks = flat.view(-1, BLOCK)
    if not exactly and flat.dtype != torch.float64:
        return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float32).double().square_()
    # No overflow or underflow: 2^-149 and 2^128 squared are fp64 numbers. In parts, because an fp64
    # copy of all gradients would set the peak memory of a step that overflows in fp16.
    parts = blocks.split(_EXACT_BLOCKS)
    norms = [torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in parts]
    return torch.cat(norms).square_()


def _squares_by_blocks(flat: Tensor, segments: Segments, exactly: bool) -> Tensor:
    return _segment_sums(_block_squares(flat, exactly), segments.num_blocks)


_BY_BLOCKS = Kernel("blocks", _squares_by_blocks, frozenset({EXACT}))
SPAN_SQUARES: KernelTable[Callable[[Tensor, Segments, bool], Tensor]] = KernelTable(
    "squares of the gradient",
    {
        "cpu": (_BY_BLOCKS,),
        OTHER_DEVICES: (triton_kernels.entry("squares", "segment_squares"), _BY_BLOCKS),
    },
)
"""Functions that return the sums of squares of the shards of a span, fp64 [shards]."""
