"""FP8 and MXFP8 by Triton's interpreter: to the bit as the emulation on the CPU."""

from __future__ import annotations

import pytest
import torch

from megatron.core.low_precision import scaling
from megatron.core.low_precision.formats import E4M3, E5M2
from megatron.core.low_precision.scaling import BlockScaling, TensorScaling

SCALINGS = {
    f"{name}, {format.name}": BlockScaling(format, block, is_e8m0=is_e8m0, rounds_up=up)
    for format in (E4M3, E5M2)
    for name, block, is_e8m0, up in (
        ("MXFP8", 32, True, True),
        ("MXFP8 of the specification", 32, True, False),
        ("blocks of 128", 128, False, True),
    )
}
SHAPES = [(1, 1), (37, 100), (70, 260)]


def numbers(rows, width, dtype):
    """Return values of all magnitudes, ties, zeros of both signs, and blocks of zeros alone."""
    # Triton's interpreter does not read numbers of bf16 that are below its normal range.
    smallest = -42 if dtype == torch.float32 else -30
    x = torch.randn(rows, width) * torch.logspace(smallest, 36, rows).unsqueeze(1)
    x[:, ::7] = (x[:, ::7].view(torch.int32) & -0x100000).view(torch.float32)
    x[:, 3::11] = 0.0
    x[:, 4::11] = -0.0
    x[rows // 2, : width // 2] = 0.0
    return x.to(dtype)


def same_bits(found, wanted):
    assert found.dtype == wanted.dtype
    is_nan = wanted.isnan()
    assert torch.equal(found.isnan(), is_nan)
    bits = (found.masked_fill(is_nan, 0.0), wanted.masked_fill(is_nan, 0.0))
    assert torch.equal(*(b.contiguous().view(torch.int32) for b in bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", SCALINGS)
def test_blocks(name, shape, transposed, dtype):
    x = numbers(*shape, dtype)
    x = x.t() if transposed else x
    found, wanted = (
        run(SCALINGS[name], x, None, scaling.NOT_CUT)
        for run in (scaling._quantize_fused, scaling._quantize_by_steps)
    )
    for part in ("values", "elements", "block_scales"):
        same_bits(getattr(found, part), getattr(wanted, part))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_with_a_number_that_is_not_finite_is_nan(bad):
    x = torch.randn(4, 64)
    x[1, 40] = bad
    found, wanted = (
        run(SCALINGS["MXFP8, e4m3"], x, None, scaling.NOT_CUT)
        for run in (scaling._quantize_fused, scaling._quantize_by_steps)
    )
    for part in ("values", "elements", "block_scales"):
        same_bits(getattr(found, part), getattr(wanted, part))
    assert found.values.isnan().sum() == 32


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("amax", [0.0, 1e-30, 3.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_scale(format, amax, dtype):
    x = (torch.randn(5000).clamp(-1, 1) * 1.5 * amax).to(dtype)  # what is above amax saturates
    x[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    scale = TensorScaling(format).scale(torch.tensor(amax))
    same_bits(scaling._round_fused(format, x, scale, None),
              scaling._round_by_steps(format, x, scale, None))  # fmt: skip
