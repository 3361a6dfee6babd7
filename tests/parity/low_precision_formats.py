"""Blocks, scales and elements against the definitions and against torchao, a million values each.

    python -m tests.parity.low_precision_formats

Definitions: every number of a format is listed and the nearest one taken, in exact fractions; the
OCP specification's scale is computed with Python's `math.frexp`. torchao is compared where it is
installed.
"""

import hashlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron.core.low_precision.scaling import (
    BlockScaling,
    Quantized,
    TwoLevelScaling,
    round_to_e2m1,
    torch_cast,
)
from megatron.core.settings.command_line import NoFlags, read_command_line
from tests.parity.low_precision_emulation import (
    E2M1,
    E4M3,
    E5M2,
    ElementFormat,
    e8m0_codes,
    pack_pairs,
)

BLOCK = 32


def values(count: int, seed: int = 0) -> Tensor:
    """Return numbers of all magnitudes that blocks meet, fp32 [count / 1024, 1024], in bf16."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count // 1024, 1024, generator=generator)
    spread = torch.randint(-40, 40, (count // 1024, 1024 // BLOCK, 1), generator=generator)
    x = (x.view(len(x), -1, BLOCK) * torch.exp2(spread.float())).view_as(x)
    x[0, :BLOCK] = 0.0
    return x.bfloat16().float()


def nearest(x: Tensor, format: ElementFormat) -> Tensor:
    """Round x [...] by the list of all numbers: nearest, ties to the even code, saturating."""
    codes = torch.arange(2 ** (format.bits - 1), dtype=torch.uint8)
    numbers = format.decode(codes)
    numbers = numbers[numbers.isfinite()].double()
    middles = (numbers[1:] + numbers[:-1]) / 2
    magnitude = x.double().abs().flatten()
    above = torch.bucketize(magnitude, middles, right=False)
    at_or_above = torch.bucketize(magnitude, middles, right=True)
    # Between the two only at a middle: one of the neighbours has an even code.
    code = torch.where(above % 2 == 0, above, at_or_above)
    return torch.copysign(numbers[code].view_as(x).to(x.dtype), x)


def specified_scales(x: Tensor, format: ElementFormat, rounds_up: bool) -> Tensor:
    """Return the codes of the scales of blocks of 32 of x [rows, k], by Python's arithmetic."""
    codes = []
    for amax in x.view(-1, BLOCK).abs().amax(1).tolist():
        if amax == 0:
            codes.append(0)
            continue
        if rounds_up:
            fraction, exponent = math.frexp(amax / format.largest)
            exponent -= fraction == 0.5
        else:
            exponent = math.frexp(amax)[1] - 1 - format.highest_exponent
        codes.append(min(max(exponent + 127, 0), 254))
    return torch.tensor(codes, dtype=torch.uint8).view(len(x), -1)


def by_definition(count: int) -> Iterator[tuple[str, bool]]:
    """Yield what was compared and whether every bit agreed."""
    x = values(count)
    for format in (E4M3, E5M2, E2M1):
        scaled = x.view(-1, BLOCK) / x.view(-1, BLOCK).abs().amax(1, keepdim=True).clamp(min=1e-30)
        scaled = scaled * format.largest * 1.1
        yield f"{format.name} elements", torch.equal(format.round(scaled), nearest(scaled, format))
        if format.dtype is None:
            yield (
                f"{format.name} rounding",
                torch.equal(round_to_e2m1(scaled), nearest(scaled, format)),
            )
            continue
        cast = torch_cast(scaled, torch.ones(()), format.dtype)
        yield f"{format.name} cast", torch.equal(format.encode(scaled), cast.view(torch.uint8))
        for rounds_up in (False, True):
            scaling = BlockScaling(format.dtype, BLOCK, is_e8m0=True, rounds_up=rounds_up)
            found = scaling.quantize(x)
            assert found.block_scales is not None
            expected = specified_scales(x, format, rounds_up)
            kind = "up" if rounds_up else "down, as specified"
            same = torch.equal(e8m0_codes(found.block_scales), expected)
            yield f"{format.name} scales of 32, {kind}", same


def own(count: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the codes of blocks of 32, and of NVFP4: name, uint8 [...]."""
    x = values(count)
    for format in (E4M3, E5M2):
        assert format.dtype is not None
        for mode, rounds_up in (("RCEIL", True), ("FLOOR", False)):
            found = BlockScaling(format.dtype, BLOCK, is_e8m0=True, rounds_up=rounds_up).quantize(x)
            assert found.block_scales is not None
            yield f"MX {format.name} scales, {mode}", e8m0_codes(found.block_scales)
            yield f"MX {format.name} elements, {mode}", format.encode(elements(found))
    x = normal_values(x)
    found = TwoLevelScaling().quantize(x, x.abs().amax())
    assert found.block_scales is not None
    yield "NVFP4 scales", E4M3.encode(found.block_scales)
    yield "NVFP4 elements", pack_pairs(E2M1.encode(elements(found)))


def elements(found: Quantized) -> Tensor:
    """Return the elements [rows, k] of an operand with scales per block of a row."""
    scales = found.block_scales
    assert scales is not None
    spread = scales.repeat_interleave(found.data.shape[1] // scales.shape[1], 1)
    return torch.where(spread == 0, 0.0, found.data / spread)


def normal_values(like: Tensor) -> Tensor:
    """Return numbers as activations are, in bf16."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(like.shape, generator=generator).bfloat16().float()


def digest(codes: Tensor) -> str:
    """Return a short hash of codes."""
    return hashlib.sha256(codes.flatten().numpy().tobytes()).hexdigest()[:16]


def against_torchao(count: int) -> Iterator[tuple[str, bool]]:
    """Yield the same for torchao's MX and NVFP4 tensors."""
    for (name, codes), theirs in zip(own(count), torchaos(count), strict=True):
        yield f"{name} as torchao's", torch.equal(codes.flatten(), theirs.flatten())


def torchaos(count: int) -> Iterator[Tensor]:
    """Yield torchao's codes in the order of `own`."""
    from torchao.prototype.mx_formats import mx_tensor, nvfp4_tensor

    x = values(count)
    modes = mx_tensor.ScaleCalculationMode
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for mode in (modes.RCEIL, modes.FLOOR):
            scales, data = mx_tensor.to_mx(x, dtype, BLOCK, mode)
            yield scales.view(torch.uint8)
            yield data.view(torch.uint8)
    x = normal_values(x)
    scale = nvfp4_tensor.per_tensor_amax_to_scale(x.abs().amax())
    whole = nvfp4_tensor.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
    yield whole.scale.view(torch.uint8)
    yield whole.qdata.view(torch.uint8)


def main() -> int:
    """Print the table; 1 if something differs."""
    read_command_line(NoFlags, description=__doc__)
    count = 2**20
    tables: list[Callable[[int], Iterator[tuple[str, bool]]]] = [by_definition]
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed")
    else:
        tables.append(against_torchao)
    status = 0
    for table in tables:
        for name, same in table(count):
            print(f"{name:45} {'equal' if same else 'DIFFERENT'}")
            status |= not same
    return status


if __name__ == "__main__":
    sys.exit(main())
