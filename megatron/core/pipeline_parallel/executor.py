"""Run one rank's program on real stages and channels.

`PipelineExecutor.run` is the loop of every schedule. The constructor compiles the program to calls
of bound methods and decides everything that does not depend on data; the loop makes the calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.flight_recorder import PROGRESS, instruction_code
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel.grad_sync import GradSync
from megatron.core.pipeline_parallel.instructions import Op, Placement, Step
from megatron.core.pipeline_parallel.p2p_communication import Message, P2PCommunicator, Shape
from megatron.core.pipeline_parallel.stage import PipelineStage
from megatron.core.step_context.deferred_wgrad import enable_wgrad_deferral
from megatron.core.step_context.overlap import overlap_forward_backward
from megatron.core.transport.work import Work


class PipelineExecutor:
    """All stages of one rank, and the program that drives them.

    Args:
        steps: this rank's program, as made by `lower_rank`.
        placement: rank and chunk of each stage.
        stages: this rank's model chunks, by chunk.
        communicator: channels to the other ranks.
        receive_shapes, send_shapes: by chunk, shapes of the tensors that enter and leave it.
        grad_sync: enables gradient reductions; None if there is no backward.
        param_sync: (chunk) -> None, called for PARAM_GATHER steps, or None.
        trains: whether received activations are leaves of an autograd graph.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        placement: Placement,
        stages: Sequence[PipelineStage],
        communicator: P2PCommunicator,
        *,
        receive_shapes: Sequence[Sequence[Shape]],
        send_shapes: Sequence[Sequence[Shape]],
        grad_sync: GradSync | None = None,
        param_sync: Callable[[int], None] | None = None,
        trains: bool = True,
    ) -> None:
        rank, chunks = communicator.rank, range(placement.num_chunks)
        self.rank = rank
        self.stages = stages
        self.communicator = communicator
        self.receive_shapes = [[torch.Size(shape) for shape in each] for each in receive_shapes]
        self.send_shapes = [[torch.Size(shape) for shape in each] for each in send_shapes]
        self.grad_sync_state = grad_sync
        self.param_sync = param_sync
        self.trains = trains
        self.rng = rng_state()
        self.stage_numbers = [placement.stage(rank, chunk) for chunk in chunks]
        self.previous = [placement.previous(rank, chunk) for chunk in chunks]
        self.next = [placement.next(rank, chunk) for chunk in chunks]
        self.next_here = [n[1] if n is not None and n[0] == rank else None for n in self.next]
        self.previous_here = [
            n[1] if n is not None and n[0] == rank else None for n in self.previous
        ]
        # By chunk, then by micro batch: receives in flight, data to send, sends in flight.
        self.activations_in: list[dict[int, Any]] = [{} for _ in chunks]
        self.gradients_in: list[dict[int, Any]] = [{} for _ in chunks]
        self.outputs: list[dict[int, list[Tensor]]] = [{} for _ in chunks]
        self.input_grads: list[dict[int, list[Tensor]]] = [{} for _ in chunks]
        self.outputs_sent: list[dict[int, Work[list[Tensor]]]] = [{} for _ in chunks]
        self.grads_sent: list[dict[int, Work[list[Tensor]]]] = [{} for _ in chunks]
        do: dict[Op, Callable[[int, int], None]] = {
            Op.FORWARD: self.forward,
            Op.BACKWARD: self.backward,
            Op.INPUT_GRAD: self.input_grad,
            Op.WEIGHT_GRAD: self.weight_grad,
            Op.RECV_ACTIVATION: self.receive_activation,
            Op.RECV_GRADIENT: self.receive_gradient,
            Op.SEND_ACTIVATION: self.send_activation,
            Op.SEND_GRADIENT: self.send_gradient,
            Op.FREE_OUTPUT: self.free_output,
            Op.FREE_GRADIENT: self.free_gradient,
            Op.PARAM_GATHER: self.gather_parameters,
            Op.GRAD_SYNC: self.open_grad_sync,
        }
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            do = {op: _annotated(op, action) for op, action in do.items()}
        self.splits_backward = any(op is Op.WEIGHT_GRAD for op, _, _ in steps)
        rest = iter(steps)
        self.compiled: list[Callable[[], None]] = []
        self.codes: list[int] = []
        for op, microbatch, chunk in rest:
            self.codes.append(instruction_code(op, microbatch, chunk))
            if op is Op.OVERLAP_F_B:
                one, two = next(rest), next(rest)
                self.compiled.append(partial(self.await_inputs, one, two))
                self.codes.append(self.codes[-1])
                halves = (partial(do[op], *which) for op, *which in (one, two))
                self.compiled.append(partial(overlap_forward_backward, *halves))
            else:
                self.compiled.append(partial(do[op], microbatch, chunk))

    def run(self) -> None:
        """Execute the program once."""
        with enable_wgrad_deferral() if self.splits_backward else contextlib.nullcontext():
            for code, step in zip(self.codes, self.compiled, strict=True):
                PROGRESS.set_instruction(code)
                step()
            PROGRESS.set_instruction(0)

    def forward(self, microbatch: int, chunk: int) -> None:
        """Wait for the input of a chunk and run its forward."""
        incoming = self.activations_in[chunk].pop(microbatch, None)
        inputs = None if incoming is None else incoming.wait()
        self.rng.set_microbatch(microbatch)
        outputs = self.stages[chunk].forward(microbatch, inputs)
        if self.next[chunk] is None:
            return
        target = self.next_here[chunk]
        if target is None:
            self.outputs[chunk][microbatch] = outputs
        else:
            leaves = [output.detach().requires_grad_(self.trains) for output in outputs]
            self.activations_in[target][microbatch] = Work.completed(leaves)

    def backward(self, microbatch: int, chunk: int) -> None:
        """Wait for the gradient of a chunk's output and run its backward."""
        self._backpropagate(self.stages[chunk].backward, microbatch, chunk)
        if self.grad_sync_state is not None:
            self.grad_sync_state.after_backward()

    def await_inputs(self, *steps: Step) -> None:
        """Wait for the inputs of two overlapping steps before the first of them starts.

        Otherwise a step that waits for its input would block the other step.
        """
        for op, microbatch, chunk in steps:
            waiting = (self.activations_in if op is Op.FORWARD else self.gradients_in)[chunk]
            if microbatch in waiting:
                waiting[microbatch].wait()

    def input_grad(self, microbatch: int, chunk: int) -> None:
        """Wait for the gradient of a chunk's output and compute its input gradient."""
        self._backpropagate(self.stages[chunk].input_grad, microbatch, chunk)

    def weight_grad(self, microbatch: int, chunk: int) -> None:
        """Compute the weight gradients that `input_grad` deferred; never waits."""
        self.stages[chunk].weight_grad(microbatch)

    def _backpropagate(
        self,
        backward: Callable[[int, list[Tensor] | None], list[Tensor]],
        microbatch: int,
        chunk: int,
    ) -> None:
        incoming = self.gradients_in[chunk].pop(microbatch, None)
        output_grads = None if incoming is None else incoming.wait()
        input_grads = backward(microbatch, output_grads)
        if self.previous[chunk] is None:
            return
        target = self.previous_here[chunk]
        if target is None:
            self.input_grads[chunk][microbatch] = input_grads
        else:
            self.gradients_in[target][microbatch] = Work.completed(input_grads)

    def receive_activation(self, microbatch: int, chunk: int) -> None:
        """Post the receive of a chunk's input."""
        source = self.previous[chunk]
        assert source is not None
        message = Message(False, microbatch, self.stage_numbers[chunk])
        self.activations_in[chunk][microbatch] = self.communicator.receive(
            self.receive_shapes[chunk], source[0], message, requires_grad=self.trains
        )

    def receive_gradient(self, microbatch: int, chunk: int) -> None:
        """Post the receive of the gradient of a chunk's output."""
        source = self.next[chunk]
        assert source is not None
        message = Message(True, microbatch, self.stage_numbers[chunk] + 1)
        self.gradients_in[chunk][microbatch] = self.communicator.receive(
            self.send_shapes[chunk], source[0], message, requires_grad=False
        )

    def send_activation(self, microbatch: int, chunk: int) -> None:
        """Post the send of a chunk's output."""
        target = self.next[chunk]
        assert target is not None
        message = Message(False, microbatch, self.stage_numbers[chunk] + 1)
        outputs = self.outputs[chunk].pop(microbatch)
        if [output.shape for output in outputs] != self.send_shapes[chunk]:
            self._check_shapes(outputs, self.send_shapes[chunk], message)
        self.outputs_sent[chunk][microbatch] = self.communicator.send(outputs, target[0], message)

    def send_gradient(self, microbatch: int, chunk: int) -> None:
        """Post the send of the gradient of a chunk's input."""
        target = self.previous[chunk]
        assert target is not None
        message = Message(True, microbatch, self.stage_numbers[chunk])
        grads = self.input_grads[chunk].pop(microbatch)
        self.grads_sent[chunk][microbatch] = self.communicator.send(grads, target[0], message)

    def free_output(self, microbatch: int, chunk: int) -> None:
        """Wait for the send of an output and release its memory."""
        self.outputs_sent[chunk].pop(microbatch).wait()

    def free_gradient(self, microbatch: int, chunk: int) -> None:
        """Wait for the send of an input gradient and release its memory."""
        self.grads_sent[chunk].pop(microbatch).wait()

    def gather_parameters(self, _microbatch: int, chunk: int) -> None:
        """Start to gather a chunk's parameters before their use."""
        if self.param_sync is not None:
            self.param_sync(chunk)

    def open_grad_sync(self, microbatch: int, chunk: int) -> None:
        """Enable the reduction of a chunk's gradients."""
        if self.grad_sync_state is not None:
            self.grad_sync_state.open(microbatch, chunk)

    def _check_shapes(self, outputs: list[Tensor], shapes: list[Any], message: Message) -> None:
        """Raise for outputs of another shape than the buffers that the receiver has allocated."""
        if self.communicator.announces_shapes and len(outputs) == len(shapes):
            return
        have = ", ".join(str(tuple(output.shape)) for output in outputs)
        want = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ConfigError(
            f"pipeline rank {self.rank} made {have} as {message}, but the pipeline sends {want}.",
            rule="stages exchange [s/cp, b, h], and [s/cp/tp, b, h] with sequence parallelism",
            flags=["--seq-length", "--micro-batch-size", "--sequence-parallel"],
            fix="pass the seq_length and micro_batch_size of the data, or set "
            "config.variable_seq_lengths=True to send every shape with its tensor",
        )


def _annotated(op: Op, action: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Return an action that a profiler shows with its name, micro batch and chunk."""

    def annotated(microbatch: int, chunk: int) -> None:
        with torch.profiler.record_function(f"{op.name.lower()} m{microbatch} c{chunk}"):
            action(microbatch, chunk)

    return annotated
