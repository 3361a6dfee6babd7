"""Parameters of which each rank keeps its shard only: ZeRO stage 3.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.3, arXiv 1910.02054. A section of the buffer holds the parameters of one unit (a
transformer layer). It is gathered before the unit computes and freed afterwards; `parameter_units`
decides when. The section of a layer is one bucket: its gradients are formed where they are sent
from. Those of a large table are formed in `.grad` and go out in several buckets, one after another
through the same memory.

Ranks of one machine do not copy values to gather them: they map those of the others in place
(`transport.shm.mapped_gather`). Elsewhere a unit's values are gathered into one flat tensor whose
*memory* is freed and allocated again (`transport.shm.page_pool`). In both, views of a weight that
autograd has saved (its transpose, for example) become valid again before backward reads them, and
never keep the memory alive. While a unit is not here its parameters show a NaN without memory of
its own (`initialization.without_memory`): a read by mistake does not crash.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.distributed.bucketed_buffer import Bucket
from megatron.core.distributed.communication import gather_parameters
from megatron.core.distributed.sections import Pass, Section
from megatron.core.distributed.sharded_gradient_buffer import ShardedGradientBuffer
from megatron.core.distributed.sharding_arithmetic import Piece
from megatron.core.errors import ConfigError, MegatronError
from megatron.core.initialization import fill_deferred_weights, without_memory
from megatron.core.offload.file_state_store import reserve_file
from megatron.core.param_meta import accumulate_main_grad
from megatron.core.transport.bucket_transport import has_tags
from megatron.core.transport.object_collectives import raise_on_all_ranks
from megatron.core.transport.shm.mapped_gather import MappedGather, map_gather
from megatron.core.transport.shm.page_pool import PagePool
from megatron.core.transport.shm.shared_buffer import SharedBuffer
from megatron.core.transport.work import Work

_GATHER_TAGS = 1 << 15
"""Added to a bucket's tag: gathers travel beside reductions."""


class ShardedParameterBuffer(ShardedGradientBuffer):
    """This rank's shard of each unit's parameters, gradients and sums.

    During backward `main_grad` of a layer's parameters is a view into the bucket being filled, so
    that weight gradients are computed where they are sent from.
    """

    max_in_flight = 1

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        model: nn.Module,
        offload_path: str | None = None,
        **options: object,
    ) -> None:
        """
        Args:
            parameters: in the order of their units.
            model: asked for initial values of parameters that have no memory yet.
            offload_path: a directory, for a file in which the own shards lie.
        Raises:
            ConfigError: on all ranks, if one of them cannot have the file.
        """
        dtype, device = parameters[0][1].dtype, parameters[0][1].device
        if device.type == "cpu":  # pages of different ranks shall follow one another
            options["granule"] = mmap.PAGESIZE // dtype.itemsize
        super().__init__(parameters, **options)
        self._lender = PagePool(self.device)
        self.shards: list[Tensor]
        """Own values of each bucket; padding is zero."""
        lengths = [end - begin for begin, end in self._ranges]
        self._is_offloaded = offload_path is not None
        if offload_path is None:
            shards, self._value_memory = self._readable_zeros(sum(lengths), dtype)
        else:
            shards = self._zeros_in_file(offload_path, sum(lengths), dtype)
        self.shards = list(shards.split(lengths))
        self._joined = self._join_shards()
        self.sections = [self._section(number) for number in range(len(self.plan.sections))]
        self._section_of = {i: number for number, s in enumerate(self.sections) for i in s.members}
        self._absent: list[Tensor] = [without_memory(p.detach()) for p in self.parameters]
        self._no_gradient: list[Tensor | None] = [
            None
            if self.sections[self._section_of[index]].is_cut
            else without_memory(absent.to(self.grad_dtype))
            for index, absent in enumerate(self._absent)
        ]
        """`main_grad` outside of a backward pass; None lets a gradient go to `.grad`."""
        self._waiting: set[int] = set()
        """Parameters that a backward pass is done with, but for gradients that wait."""
        for section in self.sections:
            self._shard(section, model)
        for parameter, place in zip(self.parameters, self._no_gradient, strict=True):
            _show_gradient(parameter, place)

    def _zeros_in_file(self, directory: str, numel: int, dtype: torch.dtype) -> Tensor:
        problem: MegatronError | None = None
        memory = None
        reserve = partial(reserve_file, directory, flag="--param-offload-path")
        try:
            memory = SharedBuffer(numel * dtype.itemsize, self.plan.num_buckets, reserve=reserve)
        except ConfigError as error:
            problem = error
        for group in (self.mesh.shard, self.mesh.replicate):
            if group is not None:
                try:
                    raise_on_all_ranks(problem, group)
                except MegatronError as error:
                    problem = error  # for those on the other axis, too
        if problem is not None:
            raise problem
        assert memory is not None
        self._value_memory = memory
        return memory.tensor(dtype, 0, numel)

    def _collect_values(self) -> None:
        """Nothing: values are gathered unit by unit."""

    def _join_shards(self) -> MappedGather | None:
        """Return the sections as the shards of all ranks show them, where these can be seen."""
        memory = self._value_memory
        group = self.mesh.shard if self.mesh.shard_size > 1 else None
        if memory is None or (group is not None and not has_tags(group)):
            return None
        ends = list(accumulate(shard.nbytes for shard in self.shards))
        ranges = [(e - s.nbytes, s.nbytes) for e, s in zip(ends, self.shards, strict=True)]
        layouts = [[ranges[number] for number in numbers] for numbers in self.plan.sections]
        return map_gather(memory, group, self.shards[0].dtype, layouts)

    def _section(self, number: int) -> Section:
        buckets = [self.buckets[bucket] for bucket in self.plan.sections[number]]
        if self._joined is not None:
            return Section(buckets, self._joined.tensors[number])
        length = buckets[-1].end - buckets[0].begin
        return Section(buckets, self._lender.tensor(length, self.shards[0].dtype))

    @torch.no_grad()
    def _shard(self, section: Section, model: nn.Module) -> None:
        """Keep the own shard of a section's values, and free the rest."""
        fill_deferred_weights(model, [self.parameters[index] for index in section.members])
        for bucket in section.buckets:
            begin, end = self._ranges[bucket.number]
            shard = self.shards[bucket.number]
            for piece in self.plan.pieces(begin, end):
                flat = self.parameters[piece.index].detach().reshape(-1)
                place = shard[piece.offset - begin :][: piece.end - piece.begin]
                place.copy_(flat[piece.begin : piece.end])
        first, last = section.buckets[0].begin, section.buckets[-1].end
        for piece in self.plan.pieces(first, last):
            parameter = self.parameters[piece.index]
            place = section.whole.tensor[piece.offset - first :][: parameter.numel()]
            section.views.append((parameter, place.view(parameter.shape)))
            parameter.data = self._absent[piece.index]

    # Parameters -----------------------------------------------------------------------------

    def section_of(self, index: int) -> int:
        """Return the number of the section in which a parameter lies."""
        return self._section_of[index]

    def start_gather(self, number: int, user: Pass) -> None:
        """Start to collect a section's values, if they are neither here nor on their way.

        They stay until `user` has released them, whatever the other pass does.

        Communication: all-gather of each bucket of the section over `mesh.shard`.
        """
        section = self.sections[number]
        section.users.add(user)
        if section.is_whole or section.arriving:
            return
        with torch.no_grad():
            section.whole.allocate()
            self._read_neighbours_ahead(number)
            if self._joined is not None:
                section.arriving = [self._joined.start()]
                return
            section.arriving = [
                gather_parameters(
                    section.part_of(bucket),
                    self.mesh,
                    tag=self._tag + _GATHER_TAGS + bucket.number,
                    shard=self.shards[bucket.number],
                    slot=self._slot(self._value_memory, bucket.number),
                )
                for bucket in section.buckets
            ]

    def _read_neighbours_ahead(self, number: int) -> None:
        """Let the disk read what is gathered next, in a forward or in a backward pass."""
        if self._is_offloaded and self._value_memory is not None:
            for neighbour in {number - 1, number + 1} & set(range(len(self.sections))):
                for bucket in self.sections[neighbour].buckets:
                    self._value_memory.prefetch(self.shards[bucket.number])

    def _let_go_of_shards(self, buckets: Iterable[Bucket]) -> None:
        """Leave own shards to the file."""
        if self._is_offloaded and self._value_memory is not None:
            for bucket in buckets:
                self._value_memory.page_out(self.shards[bucket.number])

    def gather(self, number: int, user: Pass) -> None:
        """Make a section's parameters whole, until `user` has released them."""
        self.start_gather(number, user)
        section = self.sections[number]
        if section.is_whole:
            return
        self._finish_arrival(section)
        self._let_go_of_shards(section.buckets)
        for parameter, view in section.views:
            parameter.data = view
        section.is_whole = True

    @staticmethod
    def _finish_arrival(section: Section) -> None:
        for work in section.arriving:
            work.wait()
        section.arriving = []

    def release(self, number: int, user: Pass, *, keep: bool = False) -> None:
        """Free a section's values, if `user` has asked for them and was the last one to use them.

        Args:
            keep: leave them here even so, until another one has used and released them.
        """
        section = self.sections[number]
        if user is Pass.BACKWARD:
            self._waiting.difference_update(section.members)
        if user in section.users:
            section.users.remove(user)
            if not section.users and keep:
                # Logits come next, which need more than the layer that backward gathers after them.
                self._lender.trim()
            elif not section.users:
                self._free(section)

    def _free(self, section: Section) -> None:
        if section.arriving:
            self._finish_arrival(section)
        elif not section.is_whole:
            return
        section.is_whole = False
        for index in section.members:
            self.parameters[index].data = self._absent[index]
        section.whole.free()

    def release_all(self) -> None:
        """Free the values of all buckets, whoever has asked for them: no pass is under way."""
        for section in self.sections:
            section.users.clear()
            self._free(section)

    def wait_for_readers(self) -> None:
        """Free the values of all buckets, and wait until no rank reads the shards any more."""
        self.release_all()
        if self._joined is None:
            super().wait_for_readers()
        else:
            self._joined.wait_for_readers()

    def start_gathers(self) -> None:
        """Leave updated shards to their file, if they have one; units are gathered when they
        compute."""
        self._let_go_of_shards(self.buckets)

    def _values_of(self, piece: Piece) -> Tensor:
        """Return a piece of the own shard, in the parameter's shape if that is all of it."""
        buckets = self._buckets_of[piece.index]
        number = next(b.number for b in buckets if b.begin <= piece.offset < b.end)
        begin = piece.offset - self._ranges[number][0]
        values = self.shards[number][begin : begin + piece.end - piece.begin]
        shape = self.parameters[piece.index].shape
        return values.view(shape) if values.numel() == shape.numel() else values

    # Gradients ------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Declare the gradients of the last step void; no memory is written."""
        super().begin_step()
        for parameter, place in zip(self.parameters, self._no_gradient, strict=True):
            _show_gradient(parameter, place)
        self.release_all()

    def prepare_gradients(self, number: int) -> None:
        """Give the parameters of a layer a place for their gradients, if they have none."""
        section = self.sections[number]
        bucket = section.buckets[0]
        if section.is_cut or bucket.number in self._whole:
            return
        memory = self._memory_of(bucket)
        for piece in self._pieces[bucket.number]:
            parameter = self.parameters[piece.index]
            place = memory[piece.offset - bucket.begin :][: parameter.numel()]
            _show_gradient(parameter, place.view(parameter.shape))

    def withhold_gradients(self, number: int) -> None:
        """Let the gradients of a section's parameters go to `.grad`: most of them are formed later,
        and only then there shall be memory for the whole bucket."""
        parameter: Any
        for index in self.sections[number].members:
            parameter = self.parameters[index]
            parameter.main_grad = None

    def gradient_waits(self, index: int) -> None:
        """Free the parameters of a unit when a backward pass has used the last of them."""
        self._waiting.add(index)
        number = self._section_of[index]
        if self._waiting.issuperset(self.sections[number].members):
            self.release(number, Pass.BACKWARD)

    def gradient_arrived(self, index: int, is_final: bool) -> None:
        """Reduce a unit when its last gradient has arrived, and free its parameters."""
        super().gradient_arrived(index, is_final)
        number = self._section_of[index]
        if self.sections[number].is_complete:
            self.release(number, Pass.BACKWARD)

    def _take_gradient(self, index: int, bucket: Bucket) -> None:
        parameter, number = self.parameters[index], self._section_of[index]
        if parameter.grad is not None and not self.sections[number].is_cut:
            self.prepare_gradients(number)
            accumulate_main_grad(parameter, parameter.grad)
            parameter.grad = None

    def _forget_gradient(self, index: int) -> None:
        if all(bucket.is_launched for bucket in self._buckets_of[index]):
            super()._forget_gradient(index)

    def _reduction_of(self, bucket: Bucket) -> Work:
        if self.sections[self._section_of[bucket.members[0]]].is_cut:
            # Not before: a norm is done when backward begins, and its bucket would be in the way.
            for index in bucket.members:
                super()._take_gradient(index, bucket)
                self._forget_gradient(index)
        elif bucket.number in self._whole:
            for index in bucket.members:
                parameter: Any = self.parameters[index]
                if not parameter.main_grad_is_fresh:
                    self._filled[bucket.number].add(index)
                _show_gradient(parameter, self._no_gradient[index])
        return super()._reduction_of(bucket)

    def finish_reductions(self) -> None:
        """Reduce what is left, and wait; no unit stays gathered, as the update will change it."""
        super().finish_reductions()
        self._lender.trim()
        if self._places is not None:
            # The next logits need the memory first.
            self._places.discard()


def _show_gradient(parameter: Any, place: Tensor | None) -> None:
    """Let `main_grad` be `place`, to be overwritten by the first writer."""
    parameter.main_grad = place
    parameter.main_grad_is_fresh = True
