"""Which kernels of norms, activations, losses and grouped products are chosen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.kernels import gated_activation as gates
from megatron.core.kernels import norms
from megatron.core.kernels.grouped_products import GROUPED_PRODUCTS, loop
from megatron.core.kernels.registry import Request
from megatron.core.kernels.vocab_softmax import elementwise_softmax, torch_softmax
from megatron.core.models.common.language_module.language_module import LOSS, SOFTCAP
from megatron.core.tensor_parallel.vocab_embedding import index_add, sorted_index_put
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

CHOICES = [
    (norms.RMS_NORM, "float32", (), "torch", "torch"),
    (norms.RMS_NORM, "float32", (norms.TRAINING,), "cpu-three-pass", "torch"),
    (norms.RMS_NORM, "float32", (norms.WEIGHT_DTYPE,), "cpu-three-pass", "torch"),
    (norms.RMS_NORM, "bfloat16", (), "cpu-three-pass", "torch"),
    (norms.LAYER_NORM, "float32", (norms.TRAINING,), "torch", "torch"),
    (norms.LAYER_NORM, "bfloat16", (norms.TRAINING,), "cpu-fp32-sums", "torch"),
    (gates.GATED, "bfloat16", (), "fused-keeping", "fused-recomputing"),
    (gates.GATED, "bfloat16", (gates.CLAMP,), "plain", "plain"),
    (LOSS, "float32", (SOFTCAP,), "vocab-parallel", "vocab-parallel"),
    (GROUPED_PRODUCTS, "float32", (), "loop", "loop"),
    (GROUPED_PRODUCTS, "bfloat16", (), "loop", "torch-grouped-mm"),
]


@pytest.mark.parametrize(("table", "dtype", "needs", "on_cpu", "on_gpu"), CHOICES)
def test_each_device_has_its_own_preference(monkeypatch, table, dtype, needs, on_cpu, on_gpu):
    monkeypatch.setattr(F, "grouped_mm", None, raising=False)  # as if torch were new enough
    for device, wanted in (("cpu", on_cpu), ("cuda", on_gpu)):
        assert table._choose(Request(device, dtype, frozenset(needs)), ()).kernel.name == wanted


def test_the_gates_of_both_devices_compute_the_same():
    packed = torch.randn(5, 12, requires_grad=True)
    results = []
    for run in (gates.keeping_gate, gates.recomputing_gate, gates.plain_gate):
        out = run(packed, gates.Gate(F.silu))
        results.append((out, *torch.autograd.grad(out.square().sum(), packed)))
    for result in results[1:]:
        for ours, expected in zip(result, results[0], strict=True):
            assert_close(ours, expected, FP32_REORDERED_SUM, "gate")


def test_the_softmaxes_of_both_devices_compute_the_same():
    logits = torch.randn(4, 9)
    found = []
    for run in (torch_softmax, elementwise_softmax):
        out = torch.empty(4, 9)
        found.append((*run(logits, out), out))
    for ours, expected in zip(*found, strict=True):
        assert_close(ours, expected, FP32_REORDERED_SUM, "softmax")


def test_the_row_sums_of_both_devices_compute_the_same():
    rows, values = torch.tensor([0, 3, 0]), torch.randn(3, 2)
    tables = [torch.zeros(4, 2), torch.zeros(4, 2)]
    for table, run in zip(tables, (index_add, sorted_index_put), strict=True):
        run(table, rows, values)
    assert torch.equal(*tables)


def test_a_loop_of_products_leaves_out_groups_without_rows():
    x, matrices = torch.randn(3, 2), [torch.randn(2, 4) for _ in range(3)]
    expected = torch.cat((x[:1] @ matrices[0], x[1:] @ matrices[2]))
    assert_close(loop(x, [1, 0, 2], matrices), expected, FP32_REORDERED_SUM, "products")
