"""Initial weights that do not depend on the layout.

A parameter's initial value is a slice of the one-device model's tensor, which is drawn from a
generator seeded by (seed, canonical parameter name). It does not depend on tensor-parallel size,
pipeline stage, padding of the vocabulary or construction order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from megatron.core.foundation.device import seeded_generators
from megatron.core.parameters.param_meta import (
    ParamMeta,
    as_one_tensor,
    full_shape,
    get_param_meta,
    local_ranges,
    shard_of,
)
from megatron.core.parameters.rng import derive_seed
from megatron.core.step_context.context import current_step, within_step

ROWS_PER_BLOCK = 128
"""Rows drawn under one seed. Fixed, so a longer (padded) tensor begins with the same rows."""


_PENDING = "_deferred_weights"


class NormalInit:
    """Fill a tensor with N(mean, std^2). Elementwise: any block of rows can be drawn alone."""

    is_elementwise = True

    def __init__(self, std: float, mean: float = 0.0) -> None:
        self.std = std
        self.mean = mean

    def __call__(self, tensor: Tensor) -> Tensor:
        return nn.init.normal_(tensor, mean=self.mean, std=self.std)

    def __repr__(self) -> str:
        return f"NormalInit(std={self.std:g})"


def init_method_normal(sigma: float) -> NormalInit:
    """Return the initialiser N(0, sigma^2)."""
    return NormalInit(sigma)


def scaled_init_method_normal(sigma: float, num_layers: int, multiplier: float = 2.0) -> NormalInit:
    """Return N(0, sigma^2 / (multiplier * num_layers)), for layers that end a residual branch."""
    return NormalInit(sigma / math.sqrt(multiplier * num_layers))


@contextmanager
def deferred_initialization() -> Iterator[None]:
    """Inside, layers leave their weights unfilled for a later `initialize_parameters`."""
    hook = None
    if not current_step().allocates_weights:
        hook = register_module_parameter_registration_hook(_free_if_drawn)
    try:
        with within_step(initializes_weights=False):
            yield
    finally:
        if hook is not None:
            hook.remove()


@contextmanager
def parameters_without_memory() -> Iterator[None]:
    """Inside, models that initialise themselves by name allocate no memory for drawn weights.

    For models that do not fit as a whole: the code that shards the model calls
    `fill_deferred_weights` for a few modules at a time. Weights that are not drawn (norms, biases)
    are small and are allocated as usual.
    """
    with within_step(allocates_weights=False):
        yield


def _free_if_drawn(_module: nn.Module, _name: str, parameter: Tensor | None) -> None:
    if parameter is not None and get_param_meta(parameter).init_method is not None:
        parameter.data = without_memory(parameter)


def without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape [...] whose elements are all the same NaN: 4 bytes.

    It is the placeholder of values without memory; reading it by mistake gives NaN.
    """
    return torch.full((), math.nan, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has memory of its own for each element."""
    return tensor.numel() <= 1 or any(tensor.stride())


def initialization_is_deferred() -> bool:
    """Return whether a constructor should leave its weights unfilled."""
    return not current_step().initializes_weights


def canonical_names(module: nn.Module) -> dict[str, str]:
    """Map each local parameter name to its name in the one-device model.

    A child with a `layer_number` (1-based, global) is named by `layer_number - 1` instead of its
    position on this pipeline stage, or by its `index_in_stack` if a model has several stacks. A
    module that holds a part of a larger one (experts) has the attribute `names_in_model`, which
    maps the names of its parameters to names in the one-device model.
    """
    prefixes = {"": ""}
    full: dict[str, str] = {}
    for name, parent in module.named_modules():
        for child_name, child in parent.named_children():
            local = f"{name}.{child_name}" if name else child_name
            token = child_name
            if isinstance(parent, nn.ModuleList) and hasattr(child, "layer_number"):
                token = str(getattr(child, "index_in_stack", child.layer_number - 1))
            outer = prefixes.get(name, name)
            prefixes[local] = f"{outer}.{token}" if outer else token
        for own, other in getattr(parent, "names_in_model", {}).items():
            dot = "." if name else ""
            full[f"{name}{dot}{own}"] = f"{prefixes.get(name, name)}{dot}{other}"
    names = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        outer = prefixes.get(owner, owner)
        names[name] = full.get(name) or (f"{outer}.{leaf}" if outer else leaf)
    return names


def draw_parameter(
    parameter: Tensor,
    meta: ParamMeta,
    init_method: Callable[[Tensor], object],
    *,
    seed: int,
    name: str,
    axis_rank: int,
    axis_size: int,
) -> None:
    """Fill one local shard with its slice of the full tensor drawn under (seed, name).

    Drawn in fp32 and rounded to the parameter's dtype, so bf16 and fp32 models start equal.
    """
    shape = full_shape(parameter.shape, meta, axis_size)
    with torch.no_grad():
        if getattr(init_method, "is_elementwise", False) and len(shape) >= 1:
            _draw_row_blocks(parameter, shape, meta, init_method, seed, name, axis_rank, axis_size)
            return
        with seeded_generators(parameter.device, derive_seed(seed, "init", name)):
            full = full_weight(shape, meta, init_method, parameter.device)
        parameter.copy_(shard_of(full, meta, axis_rank, axis_size))


def full_weight(
    shape: Sequence[int],
    meta: ParamMeta,
    init_method: Callable[[Tensor], object],
    device: torch.device,
) -> Tensor:
    """Return the full tensor [*shape] of the one-device model, fp32.

    Padding rows are zero and are not passed to the initialiser, which may read the shape (Xavier's
    fan). A vector is passed as a matrix of one column.
    """
    full = torch.zeros(tuple(shape), dtype=torch.float32, device=device)
    rows = full if meta.num_rows is None else full[: meta.num_rows]
    init_method(rows.unsqueeze(1) if rows.dim() == 1 else rows)
    return full


def _draw_row_blocks(
    parameter: Tensor,
    shape: Sequence[int],
    meta: ParamMeta,
    init_method: Callable[[Tensor], Any],
    seed: int,
    name: str,
    axis_rank: int,
    axis_size: int,
) -> None:
    """Draw only the blocks of 128 rows that overlap this shard."""
    is_row_split = meta.split_dim == 0 and axis_size > 1
    ranges = (
        local_ranges(shape[0], meta.stride, axis_rank, axis_size)
        if is_row_split
        else [(0, shape[0])]
    )
    local = 0
    for begin, end in ranges:
        while begin < end:
            index, first = divmod(begin, ROWS_PER_BLOCK)
            used = min(ROWS_PER_BLOCK - first, end - begin)
            with seeded_generators(parameter.device, derive_seed(seed, "init", name, index)):
                block = torch.empty(
                    (ROWS_PER_BLOCK, *shape[1:]), dtype=torch.float32, device=parameter.device
                )
                init_method(block)
            piece = block[first : first + used]
            if not is_row_split:
                piece = shard_of(piece, meta, axis_rank, axis_size)
            parameter[local : local + used].copy_(piece)
            begin, local = begin + used, local + used


def initialize_parameters(
    module: nn.Module, *, seed: int, axis_rank: dict[str, int], axis_size: dict[str, int]
) -> None:
    """Give every parameter of `module` its layout-independent initial value.

    Parameters with an `init_method` in their `ParamMeta` are drawn by name. A module that owns
    other parameters and has `reset_parameters()` (any torch.nn module) is reset under
    (seed, canonical module name). Other parameters keep the value of the constructor.

    Args:
        axis_rank, axis_size: this rank's position on, and the size of, the axes of
            `ParamMeta.split_axis` ("tp", "expt_tp").
    """
    weights = DeferredWeights(module, seed, axis_rank, axis_size)
    if all(has_memory(parameter) for parameter in module.parameters()):
        weights.fill(module.parameters())
    else:
        setattr(module, _PENDING, weights)


class DeferredWeights:
    """Fills the weights of a model, a few parameters at a time."""

    def __init__(
        self, module: nn.Module, seed: int, axis_rank: dict[str, int], axis_size: dict[str, int]
    ) -> None:
        self._seed, self._axis_rank, self._axis_size = seed, axis_rank, axis_size
        names = canonical_names(module)
        self._owners: list[tuple[nn.Module, list[tuple[str, nn.Parameter]], torch.device]] = []
        """Modules, their own parameters, each with its canonical name, and the device that draws:
        the constructor's, because the module may be moved before it is filled."""
        for prefix, owner in module.named_modules():
            own = [
                (names[f"{prefix}.{leaf}" if prefix else leaf], parameter)
                for leaf, parameter in owner.named_parameters(recurse=False)
            ]
            if own:
                self._owners.append((owner, own, own[0][1].device))

    def fill(self, parameters: Iterable[nn.Parameter]) -> None:
        """Fill, and allocate if needed, all modules that own one of the parameters.

        A module is filled once, with all of its parameters.
        """
        wanted = {id(parameter) for parameter in parameters}
        left, self._owners = self._owners, []
        for owner, own, where in left:
            if any(id(parameter) in wanted for _, parameter in own):
                allocate([parameter for _, parameter in own])
                moved = [(p, p.data) for _, p in own if p.device != where]
                for parameter, values in moved:
                    parameter.data = values.to(where)
                self._fill(owner, own)
                for parameter, values in moved:
                    parameter.data = values.copy_(parameter.data)
            else:
                self._owners.append((owner, own, where))

    def _fill(self, owner: nn.Module, own: list[tuple[str, nn.Parameter]]) -> None:
        plain = [p for _, p in own if get_param_meta(p).init_method is None]
        if plain and hasattr(owner, "reset_parameters"):
            canonical_owner = own[0][0].rpartition(".")[0]
            reset: Callable[[], None] = getattr(owner, "reset_parameters")  # noqa: B009
            with seeded_generators(
                plain[0].device, derive_seed(self._seed, "reset", canonical_owner)
            ):
                _reset_in_place(owner, reset)
        for name, parameter in own:
            meta = get_param_meta(parameter)
            if meta.init_method is None:
                continue
            axis = meta.split_axis or "tp"
            draw_parameter(
                parameter,
                meta,
                meta.init_method,
                seed=self._seed,
                name=meta.tied_to or name,
                axis_rank=self._axis_rank.get(axis, 0),
                axis_size=self._axis_size.get(axis, 1),
            )


def _reset_in_place(owner: nn.Module, reset: Callable[[], None]) -> None:
    """Call `reset`; if it makes new parameters, move their data into the old ones, which have
    metadata."""
    before = dict(owner.named_parameters(recurse=False))
    reset()
    for name, parameter in before.items():
        made = getattr(owner, name)
        if made is not parameter:
            parameter.data = made.data
            setattr(owner, name, parameter)


def allocate(parameters: Iterable[nn.Parameter]) -> None:
    """Allocate zeros for the parameters that have no memory; adjacent ones for equal neighbours."""
    for run in _equal_neighbours(p for p in parameters if not has_memory(p)):
        _join(run).zero_()


def make_adjacent(parameters: Iterable[nn.Parameter]) -> None:
    """Move neighbours of one shape into one tensor, in order, if they have memory.

    Parameters that torch shards (DTensors) stay where they are.
    """
    held = (p for p in parameters if has_memory(p) and not hasattr(p, "to_local"))
    for run in _equal_neighbours(held):
        if as_one_tensor(run) is None:
            _join(run)


def _equal_neighbours(parameters: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    for _, run in groupby(parameters, lambda p: (p.shape, p.dtype, p.device)):
        yield list(run)


def _join(parameters: Sequence[nn.Parameter]) -> Tensor:
    joined = torch.stack([parameter.data for parameter in parameters])
    for parameter, values in zip(parameters, joined.unbind(), strict=True):
        parameter.data = values
    return joined


def fill_deferred_weights(module: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Allocate and fill the `parameters` whose constructor deferred it.

    Models that were built without initialisation, because a checkpoint will be loaded, get zeros.
    """
    for owner in module.modules():
        weights: DeferredWeights | None = getattr(owner, _PENDING, None)
        if weights is not None:
            weights.fill(parameters)
    wanted = set(parameters)
    allocate(parameter for parameter in module.parameters() if parameter in wanted)
