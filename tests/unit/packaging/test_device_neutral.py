"""Code that names one kind of device is refused by the linter that every commit passes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUFF = shutil.which("ruff", path=str(Path(sys.executable).parent)) or "ruff"


@pytest.mark.parametrize(
    ("code", "path", "is_refused"),
    [
        ("import torch\n\ntorch.cuda.synchronize()\n", "megatron/training/run/loop.py", True),
        ("from torch import cuda\n\ncuda.synchronize()\n", "tools/new.py", True),
        ("import torch.cuda.nvtx\n\ntorch.cuda.nvtx.mark('x')\n", "benchmarks/new.py", True),
        ("import torch\n\ntorch.cuda.synchronize()\n", "megatron/core/foundation/device.py", False),
        ("import torch\n\ntorch.backends.cudnn.enabled = True\n", "tools/new.py", False),
    ],
)
def test_bare_torch_cuda_is_refused_outside_of_the_device_module(code, path, is_refused):
    command = [RUFF, "check", "--no-cache", "--stdin-filename", str(ROOT / path), "-"]
    found = subprocess.run(command, input=code, capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == int(is_refused), found.stdout + found.stderr
    assert ("TID251" in found.stdout) == is_refused
