"""Which kernels of norms, activations, losses and grouped products are chosen."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron.core.foundation import optional_imports
from megatron.core.fusions.fused_bias_dropout import BIAS_DROPOUT_ADD
from megatron.core.kernels import gated_activation as gates
from megatron.core.kernels import norms, triton_kernels
from megatron.core.kernels.grouped_products import GROUPED_PRODUCTS, loop
from megatron.core.kernels.permutation import PERMUTATION
from megatron.core.kernels.registry import Kernel, KernelTable, Request
from megatron.core.kernels.rotary import LATENT_ROTARY, ROTARY, UNFUSED
from megatron.core.kernels.vocab_softmax import CROSS_ENTROPY, elementwise_softmax, torch_softmax
from megatron.core.low_precision.scaling import SCALED_CAST
from megatron.core.models.common.language_module.language_module import (
    LOSS,
    SOFTCAP,
    asked_loss,
)
from megatron.core.optimizer.chunked_state import CHUNK_UPDATES
from megatron.core.optimizer.definition import ADAM, ADAMW
from megatron.core.optimizer.definitions.adam import FP32_UPDATES
from megatron.core.optimizer.gradient_norm import SPAN_SQUARES
from megatron.core.parameters.rng import rng_state
from megatron.core.tensor_parallel import cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.vocab_embedding import index_add, sorted_index_put
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.norm import LayerNorm, RMSNorm
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.models.test_gpt_model import make_model

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
    (LOSS, "bfloat16", (), "vocab-parallel", "vocab-parallel"),
    (GROUPED_PRODUCTS, "float32", (), "loop", "loop"),
    (GROUPED_PRODUCTS, "bfloat16", (), "loop", "torch-grouped-mm"),
]


@pytest.mark.parametrize(("table", "dtype", "needs", "on_cpu", "on_gpu"), CHOICES)
def test_each_device_has_its_own_preference(monkeypatch, table, dtype, needs, on_cpu, on_gpu):
    monkeypatch.setattr(F, "grouped_mm", None, raising=False)  # as if torch were new enough
    for device, wanted in (("cpu", on_cpu), ("cuda", on_gpu)):
        assert table._choose(Request(device, dtype, frozenset(needs)), ()).kernel.name == wanted


@pytest.mark.parametrize("table", [norms.RMS_NORM, norms.LAYER_NORM])
def test_the_norms_of_apex_are_taken_where_they_are_installed(monkeypatch, table):
    planned = Request("cuda", "bfloat16", frozenset({norms.TRAINING}), is_planned=True)
    assert table.choose(planned).name == "apex if installed, else triton if installed, else torch"
    (apex,) = (kernel for kernel in table.of_device("cuda") if kernel.name == "apex")
    monkeypatch.setitem(vars(apex), "missing", lambda: None)
    here = Request("cuda", "bfloat16", frozenset({norms.TRAINING}))
    assert table._choose(here, ()).kernel is apex
    mixed = Request("cuda", "bfloat16", frozenset({norms.TRAINING, norms.WEIGHT_DTYPE}))
    assert table._choose(mixed, ()).kernel.name == "torch"


WRITTEN_IN_TRITON = [
    (norms.RMS_NORM, norms.ALL_NEEDS),
    (norms.LAYER_NORM, norms.ALL_NEEDS),
    (norms.ADDED_NORM, norms.ALL_NEEDS),
    (gates.GATED, ()),
    (SCALED_CAST, ()),
    (CHUNK_UPDATES, {ADAM}),
    (CHUNK_UPDATES, {ADAMW}),
    (FP32_UPDATES, ()),
    (SPAN_SQUARES, ()),
    (BIAS_DROPOUT_ADD, ()),
    (ROTARY, ()),
    (LATENT_ROTARY, ()),
    (PERMUTATION, ()),
    (CROSS_ENTROPY, ()),
]


@pytest.mark.parametrize(("table", "needs"), WRITTEN_IN_TRITON)
def test_kernels_in_triton_are_taken_on_an_accelerator_that_it_compiles_for(
    monkeypatch, table, needs
):
    monkeypatch.setattr(triton_kernels, "why_missing", lambda name: None)
    on_gpu = Request("cuda", "bfloat16", frozenset(needs))
    for device, switch, is_taken in (
        ("cuda", "1", True),
        ("cuda", "0", False),
        ("cpu", "1", False),
        ("mps", "1", False),
    ):
        monkeypatch.setattr(triton_kernels, "device_type", lambda device=device: device)
        monkeypatch.setenv("LATTICE_TRITON", switch)
        choice = table._choose(on_gpu, ())
        assert (choice.kernel.name == "triton") == is_taken
        assert is_taken == ("triton" not in choice.reasons)
    assert "triton" not in {kernel.name for kernel in table.of_device("cpu")}


def test_no_rope_fusion_asks_for_plain_operations():
    here = Request("cuda", "bfloat16", is_planned=True)
    for table in (ROTARY, LATENT_ROTARY):
        assert table.choose(here).name == "triton if installed, else passes"
        assert table.choose(here, UNFUSED).name == "passes"


def test_what_keeps_kernels_in_triton_from_running_is_said(monkeypatch):
    assert triton_kernels.missing() == "runs on cuda and xpu devices"
    monkeypatch.setattr(triton_kernels, "device_type", lambda: "cuda")
    monkeypatch.setattr(optional_imports, "has", lambda name: False)
    why_missing = optional_imports.why_missing.__wrapped__
    monkeypatch.setattr(triton_kernels, "why_missing", why_missing)
    assert triton_kernels.missing() == "needs Triton, which is not installed"
    monkeypatch.setenv("LATTICE_TRITON", "0")
    assert triton_kernels.missing() == "is switched off by LATTICE_TRITON=0"


PLAIN_GATES = {
    kernel.name: kernel
    for device in ("cpu", "cuda")
    for kernel in gates.GATED.of_device(device)
    if kernel.name != "triton"
}


@pytest.mark.parametrize("kernel", PLAIN_GATES.values(), ids=PLAIN_GATES)
def test_a_gate_adds_a_bias_before_and_weights_after(kernel):
    packed, bias, weights = torch.randn(5, 6), torch.randn(6), torch.rand(5)
    plain = gates.plain_gate(packed + bias, gates.Gate(F.silu)) * weights[:, None]
    out = kernel.run(packed, gates.Gate(F.silu), bias, weights)
    assert_close(out, plain, FP32_REORDERED_SUM, "gated")


def test_the_norms_of_apex_get_their_arguments_in_its_order(monkeypatch):
    """A stand-in has the documented signatures: (input, weight[, bias], normalized_shape, eps)."""

    def fused_layer_norm_affine(input, weight, bias, normalized_shape, eps=1e-6):
        return F.layer_norm(input, normalized_shape, weight, bias, eps)

    def fused_rms_norm_affine(input, weight, normalized_shape, eps=1e-6):
        return F.rms_norm(input, normalized_shape, weight, eps)

    library = SimpleNamespace(
        fused_layer_norm_affine=fused_layer_norm_affine, fused_rms_norm_affine=fused_rms_norm_affine
    )
    monkeypatch.setattr(norms, "require", lambda name, purpose: library)
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    ours, torchs = norms.apex_rms_norm(x, weight, 1e-3), norms.torch_rms_norm(x, weight, 1e-3)
    assert_close(ours, torchs, FP32_REORDERED_SUM, "RMSNorm")
    ours = norms.apex_layer_norm(x, weight, bias, 1e-3)
    assert_close(ours, norms.torch_layer_norm(x, weight, bias, 1e-3), FP32_REORDERED_SUM, "norm")


@pytest.mark.parametrize("settings", [{}, {"hidden_dropout": 0.1}, {"use_parallel_residual": True}])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_kernel_of_residual_and_norm_is_given_what_the_layer_adds(monkeypatch, family, settings):
    """A stand-in for the fused kernel, in a model: it runs where nothing comes between the two."""
    calls = []

    def fused(norm, *inputs):
        calls.append(norms.added_norm_apart(norm, *inputs))
        return calls[-1]

    model = make_model(family=family, **settings)
    tokens, positions = torch.randint(0, 13, (2, 8)), torch.arange(8)[None]
    found = []
    for run in (norms.added_norm_apart, fused):
        kernel = Kernel("a kernel", run, norms.ALL_NEEDS)
        for kind in (LayerNorm, RMSNorm):
            monkeypatch.setattr(kind, "added_kernels", KernelTable("sum", {"cpu": (kernel,)}))
        rng_state().begin_step(0, micro_batch_size=2, dp_rank=0, dp_size=1)
        loss = model(tokens, positions, None, labels=tokens).sum()
        found.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    assert len(calls) == (0 if settings else 4)
    for apart, together in zip(*found, strict=True):
        assert torch.equal(apart, together)


def test_the_cross_entropy_of_transformer_engine_is_asked_for(monkeypatch):
    config = make_model(cross_entropy_loss_fusion=True, cross_entropy_fusion_impl="te").config
    asked = asked_loss(config)
    planned = Request("cuda", "bfloat16", is_planned=True)
    assert LOSS.choose(planned, asked).name == "transformer-engine if installed, else linear-fused"
    choice = LOSS._choose(Request("cuda", "bfloat16"), asked)
    assert choice.kernel.name == "linear-fused"
    assert choice.reasons.startswith("transformer-engine needs NVIDIA Transformer Engine")
    assert LOSS.choose(Request("cpu", "bfloat16"), asked).kernel.name == "linear-fused"


@pytest.mark.parametrize("num_valid", [None, 7])
def test_the_cross_entropy_of_transformer_engine_leaves_padding_out(monkeypatch, num_valid):
    """A stand-in has the documented signature, and takes every column for an id."""

    def parallel_cross_entropy(
        inp, target, label_smoothing=0.0, reduce_loss=False, dist_process_group=None,
        ignore_idx=-100,
    ):  # fmt: skip
        assert (label_smoothing, reduce_loss, dist_process_group) == (0.0, False, None)
        loss = F.cross_entropy(
            inp.float().flatten(0, 1), target.flatten(), reduction="none", ignore_index=ignore_idx
        )
        return loss.view(target.shape)

    library = SimpleNamespace(parallel_cross_entropy=parallel_cross_entropy)
    monkeypatch.setattr(cross_entropy, "require", lambda name, purpose: library)
    logits = torch.randn(5, 2, 9, requires_grad=True)
    target = torch.randint(0, 7, (5, 2))
    target[0, 0] = -100
    weight = torch.rand(5, 2)
    how = dict(tp_group=SINGLE_RANK, num_valid=num_valid)
    found = []
    for run in (cross_entropy.transformer_engine_cross_entropy, vocab_parallel_cross_entropy):
        loss = run(logits, target, **how)
        found.append((loss, *torch.autograd.grad((loss * weight).sum(), logits)))
    for ours, expected in zip(*found, strict=True):
        assert_close(ours, expected, FP32_REORDERED_SUM, "loss and gradient")


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
