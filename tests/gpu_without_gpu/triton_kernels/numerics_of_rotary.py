"""Rotary embedding by Triton's interpreter against the plain passes."""

import pytest
import torch

from megatron.core.kernels.rotary import joined_latent_rotation, passes_of_rotation
from megatron.core.kernels.triton_kernels import rotary
from megatron.core.transformer.yarn import yarn_attention_factor, yarn_inverse_frequencies
from tests.gpu_without_gpu.triton_kernels.comparing import TOLERANCE_OF, compare

B = 2


def angles(s, samples, channels, interleaved, dtype, *, stretched=False):
    """Return cosine and sine [s, samples, 1, channels] of random positions; `stretched` by YaRN."""
    settings = dict(original_context=512, beta_fast=32.0, beta_slow=1.0)
    factor = 16.0 if stretched else 1.0
    inverse = yarn_inverse_frequencies(channels, 10000.0, factor=factor, **settings)
    freqs = torch.randint(5000, (s, samples, 1, 1)) * inverse
    if interleaved:
        freqs = freqs.repeat_interleave(2, -1)
    else:
        freqs = torch.cat((freqs, freqs), -1)
    strength = yarn_attention_factor(factor)
    return tuple((turn * strength).to(dtype) for turn in (freqs.cos(), freqs.sin()))


ROTATIONS = {
    "whole heads": dict(n=3, d=16, r=16),
    "one head, odd number of pairs": dict(n=1, d=6, r=6),
    "part of a head": dict(n=5, d=20, r=12),
    "a quarter, as NeoX": dict(n=4, d=96, r=24),
    "a position for each sample": dict(n=3, d=16, r=16, samples=B),
    "more heads than a program takes": dict(n=40, d=128, r=128),
    "stretched": dict(n=3, d=64, r=64, stretched=True),
}


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("name", ROTATIONS)
def test_rotation(name, interleaved, dtype):
    check_rotation(interleaved, dtype, **ROTATIONS[name])


def check_rotation(interleaved, dtype, n, d, r, samples=1, stretched=False):
    cos, sin = angles(7, samples, r, interleaved, dtype, stretched=stretched)
    compare(lambda x: rotary.rotation(x, cos, sin, interleaved),
            lambda x: passes_of_rotation(x, cos, sin, interleaved),
            [torch.randn(7, B, n, d).to(dtype)], TOLERANCE_OF[dtype])  # fmt: skip


@pytest.mark.parametrize("interleaved", [False, True])
def test_heads_of_a_packed_projection_are_rotated_where_they_lie(interleaved):
    """As `SelfAttention.get_rotated_qkv`: groups of three query heads, a key and a value."""
    cos, sin = angles(5, 1, 16, interleaved, torch.float32)
    five = cos.unsqueeze(2), sin.unsqueeze(2), interleaved
    compare(lambda x: rotary.rotation(x.view(5, B, 2, 5, 16).narrow(3, 0, 4), *five),
            lambda x: passes_of_rotation(x.view(5, B, 2, 5, 16).narrow(3, 0, 4), *five),
            [torch.randn(5, B, 160)], TOLERANCE_OF[torch.float32])  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("n", "d", "p", "stretched"), [(1, 8, 4, False), (5, 24, 12, True), (20, 128, 64, True)]
)
def test_rotation_of_latent_attention(n, d, p, stretched, interleaved, dtype):
    cos, sin = angles(5, 1, p, interleaved, dtype, stretched=stretched)
    e = d + 8

    def at(run):
        def heads(query, keys_and_values, shared):
            key, _ = keys_and_values.split([d, e], -1)  # strided, as the model has it
            return run(query, key, shared, cos, sin, interleaved)

        return heads

    shapes = (5, B, n, d + p), (5, B, n, d + e), (5, B, p)
    inputs = [torch.randn(shape).to(dtype) for shape in shapes]
    compare(at(rotary.latent_rotation), at(joined_latent_rotation), inputs, TOLERANCE_OF[dtype],
            sums=(2,))  # fmt: skip
