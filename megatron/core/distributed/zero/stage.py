"""What the ZeRO stages have in common for whoever uses them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from torch import Tensor

from megatron.core.distributed.flat_params import FlatParams
from megatron.core.distributed.grad_reducer import GradReducer
from megatron.core.distributed.parameter_shard import ShardSpan


class ZeroStage(Protocol):
    """Gradients, and perhaps shards of parameters, of one layout. Each stage is one file.

    All stages are made of a layout (`FlatParams`) and a `GradReducer`; they differ in where
    gradients and values are, and when values are gathered.
    """

    flat: FlatParams
    reducer: GradReducer

    def begin_step(self) -> None:
        """Declare the gradients of the last step void; no memory is written."""
        ...

    def register_grad_ready(self, index: int, is_final: bool) -> None:
        """Take over what backward left in `.grad` of a parameter, if anything.

        Args:
            is_final: no later micro batch adds to it: buckets that are complete may be reduced.
        """
        ...

    def end_backward(self) -> None:
        """Learn that a backward pass of the model chunk is over."""
        ...

    def finish_reductions(self) -> None:
        """Reduce what is not reduced yet, and wait.

        Afterwards the owned gradients are final, and the own shards of parameters may change.
        """
        ...

    def owned_gradients(self) -> list[Tensor]:
        """Return the flat tensors of reduced gradients of which this rank is an owner."""
        ...

    def spans(self) -> list[ShardSpan]:
        """Return what this rank updates; the views stay valid."""
        ...

    def start_gathers(self) -> None:
        """Start to collect updated parameters from their owners."""
        ...

    def finish_gathers(self, indices: Collection[int] | None = None) -> None:
        """Wait until parameters are unsharded again: those numbered `indices`, or all."""
        ...

    def wait_for_readers(self) -> None:
        """Wait until no rank reads the own shards of parameters any more."""
        ...
