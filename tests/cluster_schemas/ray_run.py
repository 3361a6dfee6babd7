"""A training of two ranks that Ray Train starts on this machine, and starts again when it failed.

    make schemas

Ray itself plays the cluster. The training script is a stand-in that joins its ranks by gloo.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from megatron.launcher.ray_train import main

SCRIPT = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1); dist.all_reduce(total)
with open(f"{os.environ['FOLDER']}/log", "a") as log:
    print(dist.get_rank(), int(total), *sys.argv[1:], file=log)
dist.barrier()
first = os.path.join(os.environ["FOLDER"], "failed")
if dist.get_rank() == 0 and not os.path.exists(first):
    open(first, "w").close()
    sys.exit(1)
"""


def run() -> int:
    """Run, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FOLDER": folder, "GLOO_SOCKET_IFNAME": "lo", "RAY_TRAIN_V2_ENABLED": "1"}
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        status = main([
            "--ranks-per-node", "2", "--cpus-per-node", "1", "--max-restarts", "1",
            "--storage", f"{folder}/ray", "--", str(script), "--lr", "1",
        ])  # fmt: skip
        lines = sorted(Path(folder, "log").read_text().splitlines())
    assert lines == ["0 2 --lr 1"] * 2 + ["1 2 --lr 1"] * 2, lines
    print("Ray Train: 2 ranks, failed once, started again, ended with status", status)
    return status


if __name__ == "__main__":
    sys.exit(run())
