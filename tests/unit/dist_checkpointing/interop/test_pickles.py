"""The reader of pickles: plain data comes through, and nothing else, whatever a pickle says."""

import os
import pickle
import pickletools
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from megatron.core.dist_checkpointing.durable import DamagedCheckpointError
from megatron.core.dist_checkpointing.interop.pickles import UnsafePickleError, load_pickle
from tests.unit.dist_checkpointing.interop.payloads import Runs, amplifiers, bombs, calls

PLAIN = {
    "numbers": [0, -1, 255, 65536, 1 << 40, -(1 << 62), 0.5, float("inf")],
    "text": ["", "ä", "x" * 300], "bytes": [b"", b"\x00" * 300], "none": None,
    "flags": [True, False], "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
    "dict": {1: 2, "a": {}}, "large": 1 << 100,
}  # fmt: skip


@pytest.mark.parametrize("protocol", range(3, 6))
def test_plain_data_comes_through_unchanged(protocol: int) -> None:
    data = pickle.dumps(PLAIN, protocol)
    assert load_pickle(data, what="test") == PLAIN


def test_known_objects_become_plain_data() -> None:
    value = {
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "index": MetadataIndex("w", (1, 2), 3),
        "path": Path("a/b"),
        "numpy": np.float64(2.5),
    }
    found = load_pickle(pickle.dumps(value, 4), what="test")
    assert found["dtype"] is torch.bfloat16
    assert found["size"] == (2, 3)
    assert found["index"].state == {"fqn": "w", "offset": (1, 2), "index": 3}
    assert found["path"].args == ("a", "b")
    assert found["numpy"].kind.startswith("numpy")  # inert: its meaning is not needed


def test_shared_parts_stay_shared() -> None:
    part: list[int] = [1]
    found = load_pickle(pickle.dumps([part, part]), what="test")
    assert found[0] is found[1]


@pytest.mark.parametrize("kind", calls(Path("x")))
def test_a_pickle_that_names_code_is_refused_and_nothing_runs(kind: str, ram_path: Path) -> None:
    canary = ram_path / "canary"
    with pytest.raises(UnsafePickleError, match=r"CKPT_UNSAFE file=the\.file offset=\d+"):
        load_pickle(calls(canary)[kind], what="the.file")
    assert not canary.exists()


@pytest.mark.parametrize("kind", bombs())
def test_a_malformed_pickle_is_refused_in_bounded_memory(kind: str) -> None:
    data = bombs()[kind]
    tracemalloc.start()
    try:
        with pytest.raises(DamagedCheckpointError, match=r"the\.file"):
            load_pickle(data, what="the.file")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", amplifiers())
def test_what_a_pickle_names_again_costs_no_more_than_its_length(kind: str) -> None:
    data = amplifiers()[kind]
    tracemalloc.start()
    began = time.process_time()
    try:
        with pytest.raises(DamagedCheckpointError, match=r"the\.file") as caught:
            load_pickle(data, what="the.file")
        assert len(str(caught.value)) < 1000
        assert tracemalloc.get_traced_memory()[1] < (64 << 20) + 100 * len(data)
    finally:
        tracemalloc.stop()
    # Tracing makes it several times slower.
    assert time.process_time() - began < 2 + 10e-6 * len(data)


@pytest.mark.parametrize("kind", [k for k, data in amplifiers().items() if b"2\x86" in data])
def test_a_tuple_that_the_memo_shares_costs_no_more_than_its_length(kind: str) -> None:
    data = amplifiers()[kind].replace(b"2\x86", b"q\x63h\x63\x86")
    with pytest.raises(DamagedCheckpointError, match=r"the\.file"):
        load_pickle(data, what="the.file")


def test_a_huge_memo_index_costs_one_entry() -> None:
    data = b"\x80\x02]r\xff\xff\xff\xff."
    assert load_pickle(data, what="test") == []


def test_the_refusal_names_the_global_and_its_place() -> None:
    data = pickle.dumps([1, Runs(os.system, "true")], 2)
    place = next(p for op, _, p in pickletools.genops(data) if op.name == "GLOBAL")
    with pytest.raises(UnsafePickleError, match=f"offset={place}: the global posix.system"):
        load_pickle(data, what="the.file")


def test_every_cut_of_a_pickle_is_refused() -> None:
    data = pickle.dumps(PLAIN, 4)
    for length in range(len(data)):
        with pytest.raises(DamagedCheckpointError):
            load_pickle(data[:length], what="test")
