"""Choosing tokens: greedy, restricted, and keyed by place and not by company."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.inference.sampling import NO_TOKEN, Draw, Sampling, gather_logprobs
from megatron.inference.sampling import choose_tokens as choose_from_draws


def logits(rows=5, vocabulary=50):
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(1))


def choose_tokens(x, position, sampling):
    return choose_from_draws(x, [Draw(sampling, row, position) for row in range(len(x))])


SMALLEST = (1e-3, 1e-6, 1e-7, 1e-39, 5e-324)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=5.0, top_k=1),
        *(Sampling(temperature=smallest) for smallest in SMALLEST),
        *(Sampling(temperature=1.0, top_p=smallest) for smallest in SMALLEST),
    ],
)
def test_the_narrowest_choice_takes_the_most_likely(sampling):
    assert choose_tokens(logits(), 3, sampling).equal(logits().argmax(-1))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.5)])
def test_no_token_is_chosen_among_logits_that_are_no_numbers(sampling):
    x = logits()
    x[1, 7], x[2], x[3, 0], x[4, 0] = torch.nan, -torch.inf, torch.inf, -torch.inf
    chosen = choose_tokens(x, 3, sampling)
    assert (chosen == NO_TOKEN).tolist() == [False, True, True, True, False]
    gather_logprobs(x, chosen, num_top_logprobs=2)


def test_top_k_and_top_p_never_choose_outside_their_set():
    x = logits(rows=1)
    best = set(x.topk(4).indices.flatten().tolist())
    probabilities, order = x.softmax(-1).sort(descending=True)
    nucleus = set(order[0, : int((probabilities.cumsum(-1) < 0.5).sum()) + 1].tolist())
    for position in range(200):
        top_k = choose_tokens(x, position, Sampling(temperature=2.0, top_k=4))
        top_p = choose_tokens(x, position, Sampling(temperature=1.0, top_p=0.5))
        assert top_k.item() in best
        assert top_p.item() in nucleus


def test_draws_follow_the_distribution():
    x = torch.tensor([[0.0, 1.0, 2.0]])
    n = 3000
    drawn = torch.cat([choose_tokens(x, p, Sampling(temperature=1.0)) for p in range(n)])
    frequencies = torch.bincount(drawn, minlength=3) / n
    # Five standard deviations of a binomial share.
    assert (frequencies - x.softmax(-1)[0]).abs().max() < 5 * (0.25 / n) ** 0.5


def test_a_row_does_not_depend_on_the_rows_after_it():
    x, sampling = logits(), Sampling(temperature=1.0, seed=9)
    assert choose_tokens(x[:2], 7, sampling).equal(choose_tokens(x, 7, sampling)[:2])
    assert not choose_tokens(x, 8, sampling).equal(choose_tokens(x, 7, sampling))


def test_rows_may_be_chosen_in_ways_of_their_own():
    x = logits(rows=4)
    ways = [
        Sampling(),
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=2.0, top_k=4),
        Sampling(temperature=1.0, top_p=0.5),
    ]
    draws = [Draw(way, row, 11) for row, way in enumerate(ways)]
    alone = [choose_from_draws(x[row : row + 1], [draw]) for row, draw in enumerate(draws)]
    assert choose_from_draws(x, draws).equal(torch.cat(alone))


def test_forbidden_tokens_are_never_chosen():
    x = logits()
    x[:, 10:] = -torch.inf
    assert choose_tokens(x, 0, Sampling(temperature=100.0)).max() < 10


@pytest.mark.parametrize(
    ("wrong", "flag"),
    [
        ({"temperature": -1.0}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"top_k": -1}, "--top-k"),
        ({"top_p": 0.0}, "--top-p"),
    ],
)
def test_impossible_settings_name_their_flag(wrong, flag):
    with pytest.raises(ConfigError, match=flag):
        Sampling(**wrong)
