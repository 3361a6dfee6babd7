"""Gated activations act(gate) * up of one packed tensor (GLU Variants, arXiv 2002.05202).

The two halves are read in place and their gradients are written into one tensor, so the
packed layout costs no copies: autograd's own backward of a split pads each half with zeros and
adds them.

Shapes: `f` width of the gated layer on this rank; the packed tensor is [..., 2f], gate first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
QUICK_GELU_SLOPE = 1.702


@dataclass(frozen=True)
class Activation:
    """A function of one tensor, as in-place kernels."""

    forward: Callable[[Tensor, Tensor], None]
    """forward(x, out) writes act(x)."""
    backward: Callable[[Tensor, Tensor], None]
    """backward(grad, x) multiplies grad by act'(x), in place."""


def _silu(x: Tensor, out: Tensor) -> None:
    _aten.silu.out(x, out=out)


def _silu_backward(grad: Tensor, x: Tensor) -> None:
    _aten.silu_backward.grad_input(grad, x, grad_input=grad)


def _gelu_tanh(x: Tensor, out: Tensor) -> None:
    _aten.gelu.out(x, approximate="tanh", out=out)


def _gelu_tanh_backward(grad: Tensor, x: Tensor) -> None:
    _aten.gelu_backward.grad_input(grad, x, approximate="tanh", grad_input=grad)


def _quick_gelu(x: Tensor, out: Tensor) -> None:
    torch.mul(x, QUICK_GELU_SLOPE, out=out).sigmoid_().mul_(x)


def _quick_gelu_backward(grad: Tensor, x: Tensor) -> None:
    # x sigmoid(cx) is silu(cx) / c, so its derivative is silu'(cx).
    _aten.silu_backward.grad_input(grad, x * QUICK_GELU_SLOPE, grad_input=grad)


SILU = Activation(_silu, _silu_backward)
GELU_TANH = Activation(_gelu_tanh, _gelu_tanh_backward)
QUICK_GELU = Activation(_quick_gelu, _quick_gelu_backward)


def gated(packed: Tensor, activation: Activation) -> Tensor:
    """Return act(gate) * up of `packed` [..., 2f] (gate first) as [..., f].

    Kept for backward: the packed input; on the CPU also act(gate), because forming it again
    there costs more than half of the backward pass.
    """
    if not torch.is_grad_enabled():
        activated, up = _halves(packed, activation)
        return activated.mul_(up)
    return _Gated.apply(packed, activation)


def _halves(packed: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return act(gate), new, and up, a view."""
    width = packed.shape[-1] // 2
    gate, up = packed.narrow(-1, 0, width), packed.narrow(-1, width, width)
    activated = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    activation.forward(gate, activated)
    return activated, up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, activation: Activation) -> Tensor:
        activated, up = _halves(packed, activation)
        ctx.activation = activation
        keeps = packed.is_cpu and ctx.needs_input_grad[0]
        ctx.save_for_backward(packed, activated if keeps else None)
        return activated * up if keeps else activated.mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        packed, activated = ctx.saved_tensors
        gate, up = packed.chunk(2, dim=-1)
        out = torch.empty_like(packed)
        grad_gate, grad_up = out.chunk(2, dim=-1)
        if activated is None:
            ctx.activation.forward(gate, grad_up)
            grad_up.mul_(grad)
        else:
            torch.mul(grad, activated, out=grad_up)
        torch.mul(grad, up, out=grad_gate)
        ctx.activation.backward(grad_gate, gate)
        return out, None
