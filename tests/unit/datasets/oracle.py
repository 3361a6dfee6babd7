"""The sample order of a corpus, written slowly and plainly: the oracle of the fast code.

Follows the public description of the recipe step by step, one document and one sample at a time,
with Python numbers. Shares no code with `megatron.core.datasets`.
"""

import math

import numpy as np


def gpt_indices(docs, lengths, seq_length, extra, num_samples, seed, *, drop_last=True):
    """Return (document index, sample index, shuffle index, number of epochs, separate?)."""
    epoch_tokens = sum(int(lengths[d]) for d in docs)
    epochs = 1
    if num_samples is not None:
        while epochs * epoch_tokens < num_samples * seq_length + extra:
            epochs += 1
    separate, before = False, 0
    if epochs > 1:
        before = ((epochs - 1) * epoch_tokens - extra) // seq_length
        last = num_samples - before
        per_epoch = (epoch_tokens - extra) // seq_length
        assert 0 <= last <= per_epoch + 1
        separate = last < int(0.80 * per_epoch)

    random = np.random.RandomState(seed)
    document_index = _documents(list(docs), epochs, separate, random)

    total = epochs * epoch_tokens - extra
    if drop_last:
        count = total // seq_length
    else:
        count = int(math.ceil(np.float32(total) / np.float32(seq_length)))
    sample_index = _samples(document_index, lengths, seq_length, extra, count)
    shuffle_index = _shuffled(count, separate, before, random)
    return document_index, sample_index, shuffle_index, epochs, separate


def _documents(docs, epochs, separate, random):
    def shuffled(times):
        order = np.array(docs * times, np.int32)
        random.shuffle(order)
        return order.tolist()

    if not separate:
        return np.array(shuffled(epochs), np.int32)
    return np.array(shuffled(epochs - 1) + shuffled(1), np.int32)


def _samples(document_index, lengths, seq_length, extra, count):
    rows = [(0, 0)]
    position, offset = 0, 0
    for _ in range(count):
        remaining = seq_length + extra
        while remaining > 0:
            taken = int(lengths[document_index[position]]) - offset
            remaining -= taken
            if remaining <= 0:
                offset = offset + remaining + taken - extra
            elif position == len(document_index) - 1:
                offset = int(lengths[document_index[position]]) - extra
                break
            else:
                position, offset = position + 1, 0
        rows.append((position, offset))
    return np.array(rows, np.int32)


def _shuffled(count, separate, before, random):
    if not separate:
        order = np.arange(count, dtype=np.uint32)
        random.shuffle(order)
        return order
    first = np.arange(0, before, dtype=np.uint32)
    random.shuffle(first)
    second = np.arange(before, count, dtype=np.uint32)
    random.shuffle(second)
    return np.concatenate([first, second])


def blend(weights, size, capacities=None):
    """Return (dataset of each sample, its number within that dataset), one sample at a time."""
    taken = [0] * len(weights)
    datasets, numbers = [], []
    for sample in range(size):
        best, best_deficit = -1, -math.inf
        for d, weight in enumerate(weights):
            if capacities is not None and taken[d] >= capacities[d]:
                continue
            deficit = weight * max(float(sample), 1.0) - float(taken[d])
            if deficit > best_deficit:
                best, best_deficit = d, deficit
        datasets.append(best)
        numbers.append(taken[best])
        taken[best] += 1
    return np.array(datasets, np.int16), np.array(numbers, np.int64)


def sample_tokens(corpus, document_index, sample_index, j, extra):
    """Return the tokens of sample `j` (before padding) as a list."""
    (first, first_offset), (last, last_offset) = (
        sample_index[j].tolist(),
        sample_index[j + 1].tolist(),
    )
    tokens = []
    for position in range(first, last + 1):
        document = list(corpus[document_index[position]])
        begin = first_offset if position == first else 0
        end = last_offset + extra if position == last else len(document)
        tokens += [int(token) for token in document[begin:end]]
    return tokens
