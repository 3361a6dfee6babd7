"""Rotary positions: the rotation, its gradient, and the angles."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    RotaryEmbedding,
    apply_rotary_pos_emb,
)
from megatron.core.transformer.rotary import cos_sin, rotate
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, FP32_ROUNDED_ONCE, assert_close


def complex_rotation(x, angles, interleaved):
    """Rotate with complex numbers in fp64: the textbook definition."""
    rotated = angles.shape[-1]
    part = x[..., :rotated].double()
    if interleaved:
        z = torch.complex(part[..., 0::2], part[..., 1::2])
        turn = angles[..., 0::2].double()
    else:
        z = torch.complex(*part.chunk(2, -1))
        turn = angles[..., : rotated // 2].double()
    z = z * torch.polar(torch.ones_like(turn), turn)
    if interleaved:
        out = torch.stack((z.real, z.imag), -1).flatten(-2)
    else:
        out = torch.cat((z.real, z.imag), -1)
    return torch.cat((out, x[..., rotated:].double()), -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rotation_is_multiplication_by_a_complex_phase(interleaved, percent):
    angles = RotaryEmbedding(16, percent, rotary_interleaved=interleaved)(10)
    x = torch.randn(10, 2, 3, 16)
    cos, sin = cos_sin(angles, torch.float32)
    expected = complex_rotation(x, angles, interleaved)
    assert_close(rotate(x, cos, sin, interleaved), expected, FP32_ROUNDED_ONCE, "rotated")


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_of_the_rotation_passes_gradcheck(interleaved):
    angles = RotaryEmbedding(8, 0.5, rotary_interleaved=interleaved)(5)
    cos, sin = cos_sin(angles, torch.float64)
    x = torch.randn(5, 2, 2, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: rotate(t, cos, sin, interleaved), x)


def test_rotation_reads_strided_views_without_changing_them():
    packed = torch.randn(6, 2, 4, 3, 8)
    view = packed[..., 1, :]
    before = packed.clone()
    cos, sin = cos_sin(RotaryEmbedding(8)(6), torch.float32)
    assert torch.equal(rotate(view, cos, sin), rotate(view.contiguous(), cos, sin))
    assert torch.equal(packed, before)


def test_offset_and_interpolation_move_and_stretch_positions():
    plain = RotaryEmbedding(8)
    assert torch.equal(plain(4, offset=3), plain(7)[3:])
    stretched = RotaryEmbedding(8, seq_len_interpolation_factor=2.0)
    assert_close(stretched(8)[::2], plain(4), FP32_ROUNDED_ONCE, "angles of even positions")


@pytest.mark.parametrize(("factor", "base"), [(8.0, 500000.0), (32.0, 500000.0)])
def test_frequency_band_scaling_equals_that_of_hugging_face(factor, base):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": base,
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    )
    expected = LlamaRotaryEmbedding(config).inv_freq
    ours = RotaryEmbedding(128, rotary_base=base, rope_scaling=True, rope_scaling_factor=factor)
    assert_close(ours.inv_freq, expected, FP32_REORDERED_SUM, "inverse frequencies")


def test_converting_the_model_to_bf16_does_not_round_the_angles():
    embedding = RotaryEmbedding(16)
    before = embedding(64).clone()
    embedding.bfloat16()
    assert torch.equal(embedding(64), before)
    assert not embedding.state_dict()


def test_apply_rotary_pos_emb_has_megatrons_call():
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    x, angles = torch.randn(6, 1, 2, 8), RotaryEmbedding(8)(6)
    expected = complex_rotation(x, angles, interleaved=False)
    assert_close(apply_rotary_pos_emb(x, angles, config), expected, FP32_ROUNDED_ONCE, "rotated")


@pytest.mark.parametrize(("channels", "percent"), [(8, 0.1), (6, 0.5)])
def test_an_odd_or_empty_set_of_rotating_channels_is_refused(channels, percent):
    with pytest.raises(ConfigError, match="channels rotate in pairs"):
        RotaryEmbedding(channels, percent)
