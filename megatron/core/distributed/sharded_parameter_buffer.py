"""Parameters of which each rank keeps its shard only: stage 3 of the sharding ladder.

S. Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.3, arXiv 1910.02054. A bucket holds the parameters of one unit (a transformer layer). It
is gathered before the unit computes and freed afterwards; `parameter_units` decides when.

A unit's values live in one flat tensor whose *memory* is given up and taken again
(`offload.lent_memory`). Views of a weight that autograd has saved (its transpose, for example) so
become valid again before backward reads them, and never keep the memory alive. While a unit is
not here its parameters show a NaN without memory of its own (`initialization.without_memory`): a
read by mistake does not crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.agreement import agree
from megatron.core.distributed.bucketed_buffer import Bucket
from megatron.core.distributed.communication import Transfer, gather_parameters
from megatron.core.distributed.sharded_gradient_buffer import ShardedGradientBuffer
from megatron.core.distributed.sharding_arithmetic import Piece
from megatron.core.errors import ConfigError, MegatronError
from megatron.core.initialization import fill_deferred_weights, without_memory
from megatron.core.offload.file_columns import reserve_file
from megatron.core.offload.lent_memory import LentTensor, MemoryLender
from megatron.core.param_meta import accumulate_main_grad
from megatron.core.peer_memory import ReadableMemory

_GATHER_TAGS = 1 << 15
"""Added to a bucket's tag: gathers travel beside reductions."""


class Pass(Enum):
    """Who computes with a bucket. One of each may be under way in a model chunk, taking turns."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """With the forward passes inside it that recompute activations."""


class ShardedParameterBuffer(ShardedGradientBuffer):
    """This rank's shard of each unit's parameters, gradients and sums.

    During backward `main_grad` of a unit's parameters is a view into the bucket being filled, so
    that weight gradients are computed where they are sent from.
    """

    max_in_flight = 1

    def __init__(
        self,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        model: nn.Module,
        offload_path: str | None = None,
        **options: Any,
    ) -> None:
        """
        Args:
            parameters: in the order of their units.
            model: asked for initial values of parameters that have no memory yet.
            offload_path: a directory, for a file in which the own shards lie.
        Raises:
            ConfigError: on all ranks, if one of them cannot have the file.
        """
        super().__init__(parameters, **options)
        self._lender = MemoryLender(self.device)
        self.shards: list[Tensor]
        """Own values of each bucket; padding is zero."""
        self._wholes: list[LentTensor] = []
        """[n] of each bucket; without memory except from `start_gather` to the last `release`."""
        self._views: list[list[tuple[nn.Parameter, Tensor]]] = []
        """Parameters of each bucket and their places in it."""
        self._absent: list[Tensor] = [without_memory(p.detach()) for p in self.parameters]
        self._no_gradient: list[Tensor] = [
            without_memory(absent.to(self.grad_dtype)) for absent in self._absent
        ]
        self._is_whole = [False] * len(self.buckets)
        self._users: list[set[Pass]] = [set() for _ in self.buckets]
        """Passes that have asked for a bucket and have not released it."""
        self._waiting: set[int] = set()
        """Parameters that a backward pass is done with, but for gradients that wait."""
        self._arriving: dict[int, Transfer] = {}
        lengths = [end - begin for begin, end in self._ranges]
        dtype = self.parameters[0].dtype
        self._is_offloaded = offload_path is not None
        if offload_path is None:
            shards, self._value_memory = self._readable_zeros(sum(lengths), dtype)
        else:
            shards = self._zeros_in_file(offload_path, sum(lengths), dtype)
        self.shards = list(shards.split(lengths))
        for bucket in self.buckets:
            self._shard(bucket, model)
        for parameter, place in zip(self.parameters, self._no_gradient, strict=True):
            _show_gradient(parameter, place)

    def _zeros_in_file(self, directory: str, numel: int, dtype: torch.dtype) -> Tensor:
        problem: MegatronError | None = None
        memory = None
        reserve = partial(reserve_file, directory, flag="--param-offload-path")
        try:
            memory = ReadableMemory(numel * dtype.itemsize, self.plan.num_buckets, reserve=reserve)
        except ConfigError as error:
            problem = error
        for group in (self.mesh.shard, self.mesh.replicate):
            if group is not None:
                try:
                    agree(problem, group)
                except MegatronError as error:
                    problem = error  # for those on the other axis, too
        if problem is not None:
            raise problem
        assert memory is not None
        self._value_memory = memory
        return memory.tensor(dtype, 0, numel)

    def _collect_values(self) -> None:
        """Nothing: values are gathered unit by unit."""

    @torch.no_grad()
    def _shard(self, bucket: Bucket, model: nn.Module) -> None:
        """Keep the own shard of a bucket's values, and free the rest."""
        fill_deferred_weights(model, [self.parameters[index] for index in bucket.members])
        begin, end = self._ranges[bucket.number]
        shard = self.shards[bucket.number]
        for piece in self.plan.pieces(begin, end):
            flat = self.parameters[piece.index].detach().reshape(-1)
            place = shard[piece.offset - begin :][: piece.end - piece.begin]
            place.copy_(flat[piece.begin : piece.end])
        lent = self._lender.tensor(bucket.end - bucket.begin, shard.dtype)
        views = []
        for piece in self._pieces[bucket.number]:
            parameter = self.parameters[piece.index]
            place = lent.tensor[piece.offset - bucket.begin :][: parameter.numel()]
            views.append((parameter, place.view(parameter.shape)))
            parameter.data = self._absent[piece.index]
        self._wholes.append(lent)
        self._views.append(views)

    # Parameters -----------------------------------------------------------------------------

    def bucket_of(self, index: int) -> int:
        """Return the number of the bucket in which a parameter lies."""
        return self._buckets_of[index][0].number

    def start_gather(self, number: int, user: Pass) -> None:
        """Start to collect a bucket's values, if they are neither here nor on their way.

        They stay until `user` has released them, whatever the other pass does.

        Communication: all-gather of the bucket over `mesh.shard`.
        """
        self._users[number].add(user)
        if self._is_whole[number] or number in self._arriving:
            return
        whole = self._wholes[number].tensor
        with torch.no_grad():
            self._wholes[number].fill()
            self._read_neighbours_ahead(number)
            self._arriving[number] = gather_parameters(
                whole,
                self.mesh,
                tag=self._tag + _GATHER_TAGS + number,
                shard=self.shards[number],
                place=self._place(self._value_memory, number),
            )

    def _read_neighbours_ahead(self, number: int) -> None:
        """Let the disk read what is gathered next, in a forward or in a backward pass."""
        if self._is_offloaded and self._value_memory is not None:
            for neighbour in {number - 1, number + 1} & set(range(len(self.buckets))):
                self._value_memory.read_ahead(self.shards[neighbour])

    def _let_go_of_shards(self, numbers: Iterable[int]) -> None:
        """Leave own shards to the file."""
        if self._is_offloaded and self._value_memory is not None:
            for number in numbers:
                self._value_memory.let_go(self.shards[number])

    def gather(self, number: int, user: Pass) -> None:
        """Make a bucket's parameters whole, until `user` has released them."""
        self.start_gather(number, user)
        if self._is_whole[number]:
            return
        self._arriving.pop(number).finish()
        self._let_go_of_shards([number])
        for parameter, view in self._views[number]:
            parameter.data = view
        self._is_whole[number] = True

    def release(self, number: int, user: Pass, *, keep: bool = False) -> None:
        """Free a bucket's values, if `user` has asked for them and was the last one to use them.

        Args:
            keep: leave them here even so, until another one has used and released them.
        """
        users = self._users[number]
        if user is Pass.BACKWARD:
            self._waiting.difference_update(self.buckets[number].members)
        if user in users:
            users.remove(user)
            if not users and keep:
                # Logits come next, which need more than the layer that backward gathers after them.
                self._lender.discard_spare()
            elif not users:
                self._free(number)

    def _free(self, number: int) -> None:
        if number in self._arriving:
            self._arriving.pop(number).finish()
        elif not self._is_whole[number]:
            return
        self._is_whole[number] = False
        for index in self.buckets[number].members:
            self.parameters[index].data = self._absent[index]
        self._wholes[number].empty()

    def release_all(self) -> None:
        """Free the values of all buckets, whoever has asked for them: no pass is under way."""
        for number, users in enumerate(self._users):
            users.clear()
            self._free(number)

    def let_values_change(self) -> None:
        """Free the values of all buckets, and wait until no rank reads the shards any more."""
        self.release_all()
        super().let_values_change()

    def start_gathers(self) -> None:
        """Leave updated shards to their file, if they have one; units are gathered when they
        compute."""
        self._let_go_of_shards(range(len(self.buckets)))

    def _values_of(self, piece: Piece) -> Tensor:
        """Return a piece of the own shard, in the parameter's shape if that is all of it."""
        number = self._buckets_of[piece.index][0].number
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
        """Give the bucket's parameters a place for their gradients, if they have none."""
        if number in self._whole:
            return
        memory, begin = self._memory_of(self.buckets[number]), self.buckets[number].begin
        for piece in self._pieces[number]:
            parameter = self.parameters[piece.index]
            place = memory[piece.offset - begin :][: parameter.numel()]
            _show_gradient(parameter, place.view(parameter.shape))

    def withhold_gradients(self, number: int) -> None:
        """Let the gradients of a bucket's parameters go to `.grad`: most of them are formed later,
        and only then there shall be memory for the whole bucket."""
        parameter: Any
        for index in self.buckets[number].members:
            parameter = self.parameters[index]
            parameter.main_grad = None

    def gradient_waits(self, index: int) -> None:
        """Free the parameters of a unit when a backward pass has used the last of them."""
        self._waiting.add(index)
        for bucket in self._buckets_of[index]:
            if self._waiting.issuperset(bucket.members):
                self.release(bucket.number, Pass.BACKWARD)

    def gradient_arrived(self, index: int, is_final: bool) -> None:
        """Reduce a unit when its last gradient has arrived, and free its parameters."""
        super().gradient_arrived(index, is_final)
        for bucket in self._buckets_of[index]:
            if bucket.num_missing == 0:
                self.release(bucket.number, Pass.BACKWARD)

    def _take_gradient(self, index: int, bucket: Bucket) -> None:
        parameter = self.parameters[index]
        if parameter.grad is not None:
            self.prepare_gradients(bucket.number)
            accumulate_main_grad(parameter, parameter.grad)
            parameter.grad = None

    def _reduction_of(self, bucket: Bucket) -> Transfer:
        if bucket.number in self._whole:
            for index in bucket.members:
                parameter: Any = self.parameters[index]
                if not parameter.main_grad_is_fresh:
                    self._filled[bucket.number].add(index)
                _show_gradient(parameter, self._no_gradient[index])
        return super()._reduction_of(bucket)

    def finish_reductions(self) -> None:
        """Reduce what is left, and wait; no unit stays gathered, as the update will change it."""
        super().finish_reductions()
        self._lender.discard_spare()
        if self._places is not None:
            # The next logits need the memory first.
            self._places.discard()


def _show_gradient(parameter: Any, place: Tensor) -> None:
    """Let `main_grad` be `place`, to be overwritten by the first writer."""
    parameter.main_grad = place
    parameter.main_grad_is_fresh = True
