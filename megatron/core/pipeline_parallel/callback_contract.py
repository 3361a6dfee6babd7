"""What a forward step and a loss function may return, checked wherever a schedule calls them.

The checks read types and shapes, never values: they cost no wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from megatron.core.foundation.errors import ConfigError, DataError, shown

_FORMS = (
    "it returns (summed loss, number of tokens, report), (mean loss, report), or the mean loss"
    " alone; a loss is a floating-point tensor of one element, a number of tokens a tensor of one"
    " element"
)


def call_forward_step(
    forward_step: Callable[..., object], data_iterator: object, model: object, *, is_last: bool
) -> tuple[Any, Any]:
    """Return what a forward step returns for one micro batch: (output, loss function).

    Args:
        is_last: whether the chunk computes the loss; the output of another is [s, b, h], or several
            of such tensors.
    Raises:
        ConfigError: it returned something else.
        DataError: the data iterator had no batch left.
    """
    try:
        result: Any = forward_step(data_iterator, model)
    except StopIteration:
        raise DataError(
            "the data iterator ended before the last micro batch of the step.",
            rule="every step takes num_microbatches batches from the iterator of each chunk",
            fix="use an iterator that starts again at the end of the data, or fewer steps",
        ) from None
    is_pair = isinstance(result, (tuple, list)) and len(result) == 2
    output: Any
    output, loss_function = result if is_pair else (None, None)
    parts = output if isinstance(output, (tuple, list)) else (output,)
    if not is_pair:
        found = _described(result)
    elif is_last and not callable(loss_function):
        found = f"{_described(loss_function)} for the loss function"
    elif not (is_last or (parts and all(isinstance(part, Tensor) for part in parts))):
        found = f"{_described(output)} for the output of an earlier stage"
    else:
        return output, loss_function
    raise ConfigError(
        f"the forward step returned {found}.",
        rule="it returns (output, loss function); the output of all stages but the last is a tensor"
        " or a list of tensors",
        fix="return the model's output and a function of this output, such as"
        " partial(loss_func, loss_mask)",
    )


def loss_parts(
    result: Any, output: Any, *, per_token: bool, trains: bool
) -> tuple[Tensor, Tensor | None, Any]:
    """Return (loss [], number of tokens [] or None, report) of what a loss function returned.

    Args:
        output: the argument of the loss function.
        per_token: gradients will be divided by the number of tokens of the whole batch.
        trains: the loss will be differentiated.
    Raises:
        ConfigError: it returned something else, or does not fit `per_token`.
    """
    if isinstance(result, Tensor):
        result = (result, result.detach())
    if not isinstance(result, (tuple, list)) or len(result) not in (2, 3):
        raise _wrong_loss(_described(result))
    loss, report = result[0], result[-1]
    num_tokens: Tensor | None = result[1] if len(result) == 3 else None
    if not _is_single(loss) or not loss.is_floating_point():
        raise _wrong_loss(f"{_described(loss)} for the loss")
    if len(result) == 3 and not (_is_single(num_tokens) and num_tokens.dtype is not torch.bool):
        raise _wrong_loss(f"{_described(num_tokens)} for the number of tokens")
    if num_tokens is None and (type(report) is int or _is_single(report) and _is_integer(report)):
        raise _wrong_loss(f"{_described(report)}, which is a number of tokens, for the report")
    if not trains:
        return loss, num_tokens, report
    if num_tokens is None and per_token:
        raise ConfigError(
            "calculate_per_token_loss is on, and the loss function returned no number of tokens.",
            rule="gradients are summed over micro batches and ranks, then divided by the tokens of"
            " the whole batch: without a number of tokens they would grow with the number of ranks",
            flags=["--calculate-per-token-loss"],
            fix="return (summed loss, number of tokens, report), or leave calculate_per_token_loss"
            " off",
        )
    if not loss.requires_grad and _has_gradient(output):
        raise ConfigError(
            "the loss does not depend on the model's output, which requires a gradient.",
            rule="backward starts at the loss that the loss function returns",
            fix="compute the loss from the output without detach(), item() or no_grad; where no"
            " token counts, return output.sum() * 0",
        )
    return loss, num_tokens, report


def _is_single(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.numel() == 1


def _is_integer(value: Tensor) -> bool:
    return not value.is_floating_point() and value.dtype is not torch.bool


def _has_gradient(output: Any) -> bool:
    parts = output if isinstance(output, (tuple, list)) else (output,)
    return any(isinstance(part, Tensor) and part.requires_grad for part in parts)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    if isinstance(value, (tuple, list)):
        return f"{len(value)} values"
    return shown(value)


def _wrong_loss(found: str) -> ConfigError:
    return ConfigError(
        f"the loss function returned {found}.", rule=_FORMS, fix="return one of these forms"
    )
