"""Print installed libraries, the chosen backends with reasons, and test two ranks.

    python tools/doctor.py                 # all of it; under half a minute
    python tools/doctor.py --no-self-test
    python tools/doctor.py --imports       # also import every optional library
    python tools/doctor.py --json

The exit status is 1 if there is a problem; a missing optional library is no problem.
"""

from __future__ import annotations

import importlib
import ipaddress
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.foundation import device, optional_imports
from megatron.core.foundation.errors import MegatronError
from megatron.core.foundation.exit_status import ExitStatus, tool
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import flag
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import is_torch_min_version
from megatron.resilience.node_health import CheckResult, State, version_of
from megatron.training.launch.addresses import other_interfaces

OLDEST_TORCH = "2.7.0"
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "GLOO_SOCKET_IFNAME", "LATTICE_DEVICE", "MASTER_ADDR", "MASTER_PORT",
    "MKL_NUM_THREADS", "NCCL_DEBUG", "NCCL_IB_DISABLE", "NCCL_SOCKET_IFNAME", "OMP_NUM_THREADS",
    "RANK", "WORLD_SIZE",
)  # fmt: skip
"""Environment variables that affect the findings."""
TIMEOUT_S = 180
TOLERANCE = 1e-4
"""Relative tolerance: fp32 sums of a few hundred products in another order, through two layers."""
_VOCABULARY, _LENGTH = 64, 16


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    no_self_test: bool = False
    """Start no ranks."""
    imports: bool = False
    """Import every optional library."""
    json: bool = False
    """Write a JSON list of findings."""
    self_test_rank: bool = flag(False, is_hidden=True)


def parse_args(argv: Sequence[str] | None = None) -> Flags:
    """Parse the command line."""
    return read_command_line(Flags, argv, description=__doc__.split("\n")[0])


def base_findings() -> Iterator[CheckResult]:
    """Yield Python and torch."""
    yield CheckResult("base", "python", f"{platform.python_version()} on {platform.platform()}")
    is_new = is_torch_min_version(OLDEST_TORCH)
    built = torch.version.cuda or getattr(torch.version, "hip", None) or "no accelerator"
    text = f"{torch.__version__}, built for {built}"
    if not is_new:
        text += f"; {OLDEST_TORCH} or later is needed"
    yield CheckResult("base", "torch", text, State.FINE if is_new else State.PROBLEM)
    yield CheckResult("base", "numpy", version_of("numpy") or "missing")


def library_findings(*, imports: bool) -> Iterator[CheckResult]:
    """Yield the optional libraries.

    Args:
        imports: also import the installed libraries: it takes seconds, and finds broken ones.
    """
    for library, extra in sorted(optional_imports.EXTRA_OF.items()):
        yield _library(library, f"pip install 'megatron-lattice[{extra}]'", imports)
    for library, source in sorted(optional_imports.BUILT_FROM_SOURCE.items()):
        yield _library(library, source, imports)


def _library(library: str, source: str, imports: bool) -> CheckResult:
    version = version_of(library)
    if version is None:
        return CheckResult("libraries", library, f"not installed; {source}", State.ABSENT)
    if imports:
        try:
            importlib.import_module(library)
        except Exception as error:  # whatever a broken library raises
            text = f"{version}, does not import: {type(error).__name__}: {error}"
            return CheckResult("libraries", library, text, State.PROBLEM)
    return CheckResult("libraries", library, version)


def device_findings() -> Iterator[CheckResult]:
    """Yield the devices."""
    kind = device.device_type()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = torch.get_num_threads()
    yield CheckResult("devices", "cpu", f"{cores} cores, {threads} threads of torch a process")
    if kind == "cpu":
        why = "torch sees no accelerator"
        if os.environ.get("LATTICE_DEVICE") == "cpu" and torch.accelerator.is_available():
            why = "LATTICE_DEVICE=cpu hides it"
        elif not torch.version.cuda and not getattr(torch.version, "hip", None):
            why = "this build of torch is for the CPU"
        yield CheckResult("devices", "accelerator", f"none: {why}", State.ABSENT)
        return
    try:
        count = torch.accelerator.device_count()
        probe = torch.ones(8, device=device.current_device()).sum().item()
    except RuntimeError as error:
        yield CheckResult("devices", kind, f"does not compute: {error}", State.PROBLEM)
        return
    state = State.FINE if probe == 8.0 else State.PROBLEM
    yield CheckResult("devices", kind, f"{count} x {device.device_name()}", state)


def backend_findings() -> Iterator[CheckResult]:
    """Yield the chosen implementations, and why others were not chosen."""
    on_cpu = device.device_type() == "cpu"
    engine = optional_imports.has("transformer_engine")
    if engine and not on_cpu:
        yield CheckResult(
            "backends", "layers", "Transformer Engine; --transformer-impl local for ours"
        )
    else:
        why = "it is not installed" if not engine else "it needs a GPU"
        yield CheckResult("backends", "layers", f"local; no Transformer Engine: {why}")
    attention = "blocked kernels of our own" if on_cpu else "torch's scaled_dot_product_attention"
    yield CheckResult("backends", "attention", attention)
    for library, what in (("apex", "fused optimizers"), ("flash_attn", "flash-attention")):
        found = optional_imports.has(library)
        text = "installed, not used" if found else "not installed, not needed"
        state = State.FINE if found else State.ABSENT
        yield CheckResult("backends", f"{what} of {library}", text, state)
    fast = optional_imports.has("gigatoken")
    yield CheckResult(
        "backends",
        "tokenizing of corpora",
        "gigatoken where it gives the same tokens" if fast else "each tokenizer's own code",
    )


def network_findings() -> Iterator[CheckResult]:
    """Yield the network backends and interfaces of ranks."""
    for name, is_there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())):
        used = device.communication_backend() == name
        if is_there:
            yield CheckResult("network", name, "in use" if used else "available, not used here")
        else:
            state = State.PROBLEM if used else State.ABSENT
            yield CheckResult("network", name, "not in this build of torch", state)
    interfaces = [name for _, name in socket.if_nameindex()]
    yield CheckResult("network", "interfaces", ", ".join(interfaces))
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable)
        names = [one.lstrip("=^") for one in wanted.split(",")] if wanted else []
        missing = [n for n in names if not any(i.startswith(n) for i in interfaces)]
        if missing and not (wanted or "").startswith("^"):
            text = f"{wanted} names no interface of this machine"
            yield CheckResult("network", variable, text, State.PROBLEM)
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
        # If an interface is named, gloo does not resolve the host's name.
        is_named = "GLOO_SOCKET_IFNAME" in os.environ
        state = State.ABSENT if is_named else State.PROBLEM
        yield CheckResult("network", "this host", text, state)


def _this_host(host: str, address: str) -> CheckResult:
    """Check the address that gloo announces to ranks on other machines."""
    if "GLOO_SOCKET_IFNAME" in os.environ or not ipaddress.ip_address(address).is_loopback:
        return CheckResult("network", "this host", f"{host} is {address}, and reachable")
    named = ", ".join(other_interfaces()) or "none here has an address of its own"
    text = (
        f"{host} is {address}: enough for ranks of one machine; ranks on several machines would"
        f" announce an address that other machines cannot reach: set GLOO_SOCKET_IFNAME ({named})"
    )
    return CheckResult("network", "this host", text, State.ABSENT)


def environment_findings() -> Iterator[CheckResult]:
    """Yield the environment variables that are set."""
    for name in VARIABLES:
        if name in os.environ:
            yield CheckResult("environment", name, os.environ[name])


def problem_of(section: str, name: str, error: Exception) -> CheckResult:
    """Return a finding with the text of an error."""
    text = error.found if isinstance(error, MegatronError) else f"{type(error).__name__}: {error}"
    return CheckResult(section, name, text, State.PROBLEM)


def self_test(command: Sequence[str]) -> CheckResult:
    """Run two ranks as separate processes and report the result.

    Args:
        command: command line that calls `run_rank`, run in the launcher's environment.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [_start(command, rank, port) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        text = f"two ranks did not finish in {TIMEOUT_S} s: they cannot reach each other"
        return CheckResult("self-test", "two ranks", text, State.PROBLEM)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    lines = outputs[failed[0] if failed else 0].strip().splitlines() or ["no output"]
    if failed:
        text = f"rank {failed[0]} failed: {lines[-1]}"
        return CheckResult("self-test", "two ranks", text, State.PROBLEM)
    return CheckResult("self-test", "two ranks", lines[-1])


def _start(command: Sequence[str], rank: int, port: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if device.device_type() != "cpu" and torch.accelerator.device_count() < 2:
        environment["LATTICE_DEVICE"] = "cpu"  # two ranks cannot share a device under NCCL
    return subprocess.Popen(
        list(command),
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_rank() -> int:
    """Compute a loss and its gradients alone and with the other rank; return the exit status."""
    rank = int(os.environ["RANK"])
    where = device.set_local_device(rank)
    backend = device.communication_backend()
    dist.init_process_group(backend, rank=rank, world_size=2)
    ones = torch.ones(4, device=where)
    dist.all_reduce(ones)
    if ones.tolist() != [2.0] * 4:
        print(f"{backend} summed two ones to {ones.tolist()}")
        return 1
    alone = _loss_and_gradient(ProcessGroupCollection.single())
    pair = ProcessGroupCollection.single().with_groups(tp=dist.group.WORLD)
    together = _loss_and_gradient(pair)
    errors = [
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(together, alone, strict=True)
    ]
    dist.destroy_process_group()
    text = (
        f"tensor parallel 2 over {backend} on {where.type}: loss {float(alone[0]):.6f}, "
        f"largest relative difference from one rank {max(errors):.1e}"
    )
    print(text, flush=True)
    return int(not max(errors) < TOLERANCE)


def _loss_and_gradient(groups: ProcessGroupCollection) -> list[torch.Tensor]:
    """Return the loss, and the gathered gradients of one split and one replicated weight."""
    rng_state().set_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=groups.tp.size(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=_VOCABULARY,
        max_sequence_length=_LENGTH,
        pg_collection=groups,
    )
    model.to(device.current_device())
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(_VOCABULARY, (2, _LENGTH + 1), generator=generator)
    text = text.to(device.current_device())
    loss = model(text[:, :-1], None, None, labels=text[:, 1:].contiguous()).mean()
    loss.backward()
    layer = model.decoder.layers[0]
    split = layer.self_attention.linear_proj.weight.grad  # [h, h/tp]
    full = gather_from_tensor_model_parallel_region(split, groups.tp)
    return [loss.detach(), full, model.decoder.final_layernorm.weight.grad]


def python_of(script: str, *arguments: str) -> list[str]:
    """Return the command line that runs a script with this interpreter."""
    return [sys.executable, script, *arguments]


def examine(options: Flags) -> list[CheckResult]:
    """Return all findings."""
    parts = (
        base_findings,
        device_findings,
        backend_findings,
        lambda: library_findings(imports=options.imports),
        network_findings,
        environment_findings,
    )
    found: list[CheckResult] = []
    for part in parts:
        try:
            found += part()
        except Exception as error:  # one broken part must not hide the others
            found.append(problem_of("doctor", "an examination", error))
    if not options.no_self_test:
        found.append(self_test(python_of(os.path.abspath(__file__), "--self-test-rank")))
    return found


def report(found: Sequence[CheckResult]) -> str:
    """Return the findings as text, section by section."""
    lines: list[str] = []
    width = max(len(one.name) for one in found)
    section = ""
    for one in found:
        if one.section != section:
            section = one.section
            lines.append(section)
        lines.append(f"  {one.state.value} {one.name:{width}}  {one.text}")
    problems = sum(one.state is State.PROBLEM for one in found)
    lines.append("no problems" if not problems else f"{problems} problem(s), marked !!")
    return "\n".join(lines)


@tool
def main(argv: Sequence[str] | None = None) -> int:
    """Examine and print; return the exit status."""
    options = parse_args(argv)
    if options.self_test_rank:
        return run_rank()
    found = examine(options)
    if options.json:
        shown = [{**vars(one), "state": one.state.name.lower()} for one in found]
        print(json.dumps(shown, indent=2))
    else:
        print(report(found))
    is_wrong = any(one.state is State.PROBLEM for one in found)
    return ExitStatus.FAILED if is_wrong else ExitStatus.DONE


if __name__ == "__main__":
    sys.exit(main())
