"""Formats, scales, recipes, products against their emulation.

A million values: `python -m tests.parity.low_precision_formats`.
"""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.kernels.registry import Request
from megatron.core.low_precision import quantized_linear
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.hadamard import rotate
from megatron.core.low_precision.quantized_linear import (
    BLOCK_SCALES,
    LOW_PRECISION_PRODUCTS,
    QuantizedLinear,
    dequantized_product,
    scaled_mm,
)
from megatron.core.low_precision.recipes import Operand, fp4_recipe, fp8_recipe
from megatron.core.low_precision.scaling import Cut, TensorScaling
from megatron.core.step_context.context import AuxLossScale, within_step
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.low_precision_layers import multiplies_in_low_precision
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import BF16_ROUNDED_ONCE, FP32_REORDERED_SUM, assert_close
from tests.parity.low_precision_emulation import E4M3, E5M2, emulated_product
from tests.parity.low_precision_formats import by_definition, digest, own

# Digests of the codes that torchao 0.18 computes from the same values.
TORCHAO = {
    "MX e4m3 scales, RCEIL": "8dca9a05d086e9c3",
    "MX e4m3 elements, RCEIL": "01c91b3c4e508033",
    "MX e4m3 scales, FLOOR": "d4781ee260952cb0",
    "MX e4m3 elements, FLOOR": "bda816c22bc455b0",
    "MX e5m2 scales, RCEIL": "6801ca42f46e100c",
    "MX e5m2 elements, RCEIL": "e0f2f730ae3db015",
    "MX e5m2 scales, FLOOR": "eaef3aa7f9864173",
    "MX e5m2 elements, FLOOR": "d89cc513137afc1e",
    "NVFP4 scales": "ce19644c6c787a92",
    "NVFP4 elements": "d95182ec65a6b84c",
}


def test_elements_and_scales_are_those_of_the_definitions():
    different = [name for name, same in by_definition(2**15) if not same]
    assert not different


def test_codes_are_those_of_torchao():
    assert {name: digest(codes) for name, codes in own(2**15)} == TORCHAO


RECIPES = {
    **{kind: fp8_recipe(kind, "hybrid") for kind in ("tensorwise", "blockwise", "mxfp8")},
    "nvfp4": fp4_recipe("nvfp4"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32, 64, 128), (5, 7, 37), (1, 3, 1), (0, 4, 8), (4, 3, 0)])
@pytest.mark.parametrize("kind", RECIPES)
def test_products_are_those_of_the_emulation(kind, shape, dtype):
    torch.manual_seed(0)
    rows, columns, width = shape
    x, y = torch.randn(rows, width, dtype=dtype), torch.randn(columns, width, dtype=dtype)
    operands = []
    for operand, values in ((Operand.GRADIENT, x), (Operand.WEIGHT, y)):
        scaling = RECIPES[kind].scalings[operand]
        amax = quantized_linear.largest_magnitude(values)
        operands.append(scaling.quantize(values, amax if scaling.needs_amax else None))
    left, right = operands
    factors = [part.factor for part in operands if part.factor is not None]
    factor = torch.stack(factors).double().prod() if factors else torch.ones(())
    expected = emulated_product(left.data, right.data, factor)
    tolerance = FP32_REORDERED_SUM if dtype == torch.float32 else BF16_ROUNDED_ONCE
    runs = (
        [dequantized_product] if left.block_scales is not None else [scaled_mm, dequantized_product]
    )
    for run in runs:
        found = run(left, right, dtype, False)
        assert found.dtype == dtype
        assert_close(found, expected, tolerance, run.__name__)


@pytest.mark.parametrize("format", [E4M3, E5M2], ids=lambda format: format.name)
def test_operands_with_one_scale_have_the_codes_of_the_emulation(format):
    torch.manual_seed(0)
    x = torch.randn(64, 64) * torch.logspace(-30, 5, 64)[:, None]
    scaling, amax = TensorScaling(format.dtype, margin=1), x.abs().amax()
    found = scaling.quantize(x, amax).data.view(torch.uint8)
    assert torch.equal(found, format.encode(x * scaling.scale(amax)))


@pytest.mark.parametrize("shape", [(16, 32), (7, 37)])
def test_padding_to_the_tiles_of_a_gpu_does_not_change_a_product(shape):
    x = torch.randn(shape).to(torch.float8_e4m3fn)
    padded = quantized_linear._padded(x, 16, 16)
    assert all(size % 16 == 0 for size in padded.shape)
    assert torch.equal(padded[: shape[0], : shape[1]].float(), x.float())
    assert padded.float().abs().sum() == x.float().abs().sum()


def test_forward_products_alone_sum_fast(monkeypatch):
    calls = []
    product = torch._scaled_mm

    def recording(a, b, **options):
        assert b.t().is_contiguous()  # what a GPU takes: the second operand column by column
        calls.append(options["use_fast_accum"])
        return product(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", recording)
    x, weight, grad = torch.randn(4, 2, 16), torch.randn(8, 16), torch.randn(4, 2, 8)
    quantized = QuantizedLinear(
        recipe=fp8_recipe("tensorwise", "hybrid"), tp=SINGLE_RANK, cp=SINGLE_RANK, split_dim=None
    )
    context = quantized.context(x, None, records=True)
    assert quantized.forward(x, weight, context).shape == (4, 2, 8)
    assert quantized.input_gradient(grad, weight, context).shape == (4, 2, 16)
    assert quantized.weight_gradient(grad, x, context).shape == (8, 16)
    assert calls == [True, False, False]


@pytest.mark.parametrize(
    ("dtype", "needs", "why_not", "kernel", "reasons"),
    [
        ("bfloat16", (), None, "scaled-mm", ""),
        ("bfloat16", (), "needs X", "dequantized", "scaled-mm needs X"),
        ("bfloat16", (BLOCK_SCALES,), None, "dequantized",
         "scaled-mm does not support scales per block"),
        ("float64", (), None, "dequantized",
         "scaled-mm computes in bfloat16, float16, float32, not in float64"),
    ],
)  # fmt: skip
def test_what_torch_cannot_multiply_is_dequantized_with_a_reason(
    monkeypatch, dtype, needs, why_not, kernel, reasons
):
    fp8 = LOW_PRECISION_PRODUCTS.of_device("cuda")[0]
    monkeypatch.setitem(fp8.__dict__, "missing", lambda: why_not)
    choice = LOW_PRECISION_PRODUCTS._choose(Request("cuda", dtype, frozenset(needs)), ())
    assert (choice.kernel.name, choice.reasons) == (kernel, reasons)


def test_a_rotation_of_both_operands_leaves_their_product():
    torch.manual_seed(0)
    x, y = torch.randn(3, 40).double(), torch.randn(5, 40).double()
    torch.testing.assert_close(rotate(x) @ rotate(y).t(), x @ y.t())


def test_a_step_that_overflows_leaves_the_scale_as_it_was():
    history = AmaxHistory(torch.nn.Module(), "amax_history", 2, uses_largest=True)
    assert history.amax(2) == 0
    for amax in (8.0, float("inf"), 2.0):
        history.record(2, torch.tensor(amax))
        history.move(history.take_step())
    assert history.steps[:, 2].tolist() == [2.0, 8.0]
    assert history.amax(2) == 8.0


@pytest.mark.parametrize("kind", ["delayed", "tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("unit", [1 / 8, 1 / 6, 3 / 2, 3.0])
def test_gradients_are_rounded_at_the_same_steps_whatever_the_layout_multiplies_the_loss_with(
    kind, unit
):
    torch.manual_seed(0)
    weight, x, grad = torch.randn(8, 16), torch.randn(4, 1, 16), torch.randn(4, 1, 8) / 400
    recipe = fp8_recipe(kind, "e4m3")

    def gradients(unit: float) -> tuple[torch.Tensor, torch.Tensor]:
        history = AmaxHistory(torch.nn.Module(), "amax_history", 1, uses_largest=False)
        quantized = QuantizedLinear(
            recipe=recipe, tp=SINGLE_RANK, cp=SINGLE_RANK, split_dim=None,
            history=history if recipe.uses_history else None,
        )  # fmt: skip
        with within_step(aux_loss_scale=AuxLossScale(unit)):
            context = quantized.context(x, None, records=True)
        own = grad.double() * unit
        return (
            quantized.input_gradient(own, weight.double(), context) / unit,
            quantized.weight_gradient(own, x.double(), context) / unit,
        )

    for found, expected in zip(gradients(unit), gradients(1.0), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("total", [96, 120, 192, 240])
def test_ranks_agree_on_which_blocks_they_share(ranks, total):
    """A rank that saw none shared would not come to the all-reduce of the others."""

    def cut(rank: int) -> Cut:
        positions = SequenceShard.zigzag(total, rank, ranks).positions()
        return Cut(positions, total, total // (2 * ranks), largest=lambda x: x)

    for block in (16, 32, 128):
        owners = [set((cut(rank).positions // block).tolist()) for rank in range(ranks)]
        shared = sum(len(blocks) for blocks in owners) > len(set().union(*owners))
        answers = {cut(rank).keeps_whole(block) for rank in range(ranks)}
        assert len(answers) == 1
        assert not (shared and answers.pop())


def config(**settings) -> TransformerConfig:
    return TransformerConfig(num_layers=6, hidden_size=16, num_attention_heads=2, **settings)


def test_first_and_last_layers_keep_the_dtype_of_the_model():
    some = config(fp8="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2)
    assert [n for n in range(1, 8) if multiplies_in_low_precision(some, n)] == [3, 4, 5]
    every = config(fp8="e4m3")
    assert all(multiplies_in_low_precision(every, n) for n in range(1, 7))


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"fp8": "e4m3", "fp4": "e2m1"}, "--fp4-format"),
        ({"fp8": "e4m3", "mlp_chunks_for_training": 2}, "--mlp-chunks-for-training"),
        ({"fp8": "e4m3", "fp8_amax_history_len": 0}, "--fp8-amax-history-len"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(settings, flag):
    with pytest.raises(ConfigError, match=flag):
        config(**settings)
