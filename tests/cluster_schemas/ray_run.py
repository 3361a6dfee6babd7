"""Run examples/cluster/ray_train.py on this machine: two ranks that fail once and are restarted.

    make schemas

A Ray cluster of one node starts a script of a few lines instead of the training.
"""

import os
import sys
import tempfile
from pathlib import Path

from examples.cluster import ray_train

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
    """Run the example; return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FOLDER": folder, "GLOO_SOCKET_IFNAME": "lo", "RAY_TRAIN_V2_ENABLED": "1"}
        script = Path(folder, "train.py")
        script.write_text(SCRIPT)
        vars(ray_train).update(
            NODES=1, GPUS_PER_NODE=0, RANKS_PER_NODE=2, CPUS_PER_NODE=1, MAX_RESTARTS=1,
            STORAGE=f"{folder}/ray", COMMAND=f"{script} --lr 1",
        )  # fmt: skip
        ray_train.main()
        lines = sorted(Path(folder, "log").read_text().splitlines())
    assert lines == ["0 2 --lr 1"] * 2 + ["1 2 --lr 1"] * 2, lines
    print("Ray Train: 2 ranks failed once, were restarted, and ended")
    return 0


if __name__ == "__main__":
    sys.exit(run())
