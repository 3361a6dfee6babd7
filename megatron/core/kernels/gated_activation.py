"""Gated activations act(gate) * up of one packed tensor (GLU Variants, arXiv 2002.05202).

The two halves are read in place and their gradients are written into one tensor, so the
packed layout costs no copies: autograd's own backward of a split pads each half with zeros and
adds them.

Shapes: `f` width of the gated layer on this rank; the packed tensor is [..., 2f], gate first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core import activations
from megatron.core.kernels import triton_kernels
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable, Request

Act: TypeAlias = Callable[[Tensor], Tensor]
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
ACTIVATIONS: dict[Act, Activation] = {
    F.silu: SILU,
    activations.fast_gelu: GELU_TANH,
    activations.quick_gelu: QUICK_GELU,
}


@dataclass(frozen=True)
class Gate:
    """act(gate) * (up + offset); `clamp` bounds the gate, or with `clamps_after` act(gate), from
    above and up from both sides."""

    act: Act
    clamp: float | None = None
    offset: float = 0.0
    clamps_after: bool = False

    def needs(self) -> frozenset[str]:
        """Return the features that a kernel must support to compute it."""
        given = {
            CLAMP: self.clamp is not None and not self.clamps_after,
            CLAMP_AFTER: self.clamp is not None and self.clamps_after,
            OFFSET: self.offset != 0,
            OTHER_ACTIVATION: self.act not in ACTIVATIONS,
        }
        return frozenset(need for need, is_given in given.items() if is_given)


def keeping_gate(packed: Tensor, gate: Gate) -> Tensor:
    """Return act(gate) * up of packed [..., 2f] as [..., f]; keep act(gate) for backward too.

    On the CPU, computing act(gate) again costs more than half of the backward pass.
    """
    return _gated(packed, ACTIVATIONS[gate.act], keeps=True)


def recomputing_gate(packed: Tensor, gate: Gate) -> Tensor:
    """Return act(gate) * up of packed [..., 2f] as [..., f]; keep only `packed` for backward."""
    return _gated(packed, ACTIVATIONS[gate.act], keeps=False)


def plain_gate(packed: Tensor, gate: Gate) -> Tensor:
    """Return the gate of packed [..., 2f] as [..., f] by the formula, one operation at a time."""
    gated_half, up = torch.chunk(packed, 2, dim=-1)
    if gate.clamp is not None:
        up = up.clamp(-gate.clamp, gate.clamp)
        gated_half = gated_half if gate.clamps_after else gated_half.clamp(max=gate.clamp)
    activated = gate.act(gated_half)
    if gate.clamp is not None and gate.clamps_after:
        activated = activated.clamp(max=gate.clamp)
    return activated * (up + gate.offset if gate.offset else up)


def _with_terms(run: Callable[[Tensor, Gate], Tensor]) -> GatedKernel:
    """Add the bias before, and multiply by the weights after, a kernel that supports neither."""

    def run_with_terms(
        packed: Tensor, gate: Gate, bias: Tensor | None, weights: Tensor | None
    ) -> Tensor:
        out = run(packed if bias is None else packed + bias, gate)
        return out if weights is None else (out * weights.unsqueeze(-1)).to(out.dtype)

    return run_with_terms


GatedKernel: TypeAlias = Callable[[Tensor, Gate, Tensor | None, Tensor | None], Tensor]
"""(packed [..., 2f] with the gate first, Gate, bias [2f], weights [...]) -> [..., f]."""
CLAMP, CLAMP_AFTER, OFFSET = "a clamp", "a clamp after the activation", "an offset"
OTHER_ACTIVATION = "activations other than SiLU, tanh GELU and quick GELU"
_FEATURES = frozenset({CLAMP, CLAMP_AFTER, OFFSET, OTHER_ACTIVATION})
_PLAIN = Kernel("plain", _with_terms(plain_gate), _FEATURES)

GATED: KernelTable[GatedKernel] = KernelTable(
    "gated activation",
    {
        "cpu": (Kernel("fused-keeping", _with_terms(keeping_gate)), _PLAIN),
        OTHER_DEVICES: (
            triton_kernels.entry("gated_activation", "gate_of"),
            Kernel("fused-recomputing", _with_terms(recomputing_gate)),
            _PLAIN,
        ),
    },
)


def gated(
    packed: Tensor,
    gate: Gate,
    *,
    bias: Tensor | None = None,
    weights: Tensor | None = None,
    fuses: bool = True,
) -> Tensor:
    """Return act(gate) * (up + offset) of `packed` [..., 2f] (gate first) as [..., f].

    Args:
        bias: [2f], added to `packed` first.
        weights: [...], multiplied with the rows of the result, which keeps its dtype.
        fuses: False prefers the plain formula.
    """
    request = Request.of(packed, gate.needs())
    kernel = GATED.choose(request, () if fuses else ("plain",)).kernel
    return kernel.run(packed, gate, bias, weights)


def _gated(packed: Tensor, activation: Activation, *, keeps: bool) -> Tensor:
    if not torch.is_grad_enabled():
        activated, up = _halves(packed, activation)
        return activated.mul_(up)
    return _Gated.apply(packed, activation, keeps)


def _halves(packed: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return act(gate), new, and up, a view."""
    width = packed.shape[-1] // 2
    gate, up = packed.narrow(-1, 0, width), packed.narrow(-1, width, width)
    activated = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    activation.forward(gate, activated)
    return activated, up


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, packed: Tensor, activation: Activation, keeps: bool) -> Tensor:
        activated, up = _halves(packed, activation)
        ctx.activation = activation
        keeps = keeps and ctx.needs_input_grad[0]
        ctx.save_for_backward(packed, activated if keeps else None)
        return activated * up if keeps else activated.mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
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
        return out, None, None
