"""The description of a job: what runs, on how many nodes, with what; the same for all back ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together, shown
from megatron.core.settings.command_line import value_in
from megatron.core.settings.flags import flag

_NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_DURATION = re.compile(r"(?:(\d+)-)?(\d{1,3}):([0-5]\d):([0-5]\d)")
_STARTERS = ("torchrun", "python", "python3", "bash", "sh", "srun", "mpirun")


def seconds(text: str) -> int:
    """Read `D-HH:MM:SS`, `HH:MM:SS` or a number of seconds.

    YAML itself reads an unquoted 24:00:00 as a number of seconds.
    """
    found = _DURATION.fullmatch(text)
    if found is None and not text.isdecimal():
        raise ValueError("is neither D-HH:MM:SS, HH:MM:SS, nor a number of seconds")
    if found is None:
        return int(text)
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


@dataclass(frozen=True)
class Mount:
    """A directory that is seen inside a container."""

    source: str
    """A path of the node, or the name of a Kubernetes PersistentVolumeClaim."""
    target: str
    is_read_only: bool = False

    @property
    def is_path(self) -> bool:
        """Whether the source is a path of the node."""
        return self.source.startswith("/")


@dataclass(frozen=True, kw_only=True)
class SlurmSettings:
    """SLURM."""

    partition: str = ""
    """Partition, as of sbatch."""
    account: str = ""
    """Account, as of sbatch."""
    slurm_option: tuple[str, ...] = flag((), is_repeated=True)
    """A further option of sbatch, for example --slurm-option=--qos=high."""
    num_jobs: int = 1
    """Jobs in a row, as an array of which one runs at a time; each continues from the checkpoint
    of the one before, and the first that reaches the end cancels the rest."""
    variant: tuple[str, ...] = flag((), is_repeated=True)
    """Words added to the command of one job of an array, for example --variant='--lr 1e-4'; each
    gives a job, and {variant} in the command is its number from 0."""
    max_requeues: int = 100
    """How often a job that saved at its time limit, or was preempted, is queued again."""


@dataclass(frozen=True, kw_only=True)
class KubernetesSettings:
    """Kubernetes."""

    namespace: str = "default"
    """Namespace of the job."""
    runtime: str = "torch-distributed"
    """ClusterTrainingRuntime of a TrainJob."""
    queue: str = ""
    """LocalQueue of Kueue."""
    node_selector: tuple[str, ...] = flag((), is_repeated=True)
    """LABEL=VALUE of the nodes to use."""
    rdma_resource: str = ""
    """RESOURCE=COUNT of the RDMA devices of a node, as its device plugin names them, for example
    rdma/hca_shared_devices_a=8. The container may then lock memory."""
    host_network: bool = False
    """Use the node's own network."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """Nodes by name: ssh, MPI."""

    hostfile: str = ""
    """Lines `host slots=8`."""
    min_nodes: int = 0
    """Nodes with which the run continues (ssh) when no others are left; --nodes by default. The
    layout must fit: data parallelism shrinks, and the global batch stays."""
    same_failures: int = 3
    """End after so many failures in a row of the same class, rank and place."""
    ssh_option: tuple[str, ...] = flag((), is_repeated=True)
    """A further option of ssh or mpirun, for example --ssh-option=-p2222."""


@dataclass(frozen=True, kw_only=True)
class SkyPilotSettings:
    """SkyPilot."""

    accelerator: str = "H100"
    """GPU to ask for, as SkyPilot calls it."""
    infra: str = ""
    """Cloud, region or Kubernetes context, for example gcp/us-central1; the cheapest by default."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job."""

    name: str = "lattice"
    """Name of the job, its files and its log: small letters, digits and `-`."""
    nodes: int = 1
    """Nodes that train."""
    spare_nodes: int = 0
    """Nodes that are allocated beyond those (SLURM), and take the place of one that fails its
    health check."""
    gpus_per_node: int = 8
    """GPUs of a node; 0 trains on CPUs."""
    processes_per_node: int = 0
    """Ranks of a node; 0 means one for each GPU."""
    cpus_per_node: int = 0
    """CPU cores asked for on each node; 0 leaves it to the cluster."""
    memory_per_node_gib: int = flag(0, "--memory-per-node-gib")
    """Host memory asked for on each node, in GiB; 0 leaves it to the cluster."""
    time_limit_s: int = flag(
        0, "--time-limit", name="time_limit", parse=seconds, type_text="HH:MM:SS"
    )
    """Time limit of the job: D-HH:MM:SS, HH:MM:SS or seconds; none by default."""
    save_before_end_s: int = 300
    """Seconds before the time limit at which the run is told to save and leave, and which it has
    for this at a preemption."""
    max_restarts: int = 3
    """How often a run that fails is started again, with the newest checkpoint."""
    backoff_s: int = 10
    """Seconds before the first restart; each further one waits twice as long, at most 600 s."""
    image: str = ""
    """Container image, pinned by a tag or digest; without one the nodes' own software is used."""
    mount: tuple[str, ...] = flag((), is_repeated=True)
    """SOURCE:TARGET or SOURCE:TARGET:ro, a directory for the container. SOURCE is a path of the
    nodes, or on Kubernetes the name of a PersistentVolumeClaim."""
    env: tuple[str, ...] = flag((), is_repeated=True)
    """NAME=VALUE, a variable of the environment of all ranks."""
    setup: tuple[str, ...] = flag((), is_repeated=True)
    """A line of shell that each node runs before the training, for example to activate an
    environment."""
    shared_memory_gib: int = flag(32, "--shared-memory-gib")
    """Size of /dev/shm in containers, in GiB: ranks of a node and loader workers share memory."""
    master_port: int = 29500
    """Port at which ranks meet. Under SLURM it follows from the job's number instead."""
    directory: str = ""
    """Where files of the job and logs are written; runs/NAME by default. All nodes see it."""
    check: bool = False
    """Check the nodes before the training: GPUs, an all-reduce over all of them, clocks, disk,
    versions of libraries."""
    slurm: SlurmSettings = field(default_factory=SlurmSettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)
    hosts: HostSettings = field(default_factory=HostSettings)
    sky: SkyPilotSettings = field(default_factory=SkyPilotSettings)
    command: tuple[str, ...] = flag((), nargs="+", is_hidden=True)
    """What torchrun starts: a script, or `-m` and a module, and its flags."""

    @property
    def ranks_per_node(self) -> int:
        """Processes of a node."""
        return self.processes_per_node or self.gpus_per_node

    @property
    def folder(self) -> str:
        """Where files of the job are."""
        return self.directory or f"runs/{self.name}"

    @property
    def environment(self) -> dict[str, str]:
        """Variables of all ranks."""
        return pairs(self.env)

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """Directories for the container."""
        return tuple(_mount(text) for text in self.mount)

    def value_of(self, option: str) -> str:
        """Return the value of a flag of the training command; "" if it is not there."""
        return value_in(self.command, option)

    def check_settings(self) -> None:
        """Raise everything that is wrong with the description, in one message.

        Raises:
            ConfigError: a setting cannot be used.
        """
        raise_together(list(self._problems()), summary="this job")

    def _problems(self) -> Iterator[MegatronError]:
        yield from self._wrong_numbers()
        yield from self._wrong_texts()
        yield from self._wrong_commands()

    def _wrong_numbers(self) -> Iterator[MegatronError]:
        for name, least in (
            ("nodes", 1), ("spare_nodes", 0), ("gpus_per_node", 0), ("processes_per_node", 0),
            ("cpus_per_node", 0), ("memory_per_node_gib", 0), ("save_before_end_s", 0),
            ("max_restarts", 0), ("backoff_s", 0), ("shared_memory_gib", 1), ("master_port", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if value < least:
                yield ConfigError(
                    f"{name}={value}.",
                    rule=f"it is at least {least}",
                    flags=["--" + name.replace("_", "-")],
                    fix=f"use {least} or more",
                )
        if self.ranks_per_node < 1:
            yield ConfigError(
                "gpus_per_node=0 without processes_per_node.",
                rule="on CPUs the number of ranks of a node must be said",
                flags=["--gpus-per-node", "--processes-per-node"],
                fix="add --processes-per-node 1",
            )
        if 0 < self.time_limit_s <= self.save_before_end_s:
            yield ConfigError(
                f"time_limit is {self.time_limit_s} s, save_before_end_s={self.save_before_end_s}.",
                rule="the run is told to save before the end of its time",
                flags=["--time-limit", "--save-before-end-s"],
                fix=f"use --save-before-end-s {self.time_limit_s // 10}",
            )
        if self.slurm.num_jobs > 1 and self.slurm.variant:
            yield ConfigError(
                f"num_jobs={self.slurm.num_jobs} beside {len(self.slurm.variant)} variants.",
                rule="an array is one run after the other, or different runs",
                flags=["--num-jobs", "--variant"],
                fix="drop --num-jobs: each variant is queued again until it has reached its end",
            )

    def _wrong_texts(self) -> Iterator[MegatronError]:
        if not _NAME.fullmatch(self.name):
            yield ConfigError(
                f"name={shown(self.name)}.",
                rule="a name has up to 40 small letters, digits and `-`, and starts with a letter",
                flags=["--name"],
                fix="use a name such as llama3-8b",
            )
        for option, texts in (
            ("--env", self.env),
            ("--node-selector", self.kubernetes.node_selector),
        ):
            for text in texts:
                name, equals, _ = text.partition("=")
                if not equals or (option == "--env" and not _VARIABLE.fullmatch(name)):
                    yield ConfigError(
                        f"{shown(text)} has no name.",
                        rule="it is NAME=VALUE",
                        flags=[option],
                        fix=f"write {option} NAME=VALUE",
                    )
        for text in self.mount:
            if not re.fullmatch(r"[^:\s]+:/[^:\s]*(:ro|:rw)?", text):
                yield ConfigError(
                    f"{shown(text)} is not a mount.",
                    rule="it is SOURCE:TARGET or SOURCE:TARGET:ro with an absolute TARGET",
                    flags=["--mount"],
                    fix="write for example --mount /scratch/data:/data:ro",
                )
        for option, text in (("--directory", self.directory), ("--image", self.image)):
            if re.search(r"\s", text):
                yield ConfigError(
                    f"{shown(text)} holds a space.",
                    rule="options of schedulers and registries have none",
                    flags=[option],
                    fix="use a name without spaces",
                )

    def _wrong_commands(self) -> Iterator[MegatronError]:
        if not self.command:
            yield ConfigError(
                "there is no training command.",
                rule="a job starts a script with torchrun",
                flags=["--"],
                fix="write `-- pretrain_gpt.py ...` at the end, or `command:` in the file",
            )
        elif self.command[0].rpartition("/")[2] in _STARTERS:
            yield ConfigError(
                f"the training command begins with {self.command[0]}.",
                rule="the launcher itself starts torchrun on each node",
                flags=["--"],
                fix="begin with the script, for example `-- pretrain_gpt.py ...`",
            )
        save = self.value_of("--save")
        if self.slurm.variant and save and "{variant}" not in save:
            yield ConfigError(
                f"all variants save to {save}.",
                rule="a save directory belongs to one run",
                flags=["--variant", "--save"],
                fix=f"use --save {save}-{{variant}}",
            )


def pairs(texts: tuple[str, ...]) -> dict[str, str]:
    """Return NAME=VALUE texts as a mapping."""
    return {name: value for name, _, value in (text.partition("=") for text in texts)}


def _mount(text: str) -> Mount:
    source, target, *mode = text.split(":")
    return Mount(source, target, mode == ["ro"])
