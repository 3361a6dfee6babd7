"""Ray: a submitted job that has Ray Train start torchrun on each node.

    python -m megatron.launcher.ray_train --nodes 2 --gpus-per-node 8 -- pretrain_gpt.py ...

Ray Train's worker is a node here: it holds all of its GPUs, and torchrun starts the ranks in it, as
everywhere else. Ray Train starts all nodes again when one fails.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.settings.command_line import read_command_line
from megatron.launcher.job import Job
from megatron.launcher.kubernetes import as_yaml
from megatron.launcher.plan import JobFile, LaunchPlan, check_paths, check_words, variables

_OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK",
              "MASTER_PORT")  # fmt: skip
"""Variables that Ray Train sets for its worker, and torchrun for its own."""


@dataclass(frozen=True, kw_only=True)
class RayFlags:
    """What the entry point of the job is told."""

    name: str = "lattice"
    """Name of the run in Ray Train."""
    nodes: int = 1
    """Nodes that train."""
    gpus_per_node: int = 0
    """GPUs of a node."""
    cpus_per_node: int = 1
    """CPU cores of a node."""
    ranks_per_node: int = 1
    """Ranks of a node."""
    master_port: int = 29500
    """Port at which ranks meet."""
    max_restarts: int = 0
    """How often a run that fails is started again."""
    storage: str = ""
    """Directory that all nodes see, for what Ray Train writes of the run."""
    check: bool = False
    """Check the nodes before the training."""


def plan(job: Job) -> LaunchPlan:
    """Return the environment of the job and the command that submits it."""
    check_paths(job, "Ray")
    if job.setup:
        raise ConfigError(
            "setup lines, and the back end Ray.",
            rule="Ray's workers are running before the job is submitted",
            flags=["--setup"],
            fix="set the cluster's nodes up when they start, or use --image",
        )
    environment: dict[str, Any] = {"working_dir": ".", "env_vars": variables(job)}
    if job.image:
        mounts = [f"{m.source}:{m.target}{':ro' * m.is_read_only}" for m in job.mounts]
        options = [f"--volume={one}" for one in mounts]
        options.append(f"--shm-size={job.shared_memory_gib}g")
        environment["container"] = {"image": job.image, "run_options": options}
        del environment["working_dir"]  # Ray takes a container or a working directory
    path = f"{job.folder}/{job.name}-ray.yaml"
    flags = RayFlags(
        name=job.name, nodes=job.nodes, gpus_per_node=job.gpus_per_node,
        cpus_per_node=job.cpus_per_node or job.ranks_per_node, ranks_per_node=job.ranks_per_node,
        master_port=job.master_port, max_restarts=job.max_restarts, storage=job.directory,
        check=job.check,
    )  # fmt: skip
    entry = ["python", "-m", __name__, *_words(flags), "--", *job.command]
    submit = ("ray", "job", "submit", "--runtime-env", path, "--", *entry)
    notes = ("RAY_ADDRESS names the cluster; it has to run already",)
    return LaunchPlan((JobFile(path, as_yaml(environment)),), (submit,), notes)


def _words(flags: RayFlags) -> list[str]:
    """Return the flags as words."""
    found = []
    for field in dataclasses.fields(flags):
        value, name = getattr(flags, field.name), "--" + field.name.replace("_", "-")
        if value is True:
            found.append(name)
        elif value not in (False, ""):
            found.append(f"{name}={value}")
    return found


def torchrun_words(flags: RayFlags, node: int, address: str, command: Sequence[str]) -> list[str]:
    """Return what a node runs."""
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={flags.nodes}",
        f"--node-rank={node}", f"--nproc-per-node={flags.ranks_per_node}",
        f"--master-addr={address}", f"--master-port={flags.master_port}", *command,
    ]  # fmt: skip


def train_on_node(config: Mapping[str, Any]) -> None:
    """Run the check and the training of one node; called by Ray Train there.

    Raises:
        RuntimeError: torchrun failed, by which Ray Train knows.
    """
    train = optional_imports.require("ray.train", purpose="--backend ray")
    flags = RayFlags(**config["flags"])
    node = train.get_context().get_world_rank()
    environment = {k: v for k, v in os.environ.items() if k not in _OF_A_RANK}
    address = environment.pop("MASTER_ADDR", "127.0.0.1")
    for command in config["commands"]:
        words = torchrun_words(flags, node, address, command)
        status = subprocess.call(words, env=environment)
        if status:
            raise RuntimeError(
                f"node {node}: status {status} of {shlex.join(words)}; its log says why"
            )


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Train by Ray Train; return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    cut = words.index("--") if "--" in words else len(words)
    flags = read_command_line(RayFlags, words[:cut], description=__doc__)
    command = words[cut + 1 :]
    train = optional_imports.require("ray.train", purpose="--backend ray")
    of_torch = optional_imports.require("ray.train.torch", purpose="--backend ray")
    described = Job(
        gpus_per_node=flags.gpus_per_node, processes_per_node=flags.ranks_per_node,
        command=tuple(command),
    )  # fmt: skip
    commands = [check_words(described)] if flags.check else []
    resources = {"CPU": flags.cpus_per_node, "GPU": flags.gpus_per_node}
    trainer = of_torch.TorchTrainer(
        train_on_node,
        train_loop_config={"flags": dataclasses.asdict(flags), "commands": [*commands, command]},
        # Ray's own group joins the nodes, and is not used for the training.
        torch_config=of_torch.TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(
            num_workers=flags.nodes, use_gpu=flags.gpus_per_node > 0,
            resources_per_worker={name: count for name, count in resources.items() if count},
            placement_strategy="STRICT_SPREAD" if flags.nodes > 1 else "PACK",
        ),
        run_config=train.RunConfig(
            name=flags.name,
            failure_config=train.FailureConfig(max_failures=flags.max_restarts),
            storage_path=os.path.abspath(flags.storage) if flags.storage else None,
        ),
    )  # fmt: skip
    trainer.fit()
    return ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
