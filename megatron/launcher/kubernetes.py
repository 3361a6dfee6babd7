"""Kubernetes: a TrainJob of Kubeflow Trainer v2, a PyTorchJob, or a JobSet.

Fields as of kubeflow-trainer-api 2.3.0 (trainer.kubeflow.org/v1alpha1, jobset.x-k8s.io/v1alpha2)
and kubeflow-training 1.9.4 (kubeflow.org/v1). The controllers of the first two tell torchrun by
PET_* variables who is who; in a JobSet that is the index of the pod and the DNS name of the first.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.foundation import optional_imports
from megatron.core.foundation.errors import ConfigError
from megatron.launcher.job import Job, pairs
from megatron.launcher.plan import JobFile, LaunchPlan, check_words, node_script, variables

Fields = dict[str, Any]
"""A part of a manifest."""
_MANAGER = "megatron-lattice/launch"
_SHARED_MEMORY = "shared-memory"
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_NODE = "node"


def plan_train_job(job: Job) -> LaunchPlan:
    """Return a TrainJob, whose runtime starts one pod for each node."""
    if job.kubernetes.host_network:
        raise ConfigError(
            "host_network in a TrainJob.",
            rule="the network of its pods is that of the runtime",
            flags=["--host-network", "--runtime"],
            fix="name a runtime with hostNetwork by --runtime, or use --backend jobset",
        )
    command = _launched_by_controller(job)
    trainer = {
        "image": _image(job),
        "numNodes": job.nodes,
        "numProcPerNode": job.ranks_per_node,
        "command": command[:1],
        "args": command[1:],
        "env": _environment(job),
        "resourcesPerNode": _resources(job),
    }
    container = {"name": _NODE, "volumeMounts": _volume_mounts(job), **_security(job)}
    pod = {
        "containers": [container],
        "volumes": _volumes(job),
        "terminationGracePeriodSeconds": job.save_before_end_s,
        **_node_selector(job),
    }
    replicated = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    spec = {
        "runtimeRef": {"name": job.kubernetes.runtime},
        "trainer": trainer,
        "runtimePatches": [{"manager": _MANAGER, "trainingRuntimeSpec": runtime}],
        **_deadline(job),
    }
    return _plan(job, "trainer.kubeflow.org/v1alpha1", "TrainJob", spec)


def plan_pytorch_job(job: Job) -> LaunchPlan:
    """Return a PyTorchJob: a master, and workers for the other nodes."""
    pod = _pod(job, "pytorch", _launched_by_controller(job))
    replica = {"restartPolicy": "OnFailure", "template": {"spec": pod}}
    replicas = {"Master": {"replicas": 1, **replica}}
    if job.nodes > 1:
        replicas["Worker"] = {"replicas": job.nodes - 1, **replica}
    spec = {
        "nprocPerNode": str(job.ranks_per_node),
        "runPolicy": {"cleanPodPolicy": "None", "backoffLimit": job.max_restarts, **_deadline(job)},
        "pytorchReplicaSpecs": replicas,
    }
    return _plan(job, "kubeflow.org/v1", "PyTorchJob", spec)


def plan_job_set(job: Job) -> LaunchPlan:
    """Return a JobSet of one indexed job; the failure of a pod starts all of them again."""
    first = f"{job.name}-{_NODE}-0-0.{job.name}"
    lines = node_script(
        job, str(job.nodes), '"$JOB_COMPLETION_INDEX"', first, str(job.master_port), exported=()
    )
    pod = _pod(job, _NODE, ["bash", "-c", "\n".join(lines)]) | {"restartPolicy": "Never"}
    inner = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
        **_deadline(job),
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.max_restarts},
        "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": inner}}],
    }
    return _plan(job, "jobset.x-k8s.io/v1alpha2", "JobSet", spec)


def as_yaml(document: Mapping[str, Any]) -> str:
    """Return a mapping as YAML, in its order."""
    yaml = optional_imports.require("yaml", purpose="a file for the cluster")

    class Dumper(yaml.SafeDumper):  # type: ignore[misc, name-defined]
        """Writes texts of several lines as such."""

    def write_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write_text)
    text: str = yaml.dump(dict(document), Dumper=Dumper, sort_keys=False, width=1000)
    return "# Written by `lattice launch`: change the description, not this file.\n" + text


def _plan(job: Job, api_version: str, kind: str, spec: Mapping[str, Any]) -> LaunchPlan:
    metadata: Fields = {"name": job.name, "namespace": job.kubernetes.namespace}
    if job.kubernetes.queue:
        metadata["labels"] = {_QUEUE_LABEL: job.kubernetes.queue}
    # The aliases that YAML would make of repeated parts are no help to a reader.
    document = _copied(
        {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}
    )
    path = f"{job.folder}/{job.name}-{kind.lower()}.yaml"
    return LaunchPlan((JobFile(path, as_yaml(document)),), (("kubectl", "apply", "-f", path),))


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_copied(inner) for inner in value]
    return value


def _launched_by_controller(job: Job) -> list[str]:
    """Return the command of a pod whose controller sets the variables of torchrun."""
    if not job.setup and not job.check:
        return ["torchrun", *job.command]
    lines = ["set -e", *job.setup]
    if job.check:
        lines.append(shlex.join(["torchrun", *check_words(job)]))
    lines.append("exec " + shlex.join(["torchrun", *job.command]))
    return ["bash", "-c", "\n".join(lines)]


def _image(job: Job) -> str:
    """Return the image.

    Raises:
        ConfigError: there is none.
    """
    if not job.image:
        raise ConfigError(
            "there is no image.",
            rule="on Kubernetes a node runs a container",
            flags=["--image"],
            fix="build one with the Dockerfile, and give --image REGISTRY/NAME@sha256:...",
        )
    return job.image


def _pod(job: Job, name: str, command: Sequence[str]) -> Fields:
    container = {
        "name": name,
        "image": _image(job),
        "command": list(command),
        "env": _environment(job),
        "resources": _resources(job),
        "volumeMounts": _volume_mounts(job),
        **_security(job),
    }
    pod: Fields = {
        "containers": [container],
        "volumes": _volumes(job),
        "terminationGracePeriodSeconds": job.save_before_end_s,
        **_node_selector(job),
    }
    if job.kubernetes.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return pod


def _environment(job: Job) -> list[Fields]:
    return [{"name": name, "value": value} for name, value in variables(job).items()]


def _resources(job: Job) -> Fields:
    """Return requests and limits; GPUs and RDMA devices cannot be shared, so both are equal."""
    devices = {"nvidia.com/gpu": str(job.gpus_per_node)} if job.gpus_per_node else {}
    devices |= pairs((job.kubernetes.rdma_resource,)) if job.kubernetes.rdma_resource else {}
    requests = dict(devices)
    if job.cpus_per_node:
        requests["cpu"] = str(job.cpus_per_node)
    if job.memory_per_node_gib:
        requests["memory"] = f"{job.memory_per_node_gib}Gi"
    found = {"requests": requests, "limits": devices}
    return {name: values for name, values in found.items() if values}


def _volumes(job: Job) -> list[Fields]:
    """Return the mounts and /dev/shm, of which a container has 64 MiB otherwise."""
    found: list[Fields] = []
    for number, mount in enumerate(job.mounts):
        source: Fields = {"persistentVolumeClaim": {"claimName": mount.source}}
        if mount.is_path:
            source = {"hostPath": {"path": mount.source, "type": "Directory"}}
        found.append({"name": f"mount-{number}", **source})
    shared = {"medium": "Memory", "sizeLimit": f"{job.shared_memory_gib}Gi"}
    return [*found, {"name": _SHARED_MEMORY, "emptyDir": shared}]


def _volume_mounts(job: Job) -> list[Fields]:
    found: list[Fields] = []
    for number, mount in enumerate(job.mounts):
        read_only = {"readOnly": True} if mount.is_read_only else {}
        found.append({"name": f"mount-{number}", "mountPath": mount.target, **read_only})
    return [*found, {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}]


def _security(job: Job) -> Fields:
    """Let the container lock the memory that RDMA registers; nothing more than it needs."""
    context: Fields = {"allowPrivilegeEscalation": False}
    if job.kubernetes.rdma_resource:
        context["capabilities"] = {"add": ["IPC_LOCK"]}
    return {"securityContext": context}


def _node_selector(job: Job) -> Fields:
    labels = pairs(job.kubernetes.node_selector)
    return {"nodeSelector": labels} if labels else {}


def _deadline(job: Job) -> Fields:
    return {"activeDeadlineSeconds": job.time_limit_s} if job.time_limit_s else {}
