"""Run in a process of its own: writing a corpus under a limit of the file size."""

import os
import resource

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.foundation.errors import DataError


def fill_tokens(folder):
    """Write tokens until the limit, print the error and what is left."""
    # The kernel refuses to let a file grow over this size: as real as a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 << 20, 3 << 20))
    builder = IndexedDatasetBuilder(os.path.join(folder, "c.bin"), dtype=np.int32)
    try:
        for _ in range(8):
            builder.add_item(np.zeros(1 << 18, np.int32))
    except DataError as error:
        print(error)
        print(sorted(os.listdir(folder)))


def fill_index(folder):
    """Write an index that does not fit, print the error and what is left."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    builder = IndexedDatasetBuilder(os.path.join(folder, "c.bin"), dtype=np.uint8)
    builder.add_documents(
        np.zeros(200_000, np.uint8), np.ones(200_000, np.int64), np.ones(200_000, np.int64)
    )
    try:
        builder.finalize(os.path.join(folder, "c.idx"))
    except DataError as error:
        print(error)
        print(sorted(os.listdir(folder)))
