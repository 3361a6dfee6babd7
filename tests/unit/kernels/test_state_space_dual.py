"""The state-space dual recurrence in chunks gives what its paper gives, token by token."""

import pytest
import torch

from megatron.core.kernels.chunks import DocumentRows
from megatron.core.kernels.state_space_dual import state_space_chunks
from tests.harness.tolerances import FP32_REORDERED_SUM, FP64_REORDERED_SUM, assert_close

B, G, R, D, E = 2, 2, 3, 5, 7
NAMES = ("query", "key", "value", "log decay")


def sequence(s, dtype=torch.float64):
    """Return query, key, value and log decay of s rows."""
    made = torch.Generator().manual_seed(3)
    shapes = (s, B, G, D), (s, B, G, D), (s, B, G * R, E), (s, B, G * R)
    parts = [torch.randn(*shape, generator=made, dtype=torch.float64) for shape in shapes]
    parts[3] = -parts[3].exp()
    return [part.to(dtype).requires_grad_() for part in parts]


def recurrence(query, key, value, log_decay, ids=None):
    """Equation 6 of the paper, one row after the other; returns outputs and the last state."""
    query, key = (x.repeat_interleave(R, 2) for x in (query, key))
    state, outputs = torch.zeros(B, G * R, D, E).to(query), []
    for t in range(len(query)):
        if ids is not None and t:
            state = state * (ids[:, t] == ids[:, t - 1]).view(B, 1, 1, 1)
        written = key[t].unsqueeze(-1) * value[t].unsqueeze(-2)
        state = log_decay[t].exp().view(B, -1, 1, 1) * state + written
        outputs.append((query[t].unsqueeze(-1) * state).sum(-2))
    return torch.stack(outputs), state


def documents_of(lengths):
    ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row))
                       for row in lengths])  # fmt: skip
    return DocumentRows(ids, ids[:, 0])


def by_head(state):
    """[b, g, d, r, e] -> [b, n, d, e]."""
    return state.transpose(2, 3).flatten(1, 2)


@pytest.mark.parametrize(
    ("s", "chunk", "lengths"),
    [
        (1, 64, None),
        (19, 4, None),
        (24, 8, ([24], [8, 1, 3, 12])),
        (19, 4, ([1, 2, 16], [7, 4, 8])),
    ],
)
def test_chunks_give_outputs_states_and_gradients_of_the_recurrence(s, chunk, lengths):
    inputs = sequence(s)
    documents = None if lengths is None else documents_of(lengths)
    plain, last = recurrence(*inputs, None if documents is None else documents.ids)
    found, state = state_space_chunks(*inputs, documents, chunk=chunk).run()
    weight = torch.randn(plain.shape, generator=torch.Generator().manual_seed(1)).double()
    expected = torch.autograd.grad((plain * weight).sum() + last.square().sum(), inputs)
    loss = (found * weight).sum() + state.square().sum()
    gradients = torch.autograd.grad(loss, inputs)
    assert_close(found, plain, FP64_REORDERED_SUM, "outputs")
    assert_close(by_head(state), last, FP64_REORDERED_SUM, "state")
    for name, grad, of_plain in zip(NAMES, gradients, expected, strict=True):
        assert_close(grad, of_plain, FP64_REORDERED_SUM, f"gradient of {name}")


def test_half_inputs_keep_fp32_states():
    inputs = sequence(150, dtype=torch.bfloat16)
    plain, _ = recurrence(*(x.double() for x in inputs))
    found, state = state_space_chunks(*inputs).run()
    assert state.dtype == found.dtype == torch.float32
    assert_close(found, plain, FP32_REORDERED_SUM, "outputs")


def test_a_sequence_in_pieces_is_what_their_transitions_compose_to():
    inputs, documents, half = sequence(22), documents_of(([9, 13], [11, 4, 7])), 11
    plain, last = recurrence(*inputs, documents.ids)
    first = DocumentRows(documents.ids[:, :half], documents.before)
    second = DocumentRows(documents.ids[:, half:], documents.ids[:, half - 1])
    early = state_space_chunks(*(x[:half] for x in inputs), first, chunk=4)
    late = state_space_chunks(*(x[half:] for x in inputs), second, chunk=4)
    between = early.after(early.transition(), None)
    found = late.after(late.transition(), between)
    assert_close(by_head(found), last, FP64_REORDERED_SUM, "state")
    found = torch.cat((early.run()[0], late.run(between)[0]))
    assert_close(found, plain, FP64_REORDERED_SUM, "outputs")
