"""Recomputation of activations, and Megatron's named streams of random numbers.

Recomputation (Training Deep Nets with Sublinear Memory Cost, arXiv 1604.06174; selective:
arXiv 2205.05198, section 5) drops activations after forward and computes them again in backward,
with the same random numbers: it restores the keyed scope of `rng_state()`, torch's default
generators and the streams of the tracker.

The framework's own draws are keyed by their purpose (`megatron.core.parameters.rng`) and have no
state. Third-party modules that draw from torch's default generator use the tracker of named
streams; one of the streams differs between tensor-parallel ranks.

Shapes: `s` sequence, `b` micro batch, `h` hidden; states of generators are opaque byte tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from megatron.core.foundation.device import (
    default_generator_state,
    seed_default_generator,
    set_default_generator_state,
)
from megatron.core.foundation.errors import ConfigError, refuse_given
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import resolve_group, resolve_groups
from megatron.core.step_context.context import (
    current_step,
    values_for_recomputation,
    within_step,
)
from megatron.core.tensor_parallel.mappings import CollectivePair
from megatron.core.tensor_parallel.utils import split_tensor_into_1d_equal_chunks
from megatron.core.topology.group import Group
from megatron.core.transport import collectives


def is_recomputing() -> bool:
    """Return whether this is a recomputation: the first call has updated all counters."""
    return current_step().is_recomputing


def checkpoint(
    function: Callable[..., object],
    distribute_saved_activations: bool,
    *args: object,
    tp_group: Group | None = None,
) -> Any:
    """Call `function(*args)`; keep only its arguments, and call it again in backward.

    Args:
        function: returns a tensor or a tuple; pass keyword arguments with `functools.partial`.
        distribute_saved_activations: keep only this rank's part of the first argument (equal on
            all ranks), and gather the parts again in backward.
        args: tensors or anything else; kept until backward.
        tp_group: group for `distribute_saved_activations`; None is the tensor-parallel group of
            the current collection.
    Communication:
        the collectives of `function`, a second time in backward; when distributing, one all-gather
        of the first argument and one of its gradient.
    """
    if not torch.is_grad_enabled():
        return function(*args)
    if distribute_saved_activations:
        function, args = _distribute_saved_input(function, args, resolve_group(tp_group, "tp"))
    return torch.utils.checkpoint.checkpoint(
        function, *args, use_reentrant=False, context_fn=_contexts
    )


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of the first call and of the recomputation.

    torch itself restores the default generators.
    """
    values, streams = values_for_recomputation(), get_cuda_rng_tracker().get_states()
    return within_step(is_checkpointed=True), _recompute_contexts(values, streams)


@contextmanager
def _recompute_contexts(values: dict[str, object], streams: dict[str, Tensor]) -> Iterator[None]:
    """Restore the `values` of the step context and the `streams` of the tracker."""
    tracker = get_cuda_rng_tracker()
    outer = tracker.get_states()
    if streams:
        tracker.set_states(streams)
    try:
        with within_step(**values, is_checkpointed=True, is_recomputing=True):
            yield
    finally:
        if streams:
            tracker.set_states(outer)


# Distributed arguments ----------------------------------------------------------------------


def _distribute_saved_input(
    function: Callable[..., Any], args: tuple[Any, ...], group: Group
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Replace the first argument by this rank's part of it."""
    size = group.size()
    first = args[0] if args else None
    if size == 1 or not isinstance(first, Tensor) or first.numel() % size:
        return function, args
    shape, full = first.shape, [first.detach()]

    def shard_of(x: Tensor, group: Group) -> Tensor:
        return split_tensor_into_1d_equal_chunks(x, new_buffer=True, tp_group=group)

    def gathered(shard: Tensor, group: Group) -> Tensor:
        # The first call has the full tensor; the second must gather it.
        return (full.pop() if full else collectives.all_gather(shard, group)).view(shape)

    def joined(grad: Tensor, group: Group) -> Tensor:
        return collectives.all_gather(grad, group).view(shape)

    def from_shard(shard: Tensor, *rest: Any) -> Any:
        # All ranks compute the same gradient of the full tensor, so backward takes a shard of it.
        return function(CollectivePair.apply(shard, group, gathered, shard_of), *rest)

    return from_shard, (CollectivePair.apply(first, group, shard_of, joined), *args[1:])


# Outputs without storage --------------------------------------------------------------------


class CheckpointWithoutOutput:
    """Recompute a cheap function with a large *output*: a norm, an activation.

    The output is freed once its consumer has used it, and recomputed just before the consumer's
    backward:

        part = CheckpointWithoutOutput()
        y = part.checkpoint(norm, x)
        z = linear(y)
        part.discard_output_and_register_recompute(z)

    One object serves one call. It does nothing inside `checkpoint`, which drops everything anyway,
    and in a layer that is passed several times: each pass would run a backward pass of its own, and
    the parameters' gradients would count as complete after the first one.
    """

    def __init__(self, fp8: bool = False) -> None:
        rule = "nothing computes in FP8"
        refuse_given("CheckpointWithoutOutput", {"fp8": fp8}, rule=rule, fix="leave it out")
        self._outputs: tuple[Tensor, ...] = ()
        self._node: Any = None

    def checkpoint(self, run_function: Callable[..., object], *args: object) -> Any:
        """Call `run_function(*args)`, which returns a tensor or a tuple of tensors.

        If no argument has a gradient (below frozen weights), the output is kept: recomputation
        computes the gradients of the function's own parameters through such an argument.
        """
        has_gradient = any(isinstance(a, Tensor) and a.requires_grad for a in args)
        keeps = current_step().is_checkpointed or rng_state().scope.pass_index
        if not torch.is_grad_enabled() or not has_gradient or keeps:
            return run_function(*args)
        outputs = _WithoutOutput.apply(run_function, self, *args)
        self._outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
        return outputs

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the output now; recompute it when the gradient of `hook_tensor` is available.

        Args:
            hook_tensor: computed from the output; nothing else uses the output any more.
        """
        if not self._outputs or not hook_tensor.requires_grad:
            return
        for output in self._outputs:
            storage = output.untyped_storage()
            if storage.nbytes() == output.numel() * output.element_size():
                storage.resize_(0)
        hook_tensor.register_hook(self._recompute)

    def _recompute(self, _grad: Tensor) -> None:
        """Run the function again, and write its outputs to the freed storages."""
        if self._node is None:
            return
        recomputed = self._node.run_again()
        with torch.no_grad():
            for output, again in zip(self._outputs, recomputed, strict=True):
                storage, source = output.untyped_storage(), again.detach().contiguous()
                if storage.nbytes() == 0 and source.numel():
                    storage.resize_(source.numel() * source.element_size())
                    # Not `output.copy_`: the version of the consumer's tensor would change.
                    output.data.copy_(source)
        self._outputs, self._node = (), None


class _WithoutOutput(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., Any], owner: CheckpointWithoutOutput, *args: Any
    ) -> Any:
        ctx.values, ctx.streams = values_for_recomputation(), get_cuda_rng_tracker().get_states()
        ctx.cpu_state = torch.get_rng_state()
        ctx.device_state = default_generator_state()
        ctx.function, ctx.recomputed, ctx.inputs = function, None, ()
        ctx.others = tuple(None if isinstance(a, Tensor) else a for a in args)
        ctx.is_tensor = tuple(isinstance(a, Tensor) for a in args)
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        owner._node = _Node(ctx)
        return function(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recomputed = _Node(ctx).run_again() if ctx.recomputed is None else ctx.recomputed
        pairs = [
            (y, g)
            for y, g in zip(recomputed, grads, strict=True)
            if g is not None and y.requires_grad
        ]
        torch.autograd.backward([y for y, _ in pairs], [g for _, g in pairs])
        found = tuple(a.grad if isinstance(a, Tensor) else None for a in ctx.inputs)
        ctx.recomputed, ctx.inputs = None, ()
        return None, None, *found


class _Node:
    """Runs the function of one `_WithoutOutput` again, in a separate graph."""

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx

    def run_again(self) -> tuple[Tensor, ...]:
        """Return the outputs, and keep them with their detached inputs for the backward."""
        ctx = self._ctx
        tensors = iter(ctx.saved_tensors)
        needs_grad = ctx.needs_input_grad[2:]
        inputs = tuple(
            next(tensors).detach().requires_grad_(needs) if is_tensor else other
            for is_tensor, other, needs in zip(ctx.is_tensor, ctx.others, needs_grad, strict=True)
        )
        outer_cpu, outer_device = torch.get_rng_state(), default_generator_state()
        torch.set_rng_state(ctx.cpu_state)
        set_default_generator_state(ctx.device_state)
        try:
            with _recompute_contexts(ctx.values, ctx.streams), torch.enable_grad():
                outputs = ctx.function(*inputs)
        finally:
            torch.set_rng_state(outer_cpu)
            set_default_generator_state(outer_device)
        ctx.inputs = inputs
        ctx.recomputed = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        return ctx.recomputed


# Named streams of random numbers -------------------------------------------------------------

_MODEL_PARALLEL = "model-parallel-rng"
_EXPERT_PARALLEL = "expert-parallel-rng"
_DATA_PARALLEL = "data-parallel-rng"

MODEL_PARALLEL_SEED_OFFSET = 2718
EXPERT_PARALLEL_SEED_OFFSET = 1024


class CudaRNGStatesTracker:
    """Generator states by name; `fork(name)` makes one of them the default for a while.

    The name is Megatron's; the states belong to the current device, a GPU or the CPU.
    """

    def __init__(self) -> None:
        self.reset()

    def is_initialized(self) -> bool:
        """Return whether any stream was added or set."""
        return self._is_initialized

    def reset(self) -> None:
        """Forget all streams."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()
        self._is_initialized = False

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name; they are never changed in place, so no copies are made."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Replace all states."""
        self._is_initialized = True
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start a stream. A seed in use is refused, because two streams would be equal."""
        if seed in self.seeds_ or name in self.states_:
            found = f"stream {name!r}" if name in self.states_ else f"a stream with seed {seed}"
            raise ConfigError(
                f"{found} exists already.",
                rule="two streams with one seed or name would repeat each other's numbers",
                fix="add the stream with a name and a seed of its own, or reset() the tracker",
            )
        self._is_initialized = True
        self.seeds_.add(seed)
        outer = default_generator_state()
        seed_default_generator(seed)
        self.states_[name] = default_generator_state()
        set_default_generator_state(outer)

    @contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Draw from stream `name` inside; the default generator is restored afterwards."""
        if name not in self.states_:
            raise ConfigError(
                f"there is no random stream {name!r}; there are {sorted(self.states_)}.",
                rule="a stream is added before numbers are drawn from it",
                fix="call model_parallel_cuda_manual_seed(seed), or add(name, seed)",
            )
        outer = default_generator_state()
        set_default_generator_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = default_generator_state()
            set_default_generator_state(outer)


_TRACKER = CudaRNGStatesTracker()


def initialize_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    force_reset: bool = False,
) -> None:
    """Prepare the process' tracker. There is one kind of tracker for all arguments.

    Args:
        force_reset: remove existing streams.
    """
    if force_reset:
        _TRACKER.reset()


def get_cuda_rng_tracker(
    use_te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
) -> CudaRNGStatesTracker:
    """Return the tracker of this process."""
    return _TRACKER


def get_data_parallel_rng_tracker_name() -> str:
    """Name of the stream that is the same on all model-parallel ranks."""
    return _DATA_PARALLEL


def get_expert_parallel_rng_tracker_name() -> str:
    """Name of the stream that differs between expert-parallel ranks."""
    return _EXPERT_PARALLEL


def get_all_rng_states() -> dict[str, Tensor]:
    """Return the states of all streams of the tracker."""
    return _TRACKER.get_states()


def model_parallel_cuda_manual_seed(
    seed: int,
    te_rng_tracker: bool = False,
    inference_rng_tracker: bool = False,
    use_cudagraphable_rng: bool = False,
    tp_rank: int | None = None,
    ep_rank: int | None = None,
    etp_rank: int | None = None,
    gtp_remat_rank: int | None = None,
    egtp_remat_rank: int | None = None,
    force_reset_rng: bool = False,
    gtp_remat_world_size: int | None = None,
    egtp_remat_world_size: int | None = None,
) -> None:
    """Seed every source of randomness of this rank.

    The keyed draws of the framework get `seed`, the same everywhere; so does the default
    generator, and with it the eager initialisation of weights. The tracker gets three streams:
    "data-parallel-rng" equal on all ranks, "model-parallel-rng" by tensor-parallel rank, and
    "expert-parallel-rng" by expert-parallel and expert-tensor-parallel rank.

    Args:
        tp_rank, ep_rank, etp_rank: None reads them from the current collection.
        gtp_remat_rank, egtp_remat_rank, gtp_remat_world_size, egtp_remat_world_size: position on an
            axis that does not exist here; refused unless the axis has one rank.
        others: there is one kind of tracker, which is always reset.
    """
    refuse_given(
        "model_parallel_cuda_manual_seed",
        {
            "gtp_remat_rank": bool(gtp_remat_rank),
            "egtp_remat_rank": bool(egtp_remat_rank),
            "gtp_remat_world_size": gtp_remat_world_size not in (None, 1),
            "egtp_remat_world_size": egtp_remat_world_size not in (None, 1),
        },
        rule="weights are sharded over tensor parallel or by ZeRO, not along this axis",
        fix="leave these out",
    )
    collection = resolve_groups(None)
    tp_rank = collection.tp.rank() if tp_rank is None else tp_rank
    ep_rank = collection.ep.rank() if ep_rank is None else ep_rank
    etp_rank = collection.expt_tp.rank() if etp_rank is None else etp_rank

    rng_state().set_seed(seed)
    initialize_rng_tracker(force_reset=True)
    seed_default_generator(seed)
    model_parallel_seed = seed + MODEL_PARALLEL_SEED_OFFSET
    _TRACKER.add(_DATA_PARALLEL, seed)
    _TRACKER.add(_MODEL_PARALLEL, model_parallel_seed + tp_rank)
    _TRACKER.add(
        _EXPERT_PARALLEL,
        model_parallel_seed + EXPERT_PARALLEL_SEED_OFFSET + 100 * ep_rank + etp_rank,
    )
