"""SkyPilot: a task for a managed job, on whatever cloud or cluster has the accelerators.

Fields and variables as of SkyPilot 0.14 (`SKYPILOT_NODE_RANK`, `SKYPILOT_NODE_IPS`).
"""

from __future__ import annotations

from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.launcher.job import Job
from megatron.launcher.kubernetes import as_yaml
from megatron.launcher.plan import JobFile, LaunchPlan, node_script, variables


def plan(job: Job) -> LaunchPlan:
    """Return the task, and the command that starts it as a managed job."""
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "workdir": ".",
        "resources": _resources(job),
        "envs": variables(job),
    }
    if job.mounts:
        task["volumes"] = _volumes(job)
    address = '"$(head -n 1 <<<"$SKYPILOT_NODE_IPS")"'
    lines = node_script(
        job, str(job.nodes), '"$SKYPILOT_NODE_RANK"', address, str(job.master_port), exported=()
    )
    task["run"] = "\n".join(lines)
    path = f"{job.folder}/{job.name}-sky.yaml"
    notes = ["SkyPilot has no time limit: the one of the description is left out"]
    return LaunchPlan(
        (JobFile(path, as_yaml(task)),),
        (("sky", "jobs", "launch", "--yes", "--name", job.name, path),),
        tuple(notes if job.time_limit_s else ()),
    )


def _resources(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if job.sky.infra:
        found["infra"] = job.sky.infra
    if job.gpus_per_node:
        found["accelerators"] = f"{job.sky.accelerator}:{job.gpus_per_node}"
    if job.cpus_per_node:
        found["cpus"] = f"{job.cpus_per_node}+"
    if job.memory_per_node_gib:
        found["memory"] = f"{job.memory_per_node_gib}+"
    if job.image:
        found["image_id"] = f"docker:{job.image}"
    # A preempted job is recovered by SkyPilot itself; this is for runs that fail.
    found["job_recovery"] = {"max_restarts_on_errors": job.max_restarts}
    return found


def _volumes(job: Job) -> dict[str, str]:
    """Return the directory of each volume.

    Raises:
        ConfigError: the source of a mount is a path, which SkyPilot would copy to every node.
    """
    paths = [mount.source for mount in job.mounts if mount.is_path]
    if paths:
        raise ConfigError(
            f"the source of a mount is {paths[0]}, and the back end SkyPilot.",
            rule="SkyPilot would copy a path of this machine to every node",
            flags=["--mount"],
            fix="name a volume (`sky volumes ls`), for example --mount data:/data",
        )
    return {mount.target: mount.source for mount in job.mounts}
