"""Delta rules in chunks give what the recurrences of their papers give, token by token."""

import pytest
import torch

from megatron.core.kernels.chunks import DocumentRows
from megatron.core.kernels.delta_rules import decayed_products, delta_chunks, kimi_delta_chunks
from megatron.core.ssm.recurrent_mixer import causal_convolution
from tests.harness.tolerances import FP32_REORDERED_SUM, FP64_REORDERED_SUM, assert_close

B, G, R, D, E = 2, 2, 3, 5, 7
RULES = {1: delta_chunks, D: kimi_delta_chunks}
"""Decays of a head and row -> the rule in chunks."""
every_rule = pytest.mark.parametrize("decays", RULES)


def sequence(s, decays, seed=3, dtype=torch.float64):
    """Return query, key, value, log decay and beta of s rows; keys have length 1."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    key = normal(s, B, G, D)
    parts = (
        normal(s, B, G, D),
        key / key.norm(dim=-1, keepdim=True),
        normal(s, B, G * R, E),
        -(normal(s, B, G * R) if decays == 1 else normal(s, B, G * R, decays)).exp(),
        normal(s, B, G * R).sigmoid(),
    )
    return [part.to(dtype).requires_grad_() for part in parts]


def recurrence(query, key, value, log_decay, beta, ids=None, state=None):
    """Compute row by row as in section 3.1 of arXiv 2412.06464, or 3 of 2510.26692.

    Returns outputs and the last state.
    """
    s = query.shape[0]
    query, key = (x.repeat_interleave(R, 2) for x in (query, key))
    state = torch.zeros(B, G * R, D, E).to(query) if state is None else state
    outputs = []
    for t in range(s):
        if ids is not None and t:
            state = state * (ids[:, t] == ids[:, t - 1]).view(B, 1, 1, 1)
        k, v = key[t].unsqueeze(-1), value[t].unsqueeze(-2)
        strength = beta[t].view(B, -1, 1, 1)
        state = log_decay[t].exp().view(B, G * R, -1, 1) * state
        state = state + strength * k * (v - (k * state).sum(-2, keepdim=True))
        outputs.append((query[t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs), state


def documents_of(s, lengths):
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row))
                       for row in lengths])  # fmt: skip
    assert ids.shape == (B, s)
    return DocumentRows(ids, ids[:, 0])


@every_rule
@pytest.mark.parametrize(
    ("s", "chunk", "lengths"),
    [
        (1, 64, None),
        (7, 64, None),
        (19, 4, None),
        (24, 8, None),
        (24, 8, ([24], [8, 1, 3, 12])),
        (19, 4, ([1, 2, 16], [7, 4, 8])),
    ],
)
def test_chunks_give_outputs_states_and_gradients_of_the_recurrence(s, chunk, lengths, decays):
    inputs = sequence(s, decays)
    documents = None if lengths is None else documents_of(s, lengths)
    plain, last = recurrence(*inputs, None if documents is None else documents.ids)
    found, state = RULES[decays](*inputs, documents, chunk=chunk).run()
    weight = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).double()
    expected = torch.autograd.grad((plain * weight).sum() + last.square().sum(), inputs)
    loss = (found * weight).sum() + state.square().sum()
    gradients = torch.autograd.grad(loss, inputs)
    assert_close(found, plain, FP64_REORDERED_SUM, "outputs")
    assert_close(state.flatten(1, 2), last, FP64_REORDERED_SUM, "state")
    names = ["query", "key", "value", "log decay", "beta"]
    for name, grad, of_plain in zip(names, gradients, expected, strict=True):
        assert_close(grad, of_plain, FP64_REORDERED_SUM, f"gradient of {name}")


@every_rule
def test_half_inputs_keep_fp32_states(decays):
    inputs = sequence(150, decays, dtype=torch.bfloat16)
    plain, _ = recurrence(*(x.double() for x in inputs))
    found, state = RULES[decays](*inputs).run()
    assert state.dtype == found.dtype == torch.float32
    assert_close(found, plain, FP32_REORDERED_SUM, "outputs")


@every_rule
def test_a_sequence_in_pieces_is_what_their_transitions_compose_to(decays):
    s, half = 22, 11
    inputs, documents = sequence(s, decays), documents_of(s, ([9, 13], [11, 4, 7]))
    plain, last = recurrence(*inputs, documents.ids)
    first = DocumentRows(documents.ids[:, :half], documents.before)
    second = DocumentRows(documents.ids[:, half:], documents.ids[:, half - 1])
    early = RULES[decays](*(x[:half] for x in inputs), first, chunk=4)
    late = RULES[decays](*(x[half:] for x in inputs), second, chunk=4)
    between = early.after(early.transition(), None)
    found = late.after(late.transition(), between)
    assert_close(found.flatten(1, 2), last, FP64_REORDERED_SUM, "state")
    found = torch.cat((early.run()[0], late.run(between)[0]))
    assert_close(found, plain, FP64_REORDERED_SUM, "outputs")


def test_products_of_rows_with_strong_decays_are_as_exact_as_fp32_is():
    made = torch.Generator().manual_seed(2)
    left, right = (torch.randn(64, D, generator=made) for _ in range(2))
    log_decay = -20 * torch.rand(64, D, generator=made)
    found = decayed_products(left, right, log_decay)
    wide = log_decay.double()
    sums = torch.stack([torch.stack([wide[j + 1 : i + 1].sum(0) for j in range(64)])
                        for i in range(64)])  # fmt: skip
    expected = ((left.double().unsqueeze(1) * right.double()) * sums.exp()).sum(-1).tril()
    assert_close(found, expected, FP32_REORDERED_SUM, "products")


def test_a_convolution_sees_the_rows_before_it_in_its_document():
    made = torch.Generator().manual_seed(5)
    x = torch.randn(9, 2, 3, generator=made).double()
    weight = torch.randn(3, 4, generator=made).double()
    whole = causal_convolution(x, weight)
    expected = torch.nn.functional.conv1d(
        x.permute(1, 2, 0), weight.unsqueeze(1), padding=3, groups=3
    )
    assert_close(whole, expected[..., :9].permute(2, 0, 1), FP64_REORDERED_SUM, "convolution")
    late = causal_convolution(x[5:], weight, x[2:5])
    assert_close(late, whole[5:], FP64_REORDERED_SUM, "with the rows before")
    ids = torch.tensor([[0] * 3 + [0] * 4 + [1] * 5, [0] * 12])
    parted = causal_convolution(x, weight, None, ids)
    assert_close(parted[4:, 0], causal_convolution(x[4:], weight)[:, 0], FP64_REORDERED_SUM, "new")
    assert_close(parted[:, 1], whole[:, 1], FP64_REORDERED_SUM, "one document")
