"""What the code below the schedule may ask about the step: one object, not a global per module.

A layer does not know its micro batch, whether it is recomputed, or whether its weight gradient is
deferred. The schedule and activation recomputation set that here, and the modules that need it
(`rng`, `aux_loss`, `deferred_wgrad`, `tensor_parallel.random`, `overlap`) read and write their own
field. Where a forward and a backward overlap, each half has a context of its own.

Not a `ContextVar`: autograd runs the backward of CUDA tensors on a thread of its own, which would
see the defaults.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.offload.saved_activations import SavedActivations
    from megatron.core.parameters.rng import SequenceShard
    from megatron.core.step_context.overlap import Overlap
    from megatron.core.topology.group import Group
    from megatron.core.transformer.moe.load_balancing import ExpertLoad

WeightGradient = Callable[[], None]
"""Computes one weight gradient and adds it to the parameter's."""


@dataclass(frozen=True)
class JoinedSamples:
    """Samples one after the other in a micro batch [1, s], each of which would be a micro batch by
    itself if ranks did not share them.

    All are int64 [s], one for each position of the whole sequence, any for padding.

    count: samples here; places: of the position's sample among them; numbers: of the sample in the
    run; positions: in the sample; num_sequences: packed into the sample.
    """

    count: int
    places: Tensor
    numbers: Tensor
    positions: Tensor
    num_sequences: Tensor


@dataclass(frozen=True)
class RandomScope:
    """Where in the computation the next draw happens."""

    first_sample: int = 0
    microbatch: int = 0
    """Its number in the step."""
    path: tuple[int | str, ...] = ()
    rows: SequenceShard | None = None
    samples: JoinedSamples | None = None
    """None: a micro batch [b, s] has b samples."""
    num_calls: int = 0
    repetition: int = 0
    """Of a layer that every micro batch passes several times the number of the pass, from 1."""
    run: tuple[int, int, int] | None = None
    """(first, last, of how many) local rows are computed now, where a module is called on one run
    of rows after the other."""


@dataclass(frozen=True)
class AuxLossScale:
    """The weight of the auxiliary losses of one micro batch."""

    factor: float = 1.0
    """1 / micro batches of the step, times the ranks over which gradients will be averaged although
    they share a micro batch."""
    per_token: bool = False
    """Gradients will be divided by the tokens of the loss of the whole step."""
    tokens_per_microbatch: Tensor | None = None
    """Those tokens, [], divided by the micro batches of all replicas, where they are known before
    the step: then an auxiliary loss is a mean over micro batches too. Unknown, a micro batch counts
    by its own tokens, as in Megatron-LM."""
    scale: Callable[[Tensor], Tensor] | None = None
    """The loss scale of fp16."""

    def of(self, num_tokens: Tensor | float, device: torch.device) -> Tensor | float:
        """Return the gradient [] of the auxiliary loss of a micro batch of `num_tokens`, [].

        Args:
            device: where it is wanted; a number is written there, not copied.
        """
        weight: Tensor | float = self.factor
        if self.per_token:
            known = self.tokens_per_microbatch
            weight = num_tokens if known is None else known
        if self.scale is None:
            return weight
        if isinstance(weight, Tensor):
            return self.scale(weight.to(device, torch.float32))
        return self.scale(torch.full((), weight, dtype=torch.float32, device=device))


@dataclass
class StepContext:
    """The state of what is computed now: a micro batch, a half of an overlapped pair, a model that
    is built."""

    random_scope: RandomScope = RandomScope()
    """Where the next random draw belongs."""
    aux_loss_scale: AuxLossScale = AuxLossScale()
    """Of the micro batch that is computed forward."""
    defers_wgrads: bool = False
    """Layers shall be ready to compute weight gradients apart from input gradients."""
    captured_wgrads: list[WeightGradient] | None = None
    """Takes the weight gradients that the running backward defers; None: it computes them."""
    is_checkpointed: bool = False
    """What runs will be recomputed, or is."""
    is_recomputing: bool = False
    """What runs has run before: what is counted was counted then."""
    initializes_weights: bool = True
    """Layers that are built fill their weights."""
    allocates_weights: bool = True
    """Models that initialise themselves by name get memory for the weights they draw."""
    cp_group: Group | None = None
    """Ranks that split the micro batch that is computed; None: those of the layout."""
    saved_activations: SavedActivations | None = None
    """Takes what modules whose activations are offloaded save for backward."""
    expert_loads: Sequence[ref[ExpertLoad]] = ()
    """What the routers of this stage counted in the step that ended last."""
    mtp_losses: dict[str, Tensor] | None = None
    """Takes further losses for the report, name -> (sum, count) as fp32 [2], which backward fills;
    None where nobody reports them."""
    overlap: Overlap | None = None
    """The pair of a forward and a backward of which this is one half."""


_current = StepContext()


def current_step() -> StepContext:
    """Return the context of what is computed now."""
    return _current


def switch_to(context: StepContext) -> None:
    """Make another context current: where the halves of an overlapped pair take over."""
    global _current
    _current = context


def values_for_recomputation() -> dict[str, object]:
    """Return the fields, for `within_step`, that a second computation of what runs now needs."""
    context = current_step()
    return {"random_scope": context.random_scope, "cp_group": context.cp_group}


@contextmanager
def within_step(**values: object) -> Iterator[None]:
    """Give fields of the current context other values inside."""
    context = _current
    before = {name: getattr(context, name) for name in values}
    for name, value in values.items():
        setattr(context, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(context, name, value)
