"""The row-wise cross entropy and the fused head equal torch's, forward and backward."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.kernels import vocab_softmax
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.linear_cross_entropy import linear_cross_entropy
from megatron.core.tensor_parallel.vocab_parallel_softmax import smoothing_weight
from tests.harness.tolerances import (
    BF16_REORDERED_SUM,
    EXACT,
    FP32_REORDERED_SUM,
    assert_close,
)

# The package exports the function under the module's name.
fused_head = importlib.import_module("megatron.core.tensor_parallel.linear_cross_entropy")


def reference(logits: Tensor, target: Tensor, smoothing: float, num_valid: int) -> Tensor:
    """Torch's cross entropy over the real columns, in fp64."""
    epsilon = smoothing_weight(smoothing, num_valid)
    rows = logits.double()[..., :num_valid].reshape(-1, num_valid)
    loss = F.cross_entropy(rows, target.reshape(-1), reduction="none", label_smoothing=epsilon)
    return loss.view(target.shape)


def random_case(seed: int):
    """Return logits, labels, upstream gradient, smoothing and number of real ids."""
    draw = torch.Generator().manual_seed(seed)
    sequence, batch, columns = (
        int(torch.randint(1, high, (), generator=draw)) for high in (9, 4, 70)
    )
    num_valid = int(torch.randint(1, columns + 1, (), generator=draw))
    logits = torch.randn(sequence, batch, columns, generator=draw) * 3
    target = torch.randint(0, num_valid, (sequence, batch), generator=draw)
    target[torch.rand(target.shape, generator=draw) < 0.2] = -100
    upstream = torch.randn(sequence, batch, generator=draw)
    smoothing = [0.0, 0.1][seed % 2] if num_valid > 1 else 0.0
    return logits, target, upstream, smoothing, num_valid


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_loss_and_gradient_equal_torch(seed, overwrite):
    logits, target, upstream, smoothing, num_valid = random_case(seed)
    leaf = logits.clone().requires_grad_()
    expected = reference(leaf, target, smoothing, num_valid)
    (expected_grad,) = torch.autograd.grad(expected, leaf, upstream.double())
    # The function may overwrite its input: give it a tensor of its own.
    loss = vocab_parallel_cross_entropy(
        leaf * 1.0, target, smoothing, num_valid=num_valid, overwrite_logits=overwrite
    )
    (grad,) = torch.autograd.grad(loss, leaf, upstream)
    assert_close(loss, expected, FP32_REORDERED_SUM, "loss")
    assert_close(grad, expected_grad, FP32_REORDERED_SUM, "gradient")
    assert not grad[..., num_valid:].any(), "padding of the vocabulary takes no part"


@pytest.mark.parametrize("overwrite", [False, True])
def test_bf16_logits_lose_nothing_but_the_rounding_of_the_gradient(overwrite):
    logits = (torch.randn(40, 3, 97) * 3).bfloat16().requires_grad_()
    target = torch.randint(0, 97, (40, 3))
    expected = reference(logits, target, 0.0, 97)
    (expected_grad,) = torch.autograd.grad(expected.mean(), logits)
    loss = vocab_parallel_cross_entropy(logits * 1.0, target, overwrite_logits=overwrite)
    assert loss.dtype == torch.float32
    assert_close(loss, expected, FP32_REORDERED_SUM, "loss")
    (grad,) = torch.autograd.grad(loss.mean(), logits)
    assert_close(grad, expected_grad, BF16_REORDERED_SUM, "gradient")


def test_the_gradient_at_a_confident_label_does_not_cancel_in_bf16():
    logits = torch.zeros(1, 1, 8, dtype=torch.bfloat16)
    logits[..., 3] = 9.0
    leaf = logits.requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf * 1.0, torch.tensor([[3]]), overwrite_logits=True)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    exact = logits.detach().double().softmax(-1)[0, 0, 3] - 1.0  # -8.6e-4: p rounds to 1 in bf16
    assert float(grad[0, 0, 3]) == pytest.approx(float(exact), rel=2**-8)


def test_overwritten_logits_serve_one_backward_pass():
    logits = torch.randn(3, 1, 7, requires_grad=True)
    target = torch.tensor([[0], [3], [4]])
    loss = vocab_parallel_cross_entropy(logits * 1.0, target, overwrite_logits=True).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(AssertionError, match="one backward pass"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_rows_do_not_change_a_bit(monkeypatch, dtype):
    logits = torch.randn(33, 2, 50).to(dtype).requires_grad_()
    target = torch.randint(0, 45, (33, 2))

    def run():
        loss = vocab_parallel_cross_entropy(logits, target, 0.1, num_valid=45)
        return loss, torch.autograd.grad(loss.sum(), logits)[0]

    whole = run()
    monkeypatch.setitem(vocab_softmax.BLOCK_BYTES, "cpu", 4 * 45 * 7)
    for blocked, expected in zip(run(), whole, strict=True):
        assert_close(blocked, expected, EXACT, "blocked")


def test_without_gradient_even_given_away_logits_stay():
    logits = torch.randn(4, 1, 9)
    before = logits.clone()
    vocab_parallel_cross_entropy(
        logits, torch.zeros(4, 1, dtype=torch.int64), overwrite_logits=True
    )
    assert torch.equal(logits, before)


def test_huge_logits_give_finite_losses():
    logits = torch.tensor([[[3e38, -3e38, 0.0]], [[-3e38, -3e38, -3e38]]])
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([[0], [1]]))
    assert torch.isfinite(loss).all() and loss[0].item() == 0.0
    assert loss[1].item() == pytest.approx(1.0986123, rel=1e-6)


def test_the_gradient_of_given_away_logits_lies_in_their_memory():
    logits = torch.randn(4, 2, 9, requires_grad=True) * 1.0
    seen = []
    logits.register_hook(lambda grad: seen.append(grad.data_ptr()))
    target = torch.zeros(4, 2, dtype=torch.int64)
    vocab_parallel_cross_entropy(logits, target, overwrite_logits=True).sum().backward()
    assert seen == [logits.data_ptr()]


def test_giving_away_logits_that_their_producer_needs_is_noticed():
    logits = torch.tanh(torch.randn(4, 1, 9, requires_grad=True))  # tanh's backward reads them
    target = torch.zeros(4, 1, dtype=torch.int64)
    loss = vocab_parallel_cross_entropy(logits, target, overwrite_logits=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# The fused head -----------------------------------------------------------------------------


def head_case(dtype=torch.float32):
    hidden = torch.randn(13, 2, 16).to(dtype).requires_grad_()
    weight = (torch.randn(40, 16) * 0.5).to(dtype).requires_grad_()
    target = torch.randint(0, 37, (13, 2))
    target[3, 1] = -100
    return hidden, weight, target


def plain_head(hidden, weight, target, smoothing=0.0):
    return reference(F.linear(hidden.double(), weight.double()), target, smoothing, 37)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("rows_per_chunk", [1, 5, 26, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_fused_head_equals_linear_then_cross_entropy(
    monkeypatch, smoothing, rows_per_chunk, recomputes
):
    monkeypatch.setitem(fused_head.MAX_CHUNK_BYTES, "cpu", 4 * 40 * rows_per_chunk)
    hidden, weight, target = head_case()
    upstream = torch.rand(target.shape)
    expected = plain_head(hidden, weight, target, smoothing)
    expected_grads = torch.autograd.grad(expected, (hidden, weight), upstream.double())
    loss = linear_cross_entropy(
        hidden,
        weight,
        target,
        label_smoothing=smoothing,
        num_valid=37,
        recomputes_logits=recomputes,
    )
    grads = torch.autograd.grad(loss, (hidden, weight), upstream)
    assert_close(loss, expected, FP32_REORDERED_SUM, "loss")
    for grad, wanted, name in zip(grads, expected_grads, ("hidden", "weight"), strict=True):
        assert_close(grad, wanted, FP32_REORDERED_SUM, f"gradient of {name}")


@pytest.mark.parametrize("rows_per_chunk", [7, 100])
def test_the_fused_head_in_bf16_adds_chunks_in_fp32(monkeypatch, rows_per_chunk):
    monkeypatch.setitem(fused_head.MAX_CHUNK_BYTES, "cpu", 2 * 40 * rows_per_chunk)
    hidden, weight, target = head_case(torch.bfloat16)
    expected = plain_head(hidden, weight, target)
    expected_grads = torch.autograd.grad(expected.sum(), (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, target, num_valid=37)
    grads = torch.autograd.grad(loss.sum(), (hidden, weight))
    assert loss.dtype == torch.float32
    assert_close(loss, expected, BF16_REORDERED_SUM, "loss")
    for grad, wanted, name in zip(grads, expected_grads, ("hidden", "weight"), strict=True):
        assert grad.dtype == torch.bfloat16
        assert_close(grad, wanted, BF16_REORDERED_SUM, f"gradient of {name}")


def count_passes(monkeypatch) -> list[int]:
    """Count how often logits are computed."""
    passes: list[int] = []
    original = fused_head._pass_over_chunks
    monkeypatch.setattr(
        fused_head, "_pass_over_chunks", lambda *a: (passes.append(1), original(*a))[1]
    )
    return passes


@pytest.mark.parametrize(("num_tokens", "num_passes"), [(16, 2), (17, 1)])
@pytest.mark.parametrize("main_dtype", [None, torch.float32, torch.float64])
def test_a_weight_gradient_waits_for_backward_only_if_it_is_smaller_than_the_logits(
    monkeypatch, num_tokens, num_passes, main_dtype
):
    """A sum of 40 x 16 numbers is as large as the logits of 16 tokens."""
    monkeypatch.setitem(fused_head.MAX_CHUNK_BYTES, "cpu", 4 * 40 * 8)
    _, weight, _ = head_case()
    hidden = torch.randn(num_tokens, 1, 16, requires_grad=True)
    target = torch.randint(0, 37, (num_tokens, 1))
    target[3] = -100
    expected = plain_head(hidden, weight, target).sum() * 0.25
    expected_grads = torch.autograd.grad(expected, (hidden, weight))
    if main_dtype is not None:
        weight.main_grad = torch.full(weight.shape, 2.0, dtype=main_dtype)
        weight.main_grad_is_fresh = False
    passes = count_passes(monkeypatch)
    (linear_cross_entropy(hidden, weight, target, num_valid=37).sum() * 0.25).backward()
    assert len(passes) == num_passes
    found = weight.grad if main_dtype is None else weight.main_grad - 2.0
    for grad, wanted in zip((hidden.grad, found), expected_grads, strict=True):
        assert_close(grad, wanted, FP32_REORDERED_SUM, "gradient")


def test_the_weight_gradient_of_a_second_pass_needs_no_memory(monkeypatch):
    monkeypatch.setitem(fused_head.MAX_CHUNK_BYTES, "cpu", 4 * 40 * 5)
    hidden, weight, target = head_case()
    weight.main_grad, weight.main_grad_is_fresh = torch.empty(weight.shape), True
    kept = []
    original = fused_head._pass_over_chunks
    monkeypatch.setattr(
        fused_head, "_pass_over_chunks", lambda *a: kept.append(original(*a)) or kept[-1]
    )
    loss = linear_cross_entropy(hidden, weight, target, num_valid=37, recomputes_logits=True)
    loss.sum().backward()
    assert [grad_weight for _, _, grad_weight in kept] == [None, None]
    (wanted,) = torch.autograd.grad(plain_head(hidden, weight, target).sum(), weight)
    assert_close(weight.main_grad, wanted, FP32_REORDERED_SUM, "main gradient")


@pytest.mark.parametrize(("promised", "used", "num_passes"), [
    ("ones", "ones", 1), ("mask", "mask", 1), ("mask", "scaled mask", 1),
    ("ones", "mask", 2), ("mask", "random", 2), ("zeros", "zeros", 2),
])  # fmt: skip
def test_broken_promises_about_token_weights_cost_time_but_not_correctness(
    monkeypatch, promised, used, num_passes
):
    hidden, weight, target = head_case()
    mask = (torch.rand(target.shape) < 0.6).float()
    kinds = {
        "ones": torch.ones(target.shape), "mask": mask, "scaled mask": mask * 0.37,
        "random": torch.rand(target.shape), "zeros": torch.zeros(target.shape),
    }  # fmt: skip
    expected = plain_head(hidden, weight, target)
    expected_grads = torch.autograd.grad(expected, (hidden, weight), kinds[used].double())
    passes = count_passes(monkeypatch)
    loss = linear_cross_entropy(hidden, weight, target, num_valid=37, token_weights=kinds[promised])
    grads = torch.autograd.grad(loss, (hidden, weight), kinds[used])
    assert len(passes) == num_passes
    for grad, wanted, name in zip(grads, expected_grads, ("hidden", "weight"), strict=True):
        assert_close(grad, wanted, FP32_REORDERED_SUM, f"gradient of {name}")


@pytest.mark.parametrize("main_dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_fresh", [True, False])
def test_the_fused_head_writes_the_main_gradient(is_fresh, main_dtype):
    hidden, weight, target = head_case()
    expected = plain_head(hidden, weight, target)
    (wanted,) = torch.autograd.grad(expected.mean(), weight)
    weight.main_grad = torch.full(weight.shape, 2.0, dtype=main_dtype)
    weight.main_grad_is_fresh = is_fresh
    linear_cross_entropy(hidden, weight, target, num_valid=37).mean().backward()
    assert weight.grad is None and not weight.main_grad_is_fresh
    wanted = wanted if is_fresh else wanted + 2.0
    assert_close(weight.main_grad, wanted, FP32_REORDERED_SUM, "main gradient")


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_the_fused_head_forms_only_wanted_gradients(monkeypatch, frozen):
    hidden, weight, target = head_case()
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if frozen in (name, "both"):
            tensor.requires_grad_(False)
    seen = []
    original = fused_head._pass_over_chunks
    monkeypatch.setattr(
        fused_head, "_pass_over_chunks", lambda *a: (seen.append(a[5:7]), original(*a))[1]
    )
    loss = linear_cross_entropy(hidden, weight, target, num_valid=37)
    assert seen == [(frozen == "weight", frozen == "hidden")]
    if frozen != "both":
        loss.sum().backward()
    assert (hidden.grad is not None) == (frozen == "weight")
    assert (weight.grad is not None) == (frozen == "hidden")


def test_the_fused_head_has_the_gradient_of_finite_differences():
    hidden = torch.randn(4, 1, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    target = torch.tensor([[0], [3], [4], [1]])
    assert torch.autograd.gradcheck(
        lambda h, w: linear_cross_entropy(h, w, target, num_valid=5), (hidden, weight)
    )


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_bounded_and_nearly_equal(seed):
    draw = torch.Generator().manual_seed(seed)
    tokens, columns = (int(torch.randint(1, 10**6, (), generator=draw)) for _ in range(2))
    for device, limit in (("cpu", 64 * 2**20), ("meta", 512 * 2**20)):
        x = torch.empty(0, dtype=torch.bfloat16, device=device)
        rows = fused_head._chunk_rows(x, tokens, columns)
        assert 1 <= rows <= tokens
        assert rows == 1 or rows * columns * 2 <= limit
        fewest = -(-tokens * columns * 2 // limit)
        assert rows == 1 or -(-tokens // rows) <= 2 * fewest
