"""A cut document put together again is the document; rates, orders and ids are those asked for."""

import json
import random
from itertools import chain

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.preprocessing.transforms import fill_in_middle
from megatron.core.foundation.errors import ConfigError
from tools import preprocess_data

VOCAB = {"<fim_prefix>": 300, "<fim_middle>": 301, "<fim_suffix>": 302}
TEXTS = [
    f"{i}: " + "".join(random.Random(i).choices("abcdefgh é漢", k=i % 60)) for i in range(1000)
]


def encode(texts):
    """One id for each byte."""
    ids = [list(text.encode()) for text in texts]
    return np.array([*chain.from_iterable(ids)], np.uint32), np.array(
        [len(one) for one in ids], np.int64
    )


def documents(texts, **settings):
    settings = {"rate": 0.5, "spm_rate": 0.5, "seed": 1, "names": None, **settings}
    ids, counts = fill_in_middle(VOCAB, **settings)(texts, encode)
    return [one.tolist() for one in np.split(ids, np.cumsum(counts)[:-1])]


def put_together(ids):
    """Return (text, order) of a document."""
    if 300 not in ids:
        return bytes(ids).decode(), "plain"
    middle = ids.index(301)
    assert ids[0] == 300
    suffix = ids.index(302)
    if suffix == 1:  # <prefix> <suffix> suffix <middle> prefix middle
        return bytes(ids[middle + 1 :] + ids[2:middle]).decode(), "spm"
    return bytes(ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle]).decode(), "psm"


def test_every_document_can_be_put_together_again():
    for text, ids in zip(TEXTS, documents(TEXTS), strict=True):
        assert put_together(ids)[0] == text


@pytest.mark.parametrize(("rate", "spm_rate"), [(0, 0.5), (1, 0), (1, 1), (0.3, 0.5)])
def test_the_shares_are_those_asked_for(rate, spm_rate):
    # Long texts: an empty prefix looks like the other order.
    texts = [text * 5 for text in TEXTS]
    orders = [put_together(ids)[1] for ids in documents(texts, rate=rate, spm_rate=spm_rate)]
    # Four standard deviations of 1,000 draws.
    assert orders.count("plain") == pytest.approx(1000 * (1 - rate), abs=63)
    assert orders.count("spm") == pytest.approx(1000 * rate * spm_rate, abs=63)


def test_the_cut_depends_on_seed_and_text_alone():
    assert documents(TEXTS[500:]) == documents(TEXTS)[500:]
    assert documents(TEXTS, seed=2) != documents(TEXTS)
    assert documents([]) == [[]]
    assert documents(["", TEXTS[3], ""], rate=1)[1] == documents([TEXTS[3]], rate=1)[0]


def test_a_tokenizer_without_the_tokens_and_wrong_rates_are_refused():
    with pytest.raises(ConfigError, match="<fim_prefix>/<fim_middle>/<fim_suffix>"):
        fill_in_middle({}, rate=1, spm_rate=0, seed=0, names=None)
    with pytest.raises(ConfigError, match="--fim-spm-rate 2"):
        fill_in_middle(VOCAB, rate=1, spm_rate=2, seed=0, names=None)
    renamed = {"A": 1, "B": 2, "C": 3}
    found = fill_in_middle(renamed, rate=1, spm_rate=0, seed=0, names=["A", "B", "C"])
    assert (found.prefix, found.middle, found.suffix) == (1, 2, 3)


def test_the_tool_cuts_documents(tmp_path):
    lines = "".join(json.dumps({"text": "some text that is long enough"}) + "\n" for _ in range(3))
    (tmp_path / "in.jsonl").write_text(lines)
    command = [
        "--input", str(tmp_path / "in.jsonl"), "--output-prefix", str(tmp_path / "out"),
        "--tokenizer-type", "ByteTokenizer", "--workers", "0", "--append-eod",
        "--fim-rate", "1", "--fim-tokens", "<0x01>", "<0x02>", "<0x03>",
    ]  # fmt: skip
    assert preprocess_data.main(command) == 0
    first, *others = IndexedDataset(str(tmp_path / "out_text_document"))[:]
    assert all(np.array_equal(first, other) for other in others)
    assert sorted(first[first < 4]) == [1, 2, 3]
    assert first[-1] == 256
    assert len(first) == len("some text that is long enough") + 4
