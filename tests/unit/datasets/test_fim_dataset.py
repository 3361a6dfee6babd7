"""Samples whose documents are cut: they stay as long, can be put together, and are keyed."""

import pickle

import numpy as np
import pytest

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.foundation.errors import ConfigError
from megatron.core.tokenizers.null_and_byte import ByteTokenizer
from tests.unit.datasets.corpora import config

TOKENIZER = ByteTokenizer()
TOKENS = {"prefix": "<0x01>", "middle": "<0x02>", "suffix": "<0x03>", "pad": "<0x04>"}
PREFIX, MIDDLE, SUFFIX, EOD = 1, 2, 3, TOKENIZER.eod
LENGTH = 64


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fim")
    random = np.random.default_rng(0)
    with IndexedDatasetBuilder(f"{folder / 'c'}.bin", dtype=np.uint16) as builder:
        for _ in range(200):
            document = random.integers(97, 123, random.integers(5, 60)).tolist()
            document[len(document) // 2] = ord("|")
            builder.add_document(np.array([*document, EOD]), [len(document) + 1])
        builder.finalize(f"{folder / 'c'}.idx")
    return str(folder / "c")


def dataset(corpus, kind=GPTFIMDataset, **settings):
    plain = config(
        sequence_length=LENGTH, blend=([corpus], None), split="1", tokenizer=TOKENIZER,
        random_seed=settings.pop("random_seed", 7), vocab_size=None,
        eod_mask_loss=settings.pop("eod_mask_loss", False),
    )  # fmt: skip
    if kind is GPTFIMDataset:
        fields = {name: value for name, value in vars(plain).items() if not name.startswith("_")}
        names = GPTFIMDatasetConfig.__dataclass_fields__
        fields = {n: v for n, v in fields.items() if n in names and names[n].init}
        plain = GPTFIMDatasetConfig(**{**fields, "fim_extra_tokens": TOKENS, **settings})
    return BlendedMegatronDatasetBuilder(kind, [90, 0, 0], lambda: True, plain).build()[0]


def text_of(samples, i):
    sample = samples[i]
    return [*sample["tokens"].tolist(), int(sample["labels"][-1])]


def parts(ids, separator=EOD):
    found, part = [], []
    for one in ids:
        if one == separator:
            found.append(part)
            part = []
        else:
            part.append(one)
    return [*found, part]


def put_together(ids):
    """Return (document as far as it is there, order)."""
    if not ids or ids[0] != PREFIX:
        return ids, "plain"
    middle, suffix = ids.index(MIDDLE), ids.index(SUFFIX)
    if suffix == 1 and middle > suffix:
        return ids[middle + 1 :] + ids[2:middle], "spm"
    return ids[1:suffix] + ids[middle + 1 :] + ids[suffix + 1 : middle], "psm"


@pytest.mark.parametrize(("rate", "spm_rate"), [(0.0, 0.5), (1.0, 0.0), (1.0, 1.0), (0.5, 0.5)])
def test_documents_keep_their_places_and_lose_three_tokens_at_most(corpus, rate, spm_rate):
    plain = dataset(corpus, GPTDataset)
    cut = dataset(corpus, fim_rate=rate, fim_spm_rate=spm_rate)
    orders = []
    for i in range(90):
        for before, after in zip(parts(text_of(plain, i)), parts(text_of(cut, i)), strict=True):
            assert len(before) == len(after)
            joined, order = put_together(after)
            if order == "plain":
                assert before == after
            else:
                assert joined == before[:-3]
            if len(before) > 40:  # a short one may have no suffix to give up
                orders.append(order)
    share = orders.count("plain") / len(orders)
    # A cut that leaves no suffix of three tokens is not made: some 2 * 3/40 of them.
    assert share == pytest.approx(1 - rate, abs=0.15 if rate else 0)
    if rate == 1.0:
        # A PSM whose prefix is empty looks like SPM.
        assert orders.count("spm") == pytest.approx(spm_rate * len(orders), abs=0.15 * len(orders))


def test_a_sample_depends_on_seed_and_number_alone(corpus):
    samples = dataset(corpus)
    backwards = {i: text_of(samples, i) for i in reversed(range(90))}
    again = pickle.loads(pickle.dumps(dataset(corpus)))
    assert all(text_of(again, i) == backwards[i] for i in range(90))
    other = dataset(corpus, random_seed=8)
    assert any(text_of(other, i) != backwards[i] for i in range(90))
    rates = (samples, dataset(corpus, fim_rate=0.4))
    identities = [one.order_fingerprint() for one in rates]
    assert identities[0] != identities[1]


def test_files_in_a_document_are_cut_by_themselves(corpus):
    plain = dataset(corpus, GPTDataset)
    cut = dataset(corpus, fim_rate=1.0, fim_fragment_rate=1.0, fim_split_sample="<0x7C>")
    assert any(put_together(part)[1] != "plain" for part in parts(text_of(cut, 3), ord("|")))
    for i in range(90):
        before, after = text_of(plain, i), text_of(cut, i)
        assert [n for n, one in enumerate(before) if one in (ord("|"), EOD)] == [
            n for n, one in enumerate(after) if one in (ord("|"), EOD)
        ]


def test_text_with_a_given_beginning_is_left_alone(corpus):
    plain = dataset(corpus, GPTDataset)
    cut = dataset(corpus, fim_rate=1.0, fim_no_prefix="a")
    for i in range(90):
        for before, after in zip(parts(text_of(plain, i)), parts(text_of(cut, i)), strict=True):
            if before and before[0] == ord("a"):
                assert before == after


def test_what_cannot_be_is_refused(corpus):
    with pytest.raises(ConfigError, match="has no token '<mid>'"):
        dataset(corpus, fim_extra_tokens={**TOKENS, "middle": "<mid>"})
    with pytest.raises(ConfigError, match=r"fim_spm_rate=1\.5"):
        dataset(corpus, fim_spm_rate=1.5)
