"""State in few bytes: error bounds, no drift, no division by zero, exact resume."""

import pytest
import torch

from megatron.core.distributed.sharding_arithmetic import BLOCK
from megatron.core.optimizer.state_codec import (
    codec_of,
    join_remainder,
    random_bits,
    split_remainder,
)
from tests.harness.tolerances import EXACT, assert_close

SPACING = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.uint8: 2.0**-3}
"""Of neighbouring numbers, relative to the smaller one at most."""
KINDS = [(dtype, second) for dtype in SPACING for second in (False, True)]


def values(second: bool, num_blocks: int = 40) -> torch.Tensor:
    """Return values as moments have them: blocks of very different sizes, within blocks too."""
    generator = torch.Generator().manual_seed(8)
    drawn = torch.randn(num_blocks, BLOCK, generator=generator)
    within = torch.logspace(-2, 0, BLOCK)
    across = torch.logspace(-12, 3, num_blocks).unsqueeze(1)
    drawn = drawn * within * across
    return drawn.square() if second else drawn


def noise_of(shape: torch.Size, step: int = 1) -> torch.Tensor:
    positions = torch.arange(shape.numel(), dtype=torch.int32).view(shape)
    return random_bits(positions, step)


def store(codec, tensor, noise=None):
    stored = torch.zeros(tensor.shape[0], codec.block_bytes, dtype=torch.uint8)
    codec.encode(tensor.clone(), stored, noise)
    return stored


@pytest.mark.parametrize(("dtype", "second"), KINDS)
@pytest.mark.parametrize("step", [None, 1])
def test_an_error_is_less_than_the_spacing_of_the_type(dtype, second, step):
    codec, tensor = codec_of(dtype, is_second_moment=second), values(second)
    noise = None if step is None else noise_of(tensor.shape, step)
    decoded = codec.decode(store(codec, tensor, noise))
    # Rounding at random may take the farther neighbour; roots are squared: twice the error.
    bound = SPACING[dtype] * (1.0 if noise is not None else 0.5)
    exact, found = (tensor.sqrt(), decoded.sqrt()) if second else (tensor, decoded)
    if dtype == torch.bfloat16 and second:
        exact, found = tensor, decoded
    limit = bound * exact.abs()
    if dtype != torch.bfloat16:
        smallest = {torch.float16: 2.0**-39, torch.uint8: 2.0**-17}[dtype]
        limit = limit + 2 * smallest * exact.abs().amax(1, keepdim=True)
    assert ((found - exact).abs() <= limit * (1 + 1e-6)).all()


@pytest.mark.parametrize(("dtype", "second"), KINDS)
def test_what_was_decoded_is_encoded_without_a_change(dtype, second):
    codec, tensor = codec_of(dtype, is_second_moment=second), values(second)
    once = codec.decode(store(codec, tensor, noise_of(tensor.shape)))
    for noise in (None, noise_of(tensor.shape, 2)):
        assert_close(codec.decode(store(codec, once, noise)), once, EXACT, "decoded values")


@pytest.mark.parametrize("dtype", SPACING)
def test_a_moving_average_does_not_get_stuck(dtype):
    """Decay 0.999 towards a constant: rounded to nearest, bf16 and fp8 stay where they are."""
    codec = codec_of(dtype, is_second_moment=True)
    rounded, exact = (torch.ones(64, BLOCK) for _ in range(2))
    for step in range(1000):
        exact.mul_(0.999).add_(0.001 * 0.01)
        rounded = codec.decode(store(codec, rounded, None)) if step == 0 else rounded
        noise = noise_of(rounded.shape, step)
        rounded = codec.decode(store(codec, rounded.mul_(0.999).add_(0.001 * 0.01), noise))
    assert float(exact.mean()) == pytest.approx(0.374, abs=1e-3)
    # The mean over 8192 walks of a thousand steps of random size below the spacing; squares of
    # roots are larger in the mean by their variance, at most 2^-8 a step and mostly decayed.
    assert float(rounded.mean()) == pytest.approx(float(exact.mean()), rel=0.06)


@pytest.mark.parametrize("dtype", [torch.float16, torch.uint8])
def test_a_second_moment_that_is_not_zero_never_becomes_zero(dtype):
    codec = codec_of(dtype, is_second_moment=True)
    tensor = torch.full((1, BLOCK), 1e-30)
    tensor[0, 0], tensor[0, 1] = 1.0, 0.0
    for noise in (None, noise_of(tensor.shape)):
        decoded = codec.decode(store(codec, tensor, noise))
        assert float(decoded[0, 1]) == 0.0
        assert (decoded[0, 2:] > 0).all()


def test_random_bits_are_a_function_of_place_and_step():
    positions = torch.arange(1 << 16, dtype=torch.int32)
    first = random_bits(positions, 3)
    assert torch.equal(first[500:600], random_bits(positions[500:600], 3))
    assert (first == random_bits(positions, 4)).float().mean() < 1e-3
    for bit in range(32):
        share = float(((first >> bit) & 1).float().mean())
        # 5 standard deviations of a fair coin.
        assert abs(share - 0.5) < 5 * 0.5 / 2**8


def test_a_main_weight_is_its_rounded_half_and_a_remainder_to_the_bit():
    generator = torch.Generator().manual_seed(9)
    main = torch.randn(100_000, generator=generator) * torch.logspace(-30, 30, 100_000)
    ties = torch.tensor([1.00390625, -1.00390625, 1.01171875, 0.0, -0.0])
    for tensor in (main, ties):
        upper, lower = split_remainder(tensor)
        assert_close(join_remainder(upper, lower), tensor, EXACT, "main weight")
        error = (upper.float() - tensor).abs()
        assert (error <= (tensor.bfloat16().float() - tensor).abs()).all()
