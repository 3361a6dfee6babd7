"""Pretrain with Ray Train: it holds the GPUs of each node and starts torchrun there.

    ray job submit --working-dir . -- python examples/cluster/ray_train.py

Change the constants and the training command. RAY_ADDRESS names the cluster, whose nodes need
`ray[train]`, torch and this project. Ray Train starts all nodes again when one fails.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from typing import Any

from megatron.core.settings.command_line import NoFlags, read_command_line

NODES = 2
GPUS_PER_NODE = 8
RANKS_PER_NODE = 8
CPUS_PER_NODE = 64
MAX_RESTARTS = 3
STORAGE = "/runs/llama3-8b/ray"
"""Directory that all nodes share, for the records of Ray Train."""
ENVIRONMENT = {"OMP_NUM_THREADS": "8", "NCCL_DEBUG": "WARN"}
COMMAND = """
    pretrain_gpt.py --preset llama3-8b
    --tensor-model-parallel-size 8 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 512
    --train-iters 100000 --lr 3e-4 --lr-warmup-iters 2000 --bf16
    --data-path /data/corpus_text_document
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer
    --save /runs/llama3-8b --load /runs/llama3-8b --save-interval 500
    --exit-signal-handler
    --tensorboard-dir /runs/llama3-8b/tensorboard --log-interval 10
"""
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
             "MASTER_PORT")  # fmt: skip
"""Variables that Ray Train sets for its worker; torchrun sets its own."""


def train_on_node(config: dict[str, Any]) -> None:
    """Run torchrun on one node. Ray Train calls this function once on every node."""
    from ray import train

    environment = {k: v for k, v in os.environ.items() if k not in OF_A_RANK}
    words = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={config['nodes']}",
        f"--node-rank={train.get_context().get_world_rank()}",
        f"--nproc-per-node={config['ranks_per_node']}", "--master-port=29500",
        f"--master-addr={environment.pop('MASTER_ADDR', '127.0.0.1')}", *config["command"],
    ]  # fmt: skip
    subprocess.run(words, env=environment | config["environment"], check=True)


def main() -> None:
    """Run the training on the cluster until it ends, or has failed too often."""
    read_command_line(NoFlags, description=__doc__)
    from ray import train
    from ray.train.torch import TorchConfig, TorchTrainer

    resources = {"CPU": CPUS_PER_NODE} | ({"GPU": GPUS_PER_NODE} if GPUS_PER_NODE else {})
    TorchTrainer(
        train_on_node,
        train_loop_config={
            "nodes": NODES, "ranks_per_node": RANKS_PER_NODE, "environment": ENVIRONMENT,
            "command": shlex.split(COMMAND),
        },
        torch_config=TorchConfig(backend="gloo"),  # joins the nodes; torchrun's ranks use their own
        scaling_config=train.ScalingConfig(
            num_workers=NODES, use_gpu=GPUS_PER_NODE > 0, resources_per_worker=resources,
            placement_strategy="STRICT_SPREAD" if NODES > 1 else "PACK",
        ),
        run_config=train.RunConfig(
            storage_path=STORAGE, failure_config=train.FailureConfig(max_failures=MAX_RESTARTS)
        ),
    ).fit()  # fmt: skip


if __name__ == "__main__":
    main()
