"""Windows of a corpus and requests of the harness: every token once, with what context there is."""

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.inference.harness import check_generation, rolling_rows, row_of_pair
from tools.evaluate_perplexity import check_windows, windows


@pytest.mark.parametrize(
    ("count", "window", "stride"), [(10, 4, 3), (10, 4, 1), (11, 5, 2), (3, 8, 4), (2, 2, 1)]
)
def test_windows_score_every_token_but_the_first_once(count, window, stride):
    scored = []
    for begin, end, first in windows(count, window, stride):
        assert end - begin <= window
        assert first >= 1, "something is before the first scored token"
        if scored:
            assert first >= min(window - stride, begin + first)
        scored += range(begin + first, end)
    assert scored == list(range(1, count))


def test_one_token_has_nothing_to_score():
    assert list(windows(1, 4, 2)) == []


@pytest.mark.parametrize(("window", "stride"), [(4, 4), (4, 0), (34, 8)])
def test_windows_that_leave_tokens_out_or_do_not_fit_are_refused(window, stride):
    with pytest.raises(ConfigError, match="--window 33 --stride 16"):
        check_windows(window, stride, 32)


def test_a_pair_scores_its_continuation_and_is_cut_in_front():
    assert row_of_pair([1, 2], [3, 4], 8) == ([1, 2, 3, 4], 2)
    assert row_of_pair([1, 2, 3], [4, 5], 3) == ([2, 3, 4, 5], 2)
    # A continuation longer than the model: all that fits behind one token.
    assert row_of_pair([1], [2, 3, 4, 5], 3) == ([2, 3, 4, 5], 1)


@pytest.mark.parametrize("longest", [1, 3, 4, 9])
def test_rolling_rows_score_every_token_once_in_the_fullest_windows(longest):
    tokens = list(range(10, 17))
    scored = []
    for row in rolling_rows(tokens, 0, longest):
        assert len(row.tokens) - 1 <= longest
        scored += row.tokens[row.first_scored :]
    assert scored == tokens
    assert all(len(row.tokens) == longest + 1 for row in rolling_rows(tokens, 0, longest)[:-1])


def test_what_a_task_asks_of_generation_acts_or_is_refused():
    check_generation({"until": ["x"], "do_sample": True, "temperature": 0.5, "max_gen_toks": 4})
    check_generation({"num_beams": 1, "repetition_penalty": 1.0, "min_p": None, "top_p": 0.9})
    for name, value in (("repetition_penalty", 1.2), ("num_beams", 4), ("min_p", 0.1), ("new", 1)):
        with pytest.raises(ConfigError, match=f"{name}={value}"):
            check_generation({"until": [], name: value})
