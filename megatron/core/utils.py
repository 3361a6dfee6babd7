"""Small functions that third parties import from `megatron.core.utils`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError
from megatron.core.parameters.initialization import (  # noqa: F401  part of this module's public names
    init_method_normal,
    scaled_init_method_normal,
)
from megatron.core.topology.group import Group


def get_pg_size(group: Group | None = None) -> int:
    """Return the number of ranks in `group`; 1 for None, which third parties pass."""
    return 1 if group is None else group.size()


def get_pg_rank(group: Group | None = None) -> int:
    """Return this rank's position in `group`; 0 for None, which third parties pass."""
    return 0 if group is None else group.rank()


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise `ConfigError` unless `denominator` divides `numerator`."""
    if denominator < 1 or numerator % denominator:
        raise ConfigError(
            f"{numerator} is not divisible by {denominator}.",
            rule="a size is split into equal parts, one for each rank",
            fix="choose sizes that the number of parts divides",
        )


def divide(numerator: int, denominator: int) -> int:
    """Divide exactly."""
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def get_attr_wrapped_model(
    model: nn.Module, attr: str, allow_none: bool = True, return_model_obj: bool = False
) -> Any:
    """Find attribute `attr` on `model` or on a model inside it (`.module`, repeatedly).

    Args:
        allow_none: a wrapper's attribute that is None counts as found.
        return_model_obj: return the object that has the attribute instead of its value.
    Raises:
        RuntimeError: no model has it.
    """
    if isinstance(model, list):
        raise TypeError("get_attr_wrapped_model() takes one model chunk, not the list of chunks")
    owner: Any = model
    while not hasattr(owner, attr) or (not allow_none and getattr(owner, attr) is None):
        if not hasattr(owner, "module"):
            raise RuntimeError(
                f"{type(model).__name__} and the models inside it have no attribute {attr!r}"
            )
        owner = owner.module
    return owner if return_model_obj else getattr(owner, attr)


def get_model_config(model: nn.Module) -> Any:
    """Return the config of a possibly wrapped model."""
    return get_attr_wrapped_model(model, "config", allow_none=False)


def unwrap_model(model: object, module_instances: tuple[type, ...] | None = None) -> Any:
    """Strip wrappers (anything with `.module`) off a model, or off each model of a list.

    Args:
        module_instances: strip only wrappers of these types; None strips all.
    """
    if isinstance(model, (list, tuple)):
        return [unwrap_model(chunk, module_instances) for chunk in model]
    while hasattr(model, "module") and (
        module_instances is None or isinstance(model, module_instances)
    ):
        model = model.module
    return model


@contextmanager
def evaluating(model: nn.Module | Sequence[nn.Module]) -> Iterator[None]:
    """Inside, a model, or each of a list of chunks, is in evaluation mode."""
    chunks = as_list(model)
    was_training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        yield
    finally:
        for chunk, training in zip(chunks, was_training, strict=True):
            chunk.train(training)


def make_viewless_tensor(inp: Tensor, requires_grad: bool, keep_graph: bool) -> Tensor:
    """Return a tensor of the same data [...] that is not a view of another.

    A pipeline stage frees the data of its output after sending; that works only on tensors that
    own their storage. With `keep_graph` the autograd history is kept.
    """
    if inp._base is None:
        return inp
    if keep_graph:
        return _Viewless.apply(inp, requires_grad)
    return _viewless_alias(inp, requires_grad)


def _viewless_alias(inp: Tensor, requires_grad: bool) -> Tensor:
    out = torch.empty((1,), dtype=inp.dtype, device=inp.device, requires_grad=requires_grad)
    out.data = inp.data
    return out


class _Viewless(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inp: Tensor, requires_grad: bool) -> Tensor:
        return _viewless_alias(inp, requires_grad)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def get_torch_version() -> tuple[int, ...]:
    """Return torch's release numbers."""
    return _release(torch.__version__)


def is_torch_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether torch is at least (or, without `check_equality`, above) `version`."""
    have, want = get_torch_version(), _release(version)
    return have >= want if check_equality else have > want


def is_te_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether Transformer Engine is installed in at least `version`."""
    from importlib import metadata

    try:
        have = _release(metadata.version("transformer-engine"))
    except metadata.PackageNotFoundError:
        return False
    want = _release(version)
    return have >= want if check_equality else have > want


def _release(version: str) -> tuple[int, ...]:
    parts: list[int] = []
    for part in version.split("+")[0].split("."):
        digits = "".join(ch for ch in part if ch.isdigit())
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def best_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` up to `at_most`, for error messages."""
    small = [d for d in range(1, math.isqrt(max(number, 1)) + 1) if number % d == 0]
    return max(d for d in (1, *small, *(number // d for d in small)) if d <= max(at_most, 1))


def split_tensor_into_1d_equal_chunks(tensor: Tensor, group: Group | None) -> Tensor:
    """Return this rank's equal piece [n/tp] of the flattened tensor."""
    flat = tensor.reshape(-1)
    length = divide(flat.numel(), get_pg_size(group))
    return flat.narrow(0, get_pg_rank(group) * length, length)


def as_list(value: object) -> Sequence[Any]:
    """Return `value` if it is a list or tuple, else a list of it."""
    return value if isinstance(value, (list, tuple)) else [value]
