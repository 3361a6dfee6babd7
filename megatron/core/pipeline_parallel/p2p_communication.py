"""Move activations and gradients between neighbouring pipeline stages.

Every ordered pair of ranks has its own channel. With a backend that has message tags (gloo), all
channels use the pipeline group and each message has its own tag, so that no message waits for
another. With a backend that matches messages by order only (NCCL), each channel has its own
two-rank process group, and so its own communicator and stream: sends and receives of both
directions on one in-order stream would wait for each other.

Sends and receives never block; `Work.wait` returns the tensors. A tensor that is being sent must
not be changed or freed before `Work.wait`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from megatron.core.foundation import device
from megatron.core.foundation.errors import TopologyError
from megatron.core.foundation.flight_recorder import PROGRESS
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.step_handshake import (
    StepHandshake,
    disagreement,
    encode,
    lost_neighbour,
)
from megatron.core.topology.group import Group, keep_for_group
from megatron.core.transport import torch_collectives
from megatron.core.transport.work import Handle, Steps, Work

Shape = tuple[int, ...]
_Shapes = Sequence[Sequence[int]] | Sequence[int] | None
_Tensors = Tensor | Sequence[Tensor | None] | None

MAX_DIMS = 7
"""Largest number of dimensions of a tensor whose shape is sent (variable sequence lengths)."""


@dataclass
class _Shared:
    """State that all communicators of one pipeline group share.

    Attributes:
        channels: (source, target) -> process group of the channel; None with tags.
        agreed: encoded settings of the last step that all ranks compared; unused with tags.
    """

    channels: dict[tuple[int, int], Any] | None = None
    agreed: tuple[int, ...] = ()


class Message(NamedTuple):
    """Identity of a transfer. `boundary` is the stage after the boundary that the data cross."""

    is_gradient: bool
    microbatch: int
    boundary: int

    @property
    def tag(self) -> int:
        """A number that is unique among the messages in flight on a channel.

        Tags are positive 32-bit integers: the numbers repeat after 8192 micro batches.
        """
        number = (self.microbatch * _MAX_STAGES + self.boundary) * 2 + self.is_gradient
        return 1 + number % _MAX_MESSAGES

    def __str__(self) -> str:
        kind = "gradient" if self.is_gradient else "activation"
        return (
            f"the {kind} of micro batch {self.microbatch} between stages {self.boundary - 1} and "
            f"{self.boundary}"
        )


class P2PCommunicator:
    """Channels between this rank and the other ranks of its pipeline.

    Args:
        pp_group: the pipeline group; an object that is not a process group is a single rank.
        config: supplies `pipeline_dtype` (params_dtype if None) and `variable_seq_lengths`.
    Communication:
        with gloo, construction does not communicate. With NCCL, the first communicator of a
        pipeline group creates one process group per channel and sends one element over each.
    """

    def __init__(self, pp_group: Group, config: ModelParallelConfig) -> None:
        self.pp_group = pp_group if isinstance(pp_group, dist.ProcessGroup) else None
        self.config = config
        self.rank = pp_group.rank()
        self.size = pp_group.size()
        self.is_pp_first_stage, self.is_pp_last_stage = self.rank == 0, self.rank == self.size - 1
        self.dtype = config.pipeline_dtype or config.params_dtype
        self.announces_shapes = config.variable_seq_lengths
        self.device = device.current_device()
        self._agreement: StepHandshake | None = None
        self._shared = _Shared()
        if self.pp_group is not None and self.size > 1:
            # NCCL's communicators are made once per group, not once per step.
            self._shared = keep_for_group(self.pp_group, "pipeline channels", self._connect)

    @property
    def has_tags(self) -> bool:
        """Whether the backend matches messages by tag, not only by order."""
        assert self.pp_group is not None
        return self.device.type == "cpu" or "nccl" not in dist.get_backend(self.pp_group)

    def begin_step(self, settings: dict[str, object], neighbours: Iterable[int]) -> None:
        """Start to compare the settings of the step between the ranks of the pipeline.

        With NCCL this is a collective, which a rank enters only if its settings have changed since
        its last step: a wait for a message in every step would empty the queue of the device.

        Args:
            settings: names and values; the names are equal on all ranks.
            neighbours: pipeline ranks that this rank exchanges data with.
        Communication:
            see `StepHandshake`; with NCCL one all-gather on the pipeline group.
        Raises:
            TopologyError: settings differ. With tags, `receive` raises it instead, before the
                first data of a rank with other settings.
        """
        if self.size == 1:
            return
        assert self.pp_group is not None
        if self.has_tags:
            self._agreement = StepHandshake(self.pp_group, neighbours, settings, self._name)
            return
        mine = encode(settings).to(self.device)
        if self._shared.agreed == (agreed := tuple(mine.tolist())):
            return
        for rank, theirs in enumerate(torch_collectives.all_gather(mine, self.pp_group)):
            found = disagreement(settings, theirs.tolist(), self._name(self.rank), self._name(rank))
            if found is not None:
                raise found
        self._shared.agreed = agreed

    def end_step(self) -> None:
        """Finish what `begin_step` started."""
        if self._agreement is not None:
            self._agreement.finish()
            self._agreement = None

    def send(self, tensors: Sequence[Tensor], target: int, message: Message) -> Work[list[Tensor]]:
        """Post a send of tensors [...] to pipeline rank `target`."""
        group, peer, tag = self._channel(self.rank, target, target, message)
        self._note("send", self.rank, target, tensors)
        sent: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype != self.dtype:
                raise self._wrong_dtype(tensor, message)
            tensor = tensor.detach().contiguous()
            if self.announces_shapes:
                shape = tensor.shape
                assert len(shape) <= MAX_DIMS, (
                    f"a stage output has {len(shape)} dimensions: {shape}"
                )
                padded = [len(shape), *shape] + [0] * (MAX_DIMS - len(shape))
                sent.append(torch.tensor(padded, dtype=torch.int64, device=self.device))
            sent.append(tensor)
        try:
            works = [group.send([t], peer, tag and tag + i) for i, t in enumerate(sent)]
        except RuntimeError as problem:  # the connection failed earlier
            raise self.lost(target, message, problem) from problem
        return Work(self._until_done(sent, works, target, message))

    def receive(
        self, shapes: Sequence[Shape], source: int, message: Message, *, requires_grad: bool
    ) -> Work[list[Tensor]]:
        """Post a receive from pipeline rank `source`.

        Args:
            shapes: shapes of the tensors. With `variable_seq_lengths` only their number is used:
                the call then waits until the sender has sent the real shapes.
            requires_grad: whether the received tensors are leaves of an autograd graph.
        """
        group, peer, tag = self._channel(source, self.rank, source, message)
        self._note("recv", source, self.rank, ())
        tensors: list[Tensor] = []
        works: list[Any] = []
        try:
            if self._agreement is not None:
                self._agreement.check(source)
            for shape in shapes:
                if self.announces_shapes:
                    announced = torch.empty(MAX_DIMS + 1, dtype=torch.int64, device=self.device)
                    group.recv([announced], peer, tag and tag + 2 * len(works)).wait()
                    num_dims, *numbers = announced.tolist()
                    shape = tuple(numbers[:num_dims])
                    index = tag and tag + 2 * len(works) + 1
                else:
                    index = tag and tag + len(works)
                buffer = torch.empty(shape, dtype=self.dtype, device=self.device)
                works.append(group.recv([buffer], peer, index))
                tensors.append(buffer)
        except RuntimeError as problem:
            raise self.lost(source, message, problem) from problem
        if requires_grad:
            for tensor in tensors:
                tensor.requires_grad_()
        return Work(self._until_done(tensors, works, source, message))

    def _note(self, operation: str, source: int, target: int, tensors: Sequence[Tensor]) -> None:
        """Record a message for the watchdog."""
        number = sum(tensor.numel() for tensor in tensors)
        PROGRESS.begin_op(operation, self.pp_group, number, -1 - source * self.size - target)

    def _until_done(
        self, tensors: list[Tensor], works: Sequence[Handle], peer: int, message: Message
    ) -> Steps[list[Tensor]]:
        try:
            yield works
        except RuntimeError as problem:
            raise self.lost(peer, message, problem) from problem
        return tensors

    # Megatron's blocking calls between neighbours, for code that has its own schedule.

    def recv_forward(self, tensor_shapes: _Shapes, is_first_stage: bool) -> Any:
        """Receive the activations of the previous stage, ready for autograd; None on the first."""
        if is_first_stage:
            return None
        return self._receive_now(tensor_shapes, self.rank - 1, requires_grad=True)

    def recv_backward(self, tensor_shapes: _Shapes, is_last_stage: bool) -> Any:
        """Receive the output gradients of the next stage; None on the last."""
        if is_last_stage:
            return None
        return self._receive_now(tensor_shapes, self.rank + 1, requires_grad=False)

    def send_forward(self, output_tensors: _Tensors, is_last_stage: bool) -> None:
        """Send activations to the next stage; nothing on the last."""
        if not is_last_stage:
            self._send_now(output_tensors, self.rank + 1)

    def send_backward(self, input_tensor_grads: _Tensors, is_first_stage: bool) -> None:
        """Send input gradients to the previous stage; nothing on the first."""
        if not is_first_stage:
            self._send_now(input_tensor_grads, self.rank - 1)

    def send_forward_recv_backward(
        self, output_tensors: _Tensors, tensor_shapes: _Shapes, is_last_stage: bool
    ) -> Any:
        """Send activations to the next stage and receive gradients from it."""
        if is_last_stage:
            return None
        sent = self._post_send(output_tensors, self.rank + 1)
        received = self._receive_now(tensor_shapes, self.rank + 1, requires_grad=False)
        sent.wait()
        return received

    def send_backward_recv_forward(
        self, input_tensor_grads: _Tensors, tensor_shapes: _Shapes, is_first_stage: bool
    ) -> Any:
        """Send gradients to the previous stage and receive activations from it."""
        if is_first_stage:
            return None
        sent = self._post_send(input_tensor_grads, self.rank - 1)
        received = self._receive_now(tensor_shapes, self.rank - 1, requires_grad=True)
        sent.wait()
        return received

    def _post_send(self, tensors: Any, target: int) -> Work[list[Tensor]]:
        many = list(tensors) if isinstance(tensors, (list, tuple)) else [tensors]
        return self.send(many, target, self._blocking_message(target))

    def _send_now(self, tensors: Any, target: int) -> None:
        self._post_send(tensors, target).wait()

    def _receive_now(self, shapes: Any, source: int, *, requires_grad: bool) -> Any:
        is_list = bool(shapes) and not isinstance(shapes[0], int)
        many = list(shapes) if is_list else [tuple(shapes)]
        message = self._blocking_message(source)
        tensors = self.receive(many, source, message, requires_grad=requires_grad).wait()
        return tensors if is_list else tensors[0]

    def _blocking_message(self, peer: int) -> Message:
        # Blocking calls are matched by order, so one tag per channel and direction is enough.
        return Message(False, 0, max(self.rank, peer))

    def _channel(
        self, source: int, target: int, peer: int, message: Message
    ) -> tuple[Any, int, int]:
        """Return the process group of a channel, the peer's rank in it, and the first tag.

        The tag is 0 if the backend matches messages by order only.
        """
        channels = self._shared.channels
        if channels is None:
            return self.pp_group, peer, message.tag * _TAGS_PER_MESSAGE
        return channels[source, target], int(peer == target), 0

    def _connect(self, _group: dist.ProcessGroup) -> _Shared:
        return _Shared(None if self.has_tags else self._create_channel_groups())

    def _create_channel_groups(self) -> dict[tuple[int, int], Any]:
        """Create a two-rank group for each channel of this rank in the ring.

        The first use of a communicator blocks until both ends use it. All ranks therefore create
        the channels in the same order, which prevents a deadlock.

        The groups are made from the store of the pipeline group, not with `dist.new_group`:
        `new_group` names a group after the number of groups that the process has made before, and
        that number differs between stages.
        """
        assert self.pp_group is not None
        store = _get_process_group_store(self.pp_group)
        ring = {(rank, (rank + 1) % self.size) for rank in range(self.size)}
        ring |= {(target, source) for source, target in ring}
        groups = {}
        for source, target in sorted(ring):
            if self.rank in (source, target):
                prefixed = PrefixStore(f"pipeline_channel_{source}_{target}", store)
                group = self._create_pair(prefixed, int(self.rank == target))
                token = torch.zeros(1, device=self.device)
                if self.rank == source:
                    group.send([token], 1, 0).wait()
                else:
                    group.recv([token], 0, 0).wait()
                groups[source, target] = group
        return groups

    def _create_pair(self, store: Any, rank: int) -> Any:
        """Create a group of a sender (rank 0) and a receiver (rank 1) with its own connection."""
        assert self.pp_group is not None
        like = self.pp_group._get_backend(self.device).options
        if "nccl" in dist.get_backend(self.pp_group):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = like._timeout
            group = dist.ProcessGroupNCCL(store, rank, 2, options)
            # No other code has a reference to this group, so it must be shut down here.
            weakref.finalize(self.pp_group, group.shutdown)
            return group
        return dist.ProcessGroupGloo(store, rank, 2, like._timeout)

    def _name(self, rank: int) -> str:
        assert self.pp_group is not None
        return f"pipeline rank {rank} (global rank {dist.get_global_rank(self.pp_group, rank)})"

    def lost(self, peer: int, message: Message, problem: RuntimeError) -> TopologyError:
        """Return the error for a transfer that failed or timed out."""
        explained = None if self._agreement is None else self._agreement.explain()
        if explained is not None:
            return explained
        return lost_neighbour(self.rank, message, self._name(peer), problem)

    def _wrong_dtype(self, tensor: Tensor, message: Message) -> TopologyError:
        return TopologyError(
            f"pipeline rank {self.rank} sends {message} as {tensor.dtype}, but the pipeline "
            f"carries {self.dtype}.",
            rule="all tensors between stages have the pipeline dtype, because the receiver "
            "interprets the bytes with that dtype",
            flags=["pipeline_dtype"],
            fix=f"set config.pipeline_dtype={tensor.dtype}, or cast the stage's output",
        )


_TAGS_PER_MESSAGE = 64  # shape and data of up to 32 tensors
_MAX_STAGES = 1024
_MAX_MESSAGES = 2**24
