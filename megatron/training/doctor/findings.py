"""What an installation has, each with a judgement."""

from __future__ import annotations

import importlib
import ipaddress
import os
import platform
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

import torch
import torch.distributed as dist

from megatron.core.foundation import device, optional_imports
from megatron.core.foundation.errors import MegatronError
from megatron.core.utils import is_torch_min_version
from megatron.training.launch.addresses import other_interfaces

OLDEST_TORCH = "2.7.0"
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LATTICE_DEVICE", "MASTER_ADDR", "MASTER_PORT",
    "MKL_NUM_THREADS", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS",
    "RANK", "WORLD_SIZE",
)  # fmt: skip
"""Variables of the environment that change what is found here."""


class State(Enum):
    """A judgement."""

    FINE = "ok"
    ABSENT = "--"
    PROBLEM = "!!"


@dataclass(frozen=True)
class Finding:
    """One observation."""

    section: str
    name: str
    text: str
    state: State = State.FINE


def version_of(library: str) -> str | None:
    """Return the version of an installed library by its import name, or None."""
    if not optional_imports.has(library):
        return None
    for name in metadata.packages_distributions().get(library, [library]):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "of unknown version"


def base_findings() -> Iterator[Finding]:
    """Yield what everything is built on."""
    yield Finding("base", "python", f"{platform.python_version()} on {platform.platform()}")
    is_new = is_torch_min_version(OLDEST_TORCH)
    built = torch.version.cuda or getattr(torch.version, "hip", None) or "no accelerator"
    text = f"{torch.__version__}, built for {built}"
    if not is_new:
        text += f"; {OLDEST_TORCH} or later is needed"
    yield Finding("base", "torch", text, State.FINE if is_new else State.PROBLEM)
    yield Finding("base", "numpy", version_of("numpy") or "missing")


def library_findings(*, imports: bool) -> Iterator[Finding]:
    """Yield the optional libraries.

    Args:
        imports: also import those that are installed: it takes seconds, and finds broken ones.
    """
    for library, extra in sorted(optional_imports.EXTRA_OF.items()):
        yield _library(library, f"pip install 'megatron-lattice[{extra}]'", imports)
    for library, source in sorted(optional_imports.BUILT_FROM_SOURCE.items()):
        yield _library(library, source, imports)


def _library(library: str, source: str, imports: bool) -> Finding:
    version = version_of(library)
    if version is None:
        return Finding("libraries", library, f"not installed; {source}", State.ABSENT)
    if imports:
        try:
            importlib.import_module(library)
        except Exception as error:  # whatever a broken library raises
            text = f"{version}, does not import: {type(error).__name__}: {error}"
            return Finding("libraries", library, text, State.PROBLEM)
    return Finding("libraries", library, version)


def device_findings() -> Iterator[Finding]:
    """Yield what computes."""
    kind = device.device_type()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    yield Finding("devices", "cpu", f"{cores} cores, {threads} threads of torch a process")
    if kind == "cpu":
        why = "torch sees no accelerator"
        if os.environ.get("LATTICE_DEVICE") == "cpu" and torch.accelerator.is_available():
            why = "LATTICE_DEVICE=cpu hides it"
        elif not torch.version.cuda and not getattr(torch.version, "hip", None):
            why = "this build of torch is for the CPU"
        yield Finding("devices", "accelerator", f"none: {why}", State.ABSENT)
        return
    try:
        count = torch.accelerator.device_count()
        probe = torch.ones(8, device=device.current_device()).sum().item()
    except RuntimeError as error:
        yield Finding("devices", kind, f"does not compute: {error}", State.PROBLEM)
        return
    state = State.FINE if probe == 8.0 else State.PROBLEM
    yield Finding("devices", kind, f"{count} x {device.device_name()}", state)


def backend_findings() -> Iterator[Finding]:
    """Yield which implementation does what, and why no other."""
    on_cpu = device.device_type() == "cpu"
    engine = optional_imports.has("transformer_engine")
    if engine and not on_cpu:
        yield Finding("backends", "layers", "Transformer Engine; --transformer-impl local for ours")
    else:
        why = "it is not installed" if not engine else "it needs a GPU"
        yield Finding("backends", "layers", f"local; no Transformer Engine: {why}")
    attention = "blocked kernels of our own" if on_cpu else "torch's scaled_dot_product_attention"
    yield Finding("backends", "attention", attention)
    for library, what in (("apex", "fused optimizers"), ("flash_attn", "flash-attention")):
        found = optional_imports.has(library)
        text = "installed, not used" if found else "not installed, not needed"
        state = State.FINE if found else State.ABSENT
        yield Finding("backends", f"{what} of {library}", text, state)
    fast = optional_imports.has("gigatoken")
    yield Finding(
        "backends",
        "tokenizing of corpora",
        "gigatoken where it gives the same tokens" if fast else "each tokenizer's own code",
    )


def network_findings() -> Iterator[Finding]:
    """Yield how ranks can reach each other."""
    for name, is_there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        used = device.communication_backend() == name
        if is_there:
            yield Finding("network", name, "in use" if used else "there, for other devices")
        else:
            state = State.PROBLEM if used else State.ABSENT
            yield Finding("network", name, "not in this build of torch", state)
    interfaces = [name for _, name in socket.if_nameindex()]
    yield Finding("network", "interfaces", ", ".join(interfaces))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable)
        names = [one.lstrip("=^") for one in wanted.split(",")] if wanted else []
        missing = [n for n in names if not any(i.startswith(n) for i in interfaces)]
        if missing and not (wanted or "").startswith("^"):
            text = f"{wanted} names no interface of this machine"
            yield Finding("network", variable, text, State.PROBLEM)
    host = socket.gethostname()
    try:
        with socket.create_server(("", 0)) as server:
            address = socket.gethostbyname(host)
            with socket.create_connection((address, server.getsockname()[1]), timeout=5):
                yield _this_host(host, address)
    except OSError as error:
        text = (
            f"{host} cannot be reached by its name ({error}); ranks of one machine may need "
            "GLOO_SOCKET_IFNAME=lo"
        )
        # With an interface named, nobody asks for the host's name.
        is_named = "GLOO_SOCKET_IFNAME" in os.environ
        state = State.ABSENT if is_named else State.PROBLEM
        yield Finding("network", "this host", text, state)


def _this_host(host: str, address: str) -> Finding:
    """Judge the address that gloo announces to ranks on other machines."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not ipaddress.ip_address(address).is_loopback:
        return Finding("network", "this host", f"{host} is {address}, and reachable")
    named = ", ".join(other_interfaces()) or "none here has an address of its own"
    text = (
        f"{host} is {address}: enough for ranks of one machine; those of several would announce an "
        f"address that no other machine reaches, and need GLOO_SOCKET_IFNAME ({named})"
    )
    return Finding("network", "this host", text, State.ABSENT)


def environment_findings() -> Iterator[Finding]:
    """Yield the variables that were set."""
    for name in VARIABLES:
        if name in os.environ:
            yield Finding("environment", name, os.environ[name])


def problem_of(section: str, name: str, error: Exception) -> Finding:
    """Return the finding that says what failed."""
    text = error.found if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
    return Finding(section, name, text, State.PROBLEM)
