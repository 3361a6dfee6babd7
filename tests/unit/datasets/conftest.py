"""Both implementations of the inner loops: numpy, and C where there is a compiler."""

import functools
import importlib.util
import shlex
import shutil
import sysconfig
import tempfile
from pathlib import Path

import pytest

from megatron.core.datasets import blended_dataset, gpt_dataset, native

HAS_COMPILER = shutil.which(shlex.split(sysconfig.get_config_var("CC") or "cc")[0]) is not None
IMPLEMENTATIONS = ["numpy", "compiled"] if HAS_COMPILER else ["numpy"]


@functools.cache
def compiled_here():
    """Build the C part of this checkout, whatever is installed, and load it."""
    with tempfile.TemporaryDirectory() as folder:
        library = native.build(Path(folder))
        spec = importlib.util.spec_from_file_location("megatron.core.datasets._native", library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    """Run the test once with each implementation; its name."""
    module = None if request.param == "numpy" else compiled_here()
    monkeypatch.setattr(native, "compiled", module)
    return request.param


@pytest.fixture
def everything_is_kept(monkeypatch):
    """Write index files of the smallest corpora, too."""
    monkeypatch.setattr(gpt_dataset, "_WORTH_KEEPING", 0)
    monkeypatch.setattr(blended_dataset, "_WORTH_KEEPING", 0)
