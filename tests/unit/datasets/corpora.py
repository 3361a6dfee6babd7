"""Small corpora for tests, on disk and not."""

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)
from megatron.core.datasets.utils import Split

EOD = 99


class Tokenizer:
    """As much of a tokenizer as datasets use."""

    def __init__(self, vocab_size=100, eod=EOD, pad=None):
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = pad
        self.unique_identifiers = {"class": "Tokenizer", "vocab_size": vocab_size}


def random_documents(seed, count, longest=30, vocab_size=99):
    """Return documents of random tokens that end with `EOD`."""
    rng = np.random.RandomState(seed)
    lengths = rng.randint(1, longest, count)
    return [np.append(rng.randint(0, vocab_size, length), EOD) for length in lengths]


def write_corpus(prefix, documents, dtype=np.uint16):
    """Write documents of one sequence each; return the prefix."""
    prefix = str(prefix)
    builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(get_idx_path(prefix))
    return prefix


def config(**settings):
    """Return a `GPTDatasetConfig` with everything off."""
    defaults = {
        "random_seed": 7,
        "sequence_length": 16,
        "split": "1",
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    if "blend_per_split" in settings:
        del defaults["split"]
    return GPTDatasetConfig(**{**defaults, **settings})


def gpt_dataset(documents_or_prefix, num_samples=None, split=None, **settings):
    """Return a dataset over the whole of a corpus; documents are kept in memory."""
    if isinstance(documents_or_prefix, str):
        corpus, path = IndexedDataset(documents_or_prefix), documents_or_prefix
    else:
        corpus, path = _InMemory(documents_or_prefix), None
    indices = np.arange(len(corpus.sequence_lengths), dtype=np.int32)
    settings = config(**settings)
    return GPTDataset(corpus, path, indices, num_samples, split or Split.train, settings)


class _InMemory:
    def __init__(self, documents):
        self.documents = [np.asarray(document) for document in documents]
        self.sequence_lengths = np.array([len(d) for d in self.documents], np.int32)

    def __len__(self):
        return len(self.documents)

    def get(self, idx, offset=0, length=None):
        document = self.documents[idx]
        return document[offset:] if length is None else document[offset : offset + length]
