"""Tensors that wait in a file: any strides, places that are used again, memory that is free."""

from __future__ import annotations

import gc
import os
import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.offload import tensor_file
from megatron.core.offload.parked_tensors import FileParking, ThreadParking
from megatron.core.offload.tensor_file import TensorFile
from tests.harness.tolerances import EXACT, assert_close

FLAG = "--activation-offload-path"
TENSORS = {
    "rows": torch.randn(5, 7),
    "columns": torch.randn(5, 7).t(),
    "a part": torch.randn(8, 9)[1:7:2, 2:5],
    "bf16": torch.randn(3, 4, 5).to(torch.bfloat16).permute(2, 0, 1),
    "bool": torch.rand(4, 3) > 0.5,
    "none": torch.empty(0, 3),
    "one": torch.tensor(3.5),
}


@pytest.fixture
def file(tmp_path):
    return TensorFile(str(tmp_path), flag=FLAG)


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back_as_it_was(name, file, tmp_path):
    tensor = TENSORS[name]
    parked = FileParking(ThreadParking(), file).park(tensor)
    for _ in range(2):
        parked.fetch()
        found = parked.take()
        assert_close(found, tensor, EXACT, name)
        assert found.stride() == torch.empty_like(tensor).stride()
    assert list(tmp_path.iterdir()) == []


def test_what_waits_is_not_in_memory(file):
    tensor = torch.randn(64)
    parked = FileParking(ThreadParking(), file).park(tensor)
    parked._written.result()
    assert parked._inner._host is None
    assert torch.equal(parked.take(), tensor)
    assert parked._inner._host is None


def test_steps_use_the_same_places_again(file):
    parking = FileParking(ThreadParking(), file)
    sizes = (1000, 2000, 1000)
    for step in range(3):
        tensors = [torch.full((size,), float(step)) for size in sizes]
        parked = [parking.park(tensor) for tensor in tensors]
        gc.collect()
        assert all(torch.equal(p.take(), t) for p, t in zip(parked, tensors, strict=True))
        del parked
        # 4,000, 8,000 and 4,000 bytes in whole pages.
        assert file.num_bytes == 4 * 4096


def test_a_slow_disk_is_waited_for(file, monkeypatch):
    monkeypatch.setattr(tensor_file, "MAX_UNWRITTEN_BYTES", 100)
    may_write = threading.Event()

    def slow_source():
        assert may_write.wait(10)
        return torch.zeros(25)

    first = file.write(file.take(100), 100, slow_source)
    with ThreadPoolExecutor(1) as caller:
        second = caller.submit(file.write, file.take(4), 4, lambda: torch.zeros(1))
        assert not second.done() and not first.done()
        with pytest.raises(TimeoutError):
            second.result(timeout=0.05)
        may_write.set()
        second.result(timeout=10).result(timeout=10)
    assert first.done()


def test_what_could_not_be_written_is_told_when_it_is_read(file, monkeypatch):
    def fails(*_):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(tensor_file, "write_exactly", fails)
    parked = FileParking(ThreadParking(), file).park(torch.ones(3))
    with pytest.raises(OSError, match="No space left"):
        parked.take()


def test_a_disk_that_is_too_full_is_refused_with_the_numbers(file, monkeypatch):
    full = namedtuple("full", ["f_bavail", "f_frsize"])(5, 2**20)
    monkeypatch.setattr(os, "statvfs", lambda directory: full)
    with pytest.raises(ConfigError, match="needs 64 MiB for this rank .* has 5 MiB free") as caught:
        file.take(100)
    assert FLAG in str(caught.value)


def test_a_directory_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be kept in .*/missing: No such file"):
        TensorFile(str(tmp_path / "missing"), flag=FLAG)
