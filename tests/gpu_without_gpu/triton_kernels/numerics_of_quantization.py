"""The cast with one scale by Triton's interpreter: the codes of torch's cast, bit for bit."""

import pytest
import torch

from megatron.core.kernels import triton_kernels
from megatron.core.low_precision.scaling import TensorScaling, torch_cast


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("amax", [0.0, 1e-20, 3.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["rows", "transposed", "cut"])
def test_one_scale(format, amax, dtype, layout):
    # Triton's interpreter does not read bf16 numbers below the normal range.
    x = torch.randn(50, 100) * torch.logspace(-12, 0.3, 50)[:, None]
    x = (x.clamp(-1.5, 1.5) * amax).to(dtype)  # what is above amax saturates
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    x = {"rows": x, "transposed": x.t(), "cut": x[:, :37]}[layout]
    scale = TensorScaling(format).scale(torch.tensor(amax))
    found = triton_kernels.deferred("quantization", "scaled_cast")(x, scale, format)
    wanted = torch_cast(x, scale, format)
    assert found.dtype == format
    assert (found.t() if layout == "transposed" else found).is_contiguous()
    is_nan = wanted.float().isnan()
    assert torch.equal(found.float().isnan(), is_nan)
    assert torch.equal(found.view(torch.uint8)[~is_nan], wanted.view(torch.uint8)[~is_nan])


@pytest.mark.parametrize("format", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_number_of_the_format_and_every_tie(format):
    codes = torch.arange(256, dtype=torch.uint8).view(format).float()
    numbers = codes[codes.isfinite()].unique()
    x = torch.cat((numbers, (numbers[1:] + numbers[:-1]) / 2)).view(1, -1)
    one = torch.ones(())
    found = triton_kernels.deferred("quantization", "scaled_cast")(x, one, format)
    assert torch.equal(found.float(), torch_cast(x, one, format).float())
