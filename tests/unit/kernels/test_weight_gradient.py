"""Products that add to an fp32 main gradient: which kernel, and what it must compute."""

import pytest
import torch

from megatron.core.kernels import weight_gradient
from megatron.core.kernels.registry import Request
from megatron.core.kernels.weight_gradient import OTHER_SUM, WEIGHT_GRADIENT, in_one_product
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

HALVES = (torch.bfloat16, torch.float16)


def parameter_of(rows, columns, *, fresh):
    parameter = torch.nn.Parameter(torch.zeros(rows, columns, dtype=torch.bfloat16))
    parameter.main_grad = torch.full((rows, columns), torch.nan if fresh else 2.0)
    parameter.main_grad_is_fresh = fresh
    return parameter


def fp32_product(total, left, right, beta):
    """What torch's operator does on a GPU: a beta of zero does not read the sum."""
    product = left.float() @ right.float()
    total.copy_(product if beta == 0 else total + product)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("fresh", [True, False])
def test_one_product_overwrites_a_fresh_gradient_and_adds_to_others(monkeypatch, fresh, dtype):
    monkeypatch.setattr(weight_gradient, "_add_product", fp32_product)
    parameter = parameter_of(3, 5, fresh=fresh)
    left, right = torch.randn(7, 3).to(dtype).t(), torch.randn(7, 5).to(dtype)
    in_one_product(parameter, left, right)
    expected = left.double() @ right.double() + (0.0 if fresh else 2.0)
    assert_close(parameter.main_grad, expected, FP32_REORDERED_SUM, "main gradient")
    assert not parameter.main_grad_is_fresh


def test_a_gpu_adds_half_precision_products_to_fp32_sums_alone(monkeypatch):
    monkeypatch.setattr(weight_gradient, "_missing", lambda: None)
    for dtype, needs, wanted in (
        ("bfloat16", (), "addmm-into-fp32"),
        ("float16", (), "addmm-into-fp32"),
        ("bfloat16", (OTHER_SUM,), "product-and-sum"),
        ("float32", (OTHER_SUM,), "product-and-sum"),
    ):
        assert WEIGHT_GRADIENT._choose(Request("cuda", dtype, frozenset(needs)), ()).name == wanted
    assert WEIGHT_GRADIENT._choose(Request("cpu", "bfloat16"), ()).name == "product-and-sum"


def wrong_product(total, left, right, beta):
    fp32_product(total, left, right, 1)


def refused_product(total, left, right, beta):
    raise RuntimeError("out_dtype is not supported\nfor this device")


@pytest.mark.parametrize(
    ("product", "reason"),
    [
        (fp32_product, None),
        (wrong_product, "torch's sums of torch.bfloat16 in fp32 are wrong"),
        (refused_product, "torch refuses torch.bfloat16 into fp32: out_dtype is not supported"),
    ],
)
def test_what_torch_does_with_the_operator_decides(monkeypatch, product, reason):
    monkeypatch.setattr(weight_gradient, "_add_product", product)
    assert weight_gradient._missing.__wrapped__() == reason
    monkeypatch.setattr(weight_gradient, "_missing", weight_gradient._missing.__wrapped__)
    choice = WEIGHT_GRADIENT._choose(Request("cuda", "bfloat16"), ())
    assert choice.reasons == ("" if reason is None else f"addmm-into-fp32 {reason}")


def test_a_torch_without_the_operator_is_named(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "addmm", torch.ops.aten.mm.default)
    assert weight_gradient._missing.__wrapped__() == "needs a torch whose addmm has an out_dtype"
