"""Run in a process of its own: hold the lock of a cache entry, say so, and never finish."""

import sys
import time

import numpy as np

from megatron.core.datasets.order.index_cache import Expected, IndexCache


def never_finish():
    print("building", flush=True)
    time.sleep(600)
    return {}


def finish():
    return {"order": np.arange(5, dtype=np.int32)}


if __name__ == "__main__":
    cache = IndexCache(directory=sys.argv[1], stem="abc-Thing-train", description="made of this")
    build = never_finish if sys.argv[2] == "die" else finish
    arrays = cache.load_or_build(build, {"order": Expected((np.int32,), (5,))})
    print(arrays["order"].tolist(), flush=True)
