"""Windows of a corpus and requests of the harness: every token once, with what context there is."""

from types import ModuleType, SimpleNamespace

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.tokenizers.null_and_byte import ByteTokenizer
from megatron.inference import evaluation
from megatron.inference.evaluation import Score, check_generation, rolling_rows, row_of_pair, score
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


class Begun(ByteTokenizer):
    """Bytes after an id that begins a text."""

    around_a_text = (300,), ()

    def tokenize(self, text):
        return [300, *super().tokenize(text)]


def test_the_harness_begins_each_text_once_and_scores_the_classes_of_the_model(monkeypatch):
    library, seen = ModuleType("lm_eval.api.model"), []
    library.LM = object
    monkeypatch.setattr(evaluation, "require", lambda *_, **__: library)

    def scored(model, rows, *, vocab_size, **_options):
        seen.append((rows, vocab_size))
        return [Score([0.0] * (len(row.tokens) - row.first_scored), [True]) for row in rows]

    monkeypatch.setattr(evaluation, "score", scored)
    session = SimpleNamespace(
        tokenizer=Begun(), max_sequence_length=64, vocab_size=320, model=None, groups=None
    )
    model = evaluation.harness_model(session, batch_size=1)
    requests = [SimpleNamespace(args=args) for args in (("ab ", "cd"), ("", "x"))]
    model.loglikelihood(requests)
    model.loglikelihood_rolling([SimpleNamespace(args=("xyz",))])
    (pairs, classes), (rolling, _) = seen
    assert classes == 320
    assert [[*row] for row in pairs] == [[[300, *b"ab cd"], 3], [[300, *b"x"], 1]]
    assert [[*row] for row in rolling] == [[[300, *b"xyz"], 1]]


def test_a_row_with_an_id_that_the_model_lacks_is_refused_before_it_is_scored():
    rows = [evaluation.Row([1, 2]), evaluation.Row([1, 7])]
    with pytest.raises(ConfigError, match="token id 7 is outside the vocabulary of 7"):
        score([], rows, vocab_size=7, batch_size=1, groups=None)
