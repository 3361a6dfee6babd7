"""Each kernel by Triton's interpreter against the plain formula, over shapes with tails.

TRITON_INTERPRET=1 python -m pytest tests/gpu_without_gpu/triton_kernels/numerics.py
"""

from itertools import product

import pytest
import torch

from megatron.core.fusions import fused_bias_dropout
from megatron.core.kernels import vocab_softmax as plain_softmax
from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.blockwise_attention import blockwise_attention
from megatron.core.kernels.gated_activation import Gate, plain_gate
from megatron.core.kernels.norms import added_norm_apart, torch_layer_norm, torch_rms_norm
from megatron.core.kernels.registry import OTHER_DEVICES, Kernel, KernelTable
from megatron.core.kernels.torch_attention import unfused
from megatron.core.kernels.triton_kernels import (
    bias_dropout,
    gated_activation,
    norms,
    vocab_softmax,
)
from megatron.core.kernels.vocab_softmax import RowStatistics, Targets
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.random_scope import SequenceShard
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.topology.group import SINGLE_RANK
from tests.gpu_without_gpu.triton_kernels.comparing import (
    TOLERANCE_OF,
    compare,
)
from tests.harness.tolerances import BF16_TRUNCATED, FP32_REORDERED_SUM, assert_close


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (7, 100), (600, 33), (5, 1024), (50, 4104)])
def test_rms_norm(rows, width, dtype):
    inputs = [torch.randn(rows, width).to(dtype), torch.randn(width).to(dtype)]
    compare(lambda x, w: norms.rms_norm(x, w, 1e-5), lambda x, w: torch_rms_norm(x, w, 1e-5),
            inputs, TOLERANCE_OF[dtype])  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize(("rows", "width"), [(7, 100), (600, 33), (50, 4104)])
def test_layer_norm(rows, width, dtype):
    inputs = [x.to(dtype) for x in (torch.randn(rows, width) + 3, *torch.randn(2, width))]
    compare(lambda x, w, b: norms.layer_norm(x, w, b, 1e-5),
            lambda x, w, b: torch_layer_norm(x, w, b, 1e-5),
            inputs, TOLERANCE_OF[dtype])  # fmt: skip


def test_a_norm_of_half_precision_takes_a_weight_of_fp32():
    inputs = [torch.randn(2, 3, 40).bfloat16(), torch.randn(40)]
    compare(lambda x, w: norms.rms_norm(x, w, 1e-5), lambda x, w: torch_rms_norm(x, w, 1e-5),
            inputs, BF16_TRUNCATED)  # fmt: skip


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("centers", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (20, 100), (5, 4104)])
def test_norm_of_a_sum_with_the_residual(rows, width, centers, with_bias, dtype):
    x, residual = torch.randn(2, rows, width).to(dtype)
    parameters = [*torch.randn(2 if centers else 1, width).to(dtype)]
    inputs = [x, residual, *[torch.randn(width).to(dtype)] * with_bias, *parameters]
    plain = torch_layer_norm if centers else torch_rms_norm
    if dtype == torch.bfloat16:  # a sum that is rounded is another sum to the norm
        inputs[:2] = [(2 * t).round() / 2 for t in inputs[:2]]
        inputs[2 : 2 + with_bias] = [(2 * t).round() / 2 for t in inputs[2 : 2 + with_bias]]

    def run(x, residual, *others):
        bias, *parameters = others if with_bias else (None, *others)
        return norms.added_norm(None, x, bias, residual, tuple(parameters), 1e-5)

    def reference(x, residual, *others):
        bias, *parameters = others if with_bias else (None, *others)
        return added_norm_apart(lambda total: plain(total, *parameters, 1e-5), x, bias, residual,
                                (), 1e-5)  # fmt: skip

    sums = range(2, 3 + centers + with_bias)
    compare(run, reference, inputs, TOLERANCE_OF[dtype], sums=sums)


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize("with_terms", [False, True])
@pytest.mark.parametrize("act", gated_activation.KINDS)
def test_gated_activation(act, with_terms, dtype):
    inputs = [(2 * torch.randn(5, 2 * 1030)).to(dtype)]
    if with_terms:
        inputs += [torch.randn(2 * 1030).to(dtype), torch.rand(5)]

    def formula(packed, bias=0.0, weights=None):
        weights = torch.ones(5) if weights is None else weights
        return plain_gate(packed + bias, Gate(act)) * weights.unsqueeze(-1)

    compare(lambda *x: gated_activation.gate_of(x[0], Gate(act), *x[1:]), formula, inputs,
            TOLERANCE_OF[dtype], sums=(1,))  # fmt: skip


@pytest.mark.parametrize("width", [4, 36, 1027])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("residual_dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_what_the_plain_form_drops(width, with_bias, residual_dtype):
    shard = SequenceShard.zigzag(16, 1, 2)
    # Gradients that are divided by 1/2 are exact in bf16, and so are the terms of the bias's, which
    # may cancel.
    probability = 0.5 if residual_dtype == torch.bfloat16 else 0.3
    x = torch.randn(8, 3, width).to(residual_dtype)
    inputs = [x, torch.randn(8, 3, width).to(residual_dtype)]
    inputs += [torch.randn(width).to(residual_dtype)] * with_bias

    def at_one_place(run):
        def place(x, residual, bias=None):
            rng_state().begin_step(2**32 - 2, micro_batch_size=3, dp_rank=0, dp_size=1)
            with rng_state().in_scope("decoder", 3, rows=shard):
                return run(x, bias, residual)

        return place

    compare(
        at_one_place(lambda *x: bias_dropout.bias_dropout_add(*x, probability)),
        at_one_place(lambda *x: fused_bias_dropout.bias_dropout_add(*x, probability, True)),
        inputs,
        TOLERANCE_OF[residual_dtype],
        sums=(2,),
    )


@pytest.mark.parametrize("run", [unfused, blockwise_attention])
def test_attention_drops_the_same_in_every_layout(run):
    """The formula on all heads and samples, and each kernel on halves of them, one at a time."""
    s, b, n, d = 40, 2, 4, 16
    whole = [torch.randn(s, b, heads, d) for heads in (n, 2, 2)]

    def at(kernel, parts, sample, samples, head):
        options = AttentionOptions(0.3, MaskSpec((-1, 0)), dropout=0.3, first_head=head)
        rng_state().begin_step(sample, micro_batch_size=samples, dp_rank=0, dp_size=1)
        with rng_state().in_scope("decoder", 3):
            return kernel(*parts, options).view(s, samples, -1, d)

    expected = at(unfused, whole, 0, b, 0)
    for sample, half in product(range(b), range(2)):
        heads = slice(2 * half, 2 * half + 2), slice(half, half + 1), slice(half, half + 1)
        parts = [x[:, sample : sample + 1, h] for x, h in zip(whole, heads, strict=True)]
        out = at(run, parts, sample, 1, 2 * half)
        wanted = expected[:, sample : sample + 1, heads[0]]
        assert_close(out, wanted, FP32_REORDERED_SUM, f"sample {sample}, heads {heads[0]}")


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize(("smoothing", "columns", "valid"), [(0.0, 5003, 5003), (0.1, 2100, 2049)])
def test_cross_entropy(monkeypatch, smoothing, columns, valid, overwrites, dtype):
    kernel = Kernel("triton", vocab_softmax.KeptLogits)
    monkeypatch.setattr(
        plain_softmax, "CROSS_ENTROPY", KernelTable("loss", {OTHER_DEVICES: (kernel,)})
    )
    logits = [(3 * torch.randn(7, columns)).to(dtype).requires_grad_()]
    labels = torch.randint(valid, (7,))
    labels[3] = -100

    def by_kernel(x):
        return vocab_parallel_cross_entropy(
            x * 1, labels, smoothing, SINGLE_RANK, valid, overwrite_logits=overwrites
        )

    def formula(x):
        logs = x[:, :valid].log_softmax(-1)
        share = smoothing * valid / (valid - 1)
        picked = logs.gather(1, labels.clamp_min(0)[:, None])[:, 0]
        loss = -(1 - share) * picked - share * logs.mean(-1)
        return loss.masked_fill(labels < 0, 0.0)

    compare(by_kernel, formula, logits, TOLERANCE_OF[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE_OF)
def test_parts_of_a_vocabulary_have_the_gradient_of_the_whole_to_the_bit(dtype):
    """The second part ends with padding, and labels of the first part are not in it."""
    rows, half, valid = 5, 2064, 4100
    logits, labels = (3 * torch.randn(rows, 2 * half)).to(dtype), torch.randint(valid, (rows, 1))
    scale, kernel = torch.randn(rows), vocab_softmax.KeptLogits()

    def gradient(part, first, statistics):
        columns = labels - first
        is_local = (columns >= 0) & (columns < part.shape[1])
        columns = columns.masked_fill(~is_local, 0)
        targets = Targets(columns, is_local, min(part.shape[1], valid - first), 0.9, 0.1 / valid)
        local = torch.zeros(4, rows)
        kernel.measure(part, targets, local, in_place=False)
        out = torch.full_like(part, 7.0)
        kernel.gradient(part, out, statistics or of_all(local), targets, scale)
        return out, local

    def of_all(local):
        return RowStatistics(local[0], local[0], local[0], local[1], None)

    whole, local = gradient(logits, 0, None)
    halves = [gradient(logits[:, a : a + half].contiguous(), a, of_all(local)) for a in (0, half)]
    assert torch.equal(torch.cat([out for out, _ in halves], 1), whole)
    assert not whole[:, valid:].any()
    highest, log_sum, label_logit, total = torch.stack([found for _, found in halves], 1)
    assert torch.equal(highest.amax(0), local[0])
    exact = logits[:, :valid].double()
    wanted = exact.logsumexp(1), exact.gather(1, labels)[:, 0], exact.sum(1)
    sums = (highest + log_sum).logsumexp(0), label_logit.sum(0), total.sum(0)
    for found, e in zip((*sums, *local[2:]), (*wanted, *wanted[1:]), strict=True):
        assert_close(found, e, FP32_REORDERED_SUM, "statistics")
