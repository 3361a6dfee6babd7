"""Random cases in which the fast index code is compared with the oracle."""

from collections import Counter

import numpy as np

from megatron.core.datasets.order.blend_order import (
    GreedyOrder,
    greedy_counts,
    stride_of_table,
)
from megatron.core.datasets.order.index_building import (
    build_document_index,
    build_sample_index,
    build_shuffle_index,
    plan_epochs,
)
from tests.unit.datasets import oracle


def compare_gpt_case(seed: int) -> str:
    """Build one random corpus both ways; return the kind of case. Raises on any difference."""
    rng = np.random.RandomState(seed)
    num_documents = int(rng.randint(1, 60))
    lengths = rng.randint(0 if rng.rand() < 0.4 else 1, rng.choice([3, 20, 200]), num_documents)
    lengths = lengths.astype(np.int32)
    lengths[rng.randint(num_documents)] += 1
    docs = np.sort(rng.permutation(num_documents)[: rng.randint(1, num_documents + 1)])
    if lengths[docs].sum() == 0:
        docs = np.arange(num_documents)
    docs = docs.astype(np.int32)
    seq_length = int(rng.randint(1, 65))
    extra = int(rng.randint(0, 2))
    epoch_samples = int(lengths[docs].sum()) / seq_length
    num_samples = (
        None if rng.rand() < 0.15 else 1 + int(epoch_samples * rng.choice([0.3, 1.5, 2.1, 4.9]))
    )
    drop_last = bool(rng.rand() < 0.6)

    documents, samples, shuffle, epochs, separate = oracle.gpt_indices(
        docs, lengths, seq_length, extra, num_samples, seed, drop_last=drop_last
    )
    plan = plan_epochs(int(lengths[docs].sum()), seq_length, extra, num_samples)
    random = np.random.RandomState(seed)
    fast_documents = build_document_index(docs, plan, random)
    fast_samples = build_sample_index(lengths, fast_documents, plan, drop_last=drop_last)
    fast_shuffle = build_shuffle_index(len(fast_samples) - 1, plan, random)

    for name, fast, slow in [
        ("document index", fast_documents, documents),
        ("sample index", fast_samples, samples),
        ("shuffle index", fast_shuffle, shuffle),
    ]:
        assert fast.dtype == slow.dtype, (seed, name, fast.dtype, slow.dtype)
        assert np.array_equal(fast, slow), (seed, name, fast, slow)
    assert (plan.num_epochs, plan.separate_final_epoch) == (epochs, separate), seed
    epoch_kind = "one epoch" if epochs == 1 else f"last epoch {'apart' if separate else 'joint'}"
    return f"{epoch_kind}, x={extra}, tail {'dropped' if drop_last else 'kept'}"


def greedy_blend(weights, size, *, capacities=None):
    """Return the whole order of a greedy blend: datasets and numbers within them."""
    stride = stride_of_table(len(weights))
    table = greedy_counts(weights, size, stride, capacities=capacities)
    return GreedyOrder(weights, size, capacities=capacities, table=table).arrays()


def random_weights(rng: np.random.RandomState) -> np.ndarray:
    """Return normalised weights of one of several awkward kinds."""
    count = int(rng.randint(1, 13))
    raw = {
        "any": lambda: rng.rand(count) + 1e-3,
        "equal": lambda: np.ones(count),
        "whole": lambda: rng.randint(1, 6, count).astype(np.float64),
        "decades": lambda: 10.0 ** -rng.randint(0, 6, count),
        "halves": lambda: 2.0 ** -np.arange(count),
    }[rng.choice(["any", "equal", "whole", "decades", "halves"])]()
    return raw / raw.sum()


def compare_blend_case(seed: int) -> str:
    """Build one random blend both ways; return the kind of case. Raises on any difference."""
    rng = np.random.RandomState(10_000 + seed)
    capacities = None
    if rng.rand() < 0.35:
        capacities = rng.randint(1, rng.choice([5, 300, 3000]), int(rng.randint(1, 9)))
        weights, size = capacities / float(capacities.sum()), int(capacities.sum())
    else:
        weights, size = random_weights(rng), int(rng.choice([1, 100, 2000, 6000]))
    slow = oracle.blend(weights.tolist(), size, capacities)
    fast = greedy_blend(weights, size, capacities=capacities)
    for name, ours, theirs in zip(("dataset", "sample"), fast, slow, strict=True):
        assert ours.dtype == theirs.dtype, (seed, name)
        assert np.array_equal(ours, theirs), (seed, name, weights)
    return "exhaustive" if capacities is not None else "weighted"


def run(num_cases: int) -> tuple[Counter[str], Counter[str]]:
    """Compare `num_cases` corpora and as many blends; return how many of each kind were equal."""
    corpora = Counter(compare_gpt_case(seed) for seed in range(num_cases))
    blends = Counter(compare_blend_case(seed) for seed in range(num_cases))
    return corpora, blends
