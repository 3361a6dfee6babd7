"""The device that this process computes on: the only module that uses `torch.cuda`."""

from __future__ import annotations

import atexit
import functools
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron.core.foundation.errors import TopologyError

_BACKEND_EXIT_SECONDS = 0.05
"""Long enough for a thread that waits for a busy core."""


@functools.cache
def device_type() -> str:
    """Return "cuda" (or another torch accelerator) when one is present, else "cpu".

    `LATTICE_DEVICE=cpu` forces the CPU, for debugging a layout on a machine that has GPUs.
    """
    forced = os.environ.get("LATTICE_DEVICE")
    if forced:
        return forced
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is not None:
            return accelerator.type
    return "cpu"


def current_device() -> torch.device:
    """Return the device of new parameters and activations of this rank."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device(device_type(), torch.accelerator.current_device_index())


def set_local_device(local_rank: int, *, backend: str = "nccl") -> torch.device:
    """Bind this process to the accelerator `local_rank`; no effect on CPU.

    If ranks may share accelerators, rank r uses number r modulo their count. They may with a
    backend other than NCCL, and with NCCL_MULTI_RANK_GPU_ENABLE=1 (NCCL 2.30 and later).

    Raises:
        TopologyError: there are fewer accelerators than ranks, and ranks may not share one.
    """
    if device_type() != "cpu":
        count = max(torch.accelerator.device_count(), 1)
        may_share = backend != "nccl" or os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
        if local_rank >= count and not may_share:
            raise TopologyError(
                f"LOCAL_RANK is {local_rank} on a node with {count} GPUs",
                rule="each rank has a GPU of its own under NCCL before 2.30",
                flags=["--distributed-backend"],
                fix=f"start at most {count} ranks on this node (torchrun --nproc-per-node), or "
                "share GPUs with NCCL_MULTI_RANK_GPU_ENABLE=1 or --distributed-backend gloo",
            )
        torch.accelerator.set_device_index(local_rank % count)
    return current_device()


def communication_backend() -> str:
    """Return the name of the torch.distributed backend for this device: "nccl" or "gloo"."""
    return {"cuda": "nccl"}.get(device_type(), "gloo")


@functools.cache
def wait_for_backends_at_exit() -> None:
    """Wait for a backend's threads before the interpreter of this process ends.

    gloo wakes the waiting thread before it releases its tensors. If it holds the last reference to
    a tensor, it needs the interpreter to release it. Without an interpreter the process is aborted
    ("terminate called without an active exception") after all its work was done.
    """
    atexit.register(time.sleep, _BACKEND_EXIT_SECONDS)


def settle_backends() -> None:
    """Wait for a backend's threads before groups are destroyed while the process continues.

    torch 2.7 holds the interpreter while the destructor of a group joins the thread that waits
    for the interpreter to drop its last tensor: a deadlock.
    """
    time.sleep(_BACKEND_EXIT_SECONDS / 10)


def synchronize() -> None:
    """Wait for all work queued on this rank's accelerator; no effect on CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def wait_on_host(event: torch.Event) -> None:
    """Block the host until the accelerator has reached an event."""
    event.synchronize()


def current_stream() -> torch.Stream | None:
    """Return this thread's queue of work on the accelerator; None on CPU."""
    return None if device_type() == "cpu" else torch.accelerator.current_stream()


def set_current_stream(stream: torch.Stream | None) -> None:
    """Make `stream` and its device current in this thread; no effect for None (CPU)."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def records_graphs() -> bool:
    """Return whether torch can record this device's operations as a graph, to replay them."""
    return device_type() == "cuda" or (
        device_type() != "cpu" and hasattr(torch.accelerator, "Graph")
    )


def new_graph(pool: Any) -> tuple[Any, AbstractContextManager[object]]:
    """Return an empty graph, and a context that records into it on the current stream.

    Other threads (watchdogs of NCCL, loaders of data) may continue during the recording.

    Args:
        pool: `graph.pool()` of a graph that shares its memory, or None.
    """
    if hasattr(torch.accelerator, "Graph"):
        graph = torch.accelerator.Graph(pool=pool, capture_error_mode="thread_local")
        return graph, graph
    older = torch.cuda.CUDAGraph()  # torch 2.11 and before record only on CUDA
    stream = torch.cuda.current_stream()
    return older, torch.cuda.graph(
        older, pool=pool, stream=stream, capture_error_mode="thread_local"
    )


def is_fake() -> bool:
    """Return whether tensors have shapes but no values (torch's FakeTensorMode)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def value_on_host(claim: Tensor) -> bool | None:
    """Return the value of a tensor of one element if that costs no wait for the device, else None.

    Args:
        claim: bool, [].
    """
    return bool(claim) if claim.device.type == "cpu" and not is_fake() else None


def check(claim: Tensor, message: str) -> bool:
    """Return whether a claim holds, if the host can read it without waiting.

    On an accelerator the function returns True at once. If the claim does not hold, the device
    fails at its next synchronisation, with the message in its text.

    Args:
        claim: bool, [].
    """
    value = value_on_host(claim)
    if value is None:
        torch._assert_async(claim, message)
    return value is not False


def is_host_memory(device: torch.device) -> bool:
    """Return whether tensors there are in the process's own pages.

    Such memory is read without a copy, needs no pinning, and can be shared with other processes.
    """
    return device.type == "cpu"


def why_no_fp8_products() -> str | None:
    """Return why this device cannot run `torch._scaled_mm` with one scale per tensor, or None."""
    if device_type() == "cpu" or is_fake():
        return None
    if device_type() == "cuda" and torch.version.hip is None:
        capability = torch.cuda.get_device_capability()
        if capability >= (8, 9):
            return None
        return f"needs compute capability 8.9, and this GPU has {'.'.join(map(str, capability))}"
    return "runs on CPUs and on NVIDIA GPUs"


def fp8_product_multiple(device: torch.device) -> int:
    """Return m: `torch._scaled_mm` requires k and the columns to be multiples of m."""
    return 1 if device.type == "cpu" else 16


def computes_in_kernels(device: torch.device) -> bool:
    """Return whether this project's kernels compute there, which cannot call torch's generators."""
    return device.type != "cpu"


def computes_fast_in_bf16(device: torch.device) -> bool:
    """Return whether products in bf16 are worth a conversion."""
    return device.type != "cpu"


def prefers_cache_blocks(device: torch.device) -> bool:
    """Return whether passes over memory are fastest a block at a time that stays in a cache."""
    return device.type == "cpu"


def default_generator_state() -> Tensor:
    """Return the state of the default generator of the current device, uint8 [its bytes]."""
    device = current_device()
    if device.type == "cpu":
        return torch.get_rng_state()
    return torch.get_device_module(device.type).get_rng_state(device)


def set_default_generator_state(state: Tensor) -> None:
    """Set the state of the default generator of the current device, uint8 [its bytes]."""
    device = current_device()
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device.type).set_rng_state(state, device)


def seed_default_generator(seed: int) -> None:
    """Seed only the default generator of the current device."""
    device = current_device()
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)
    else:
        torch.get_device_module(device.type).manual_seed(seed)


@contextmanager
def seeded_generators(device: torch.device, seed: int) -> Iterator[None]:
    """Seed torch's default generators for the block and restore their states afterwards.

    The seed determines the numbers of a kernel without a generator argument, but their positions
    depend on this rank's tensors.
    """
    devices = [device] if device.type != "cpu" else []
    # `torch.manual_seed` records a stack for each kind of device that is absent.
    set_seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        set_seed(seed)
        yield


def peak_memory_bytes() -> int:
    """Return the peak bytes allocated on the accelerator, or the peak RSS on CPU."""
    if device_type() != "cpu":
        return torch.get_device_module(device_type()).max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def device_name() -> str:
    """Return the product name of the accelerator, or "cpu"."""
    if device_type() == "cpu":
        return "cpu"
    return str(torch.get_device_module(device_type()).get_device_name())


def nccl_version() -> str:
    """Return the version of NCCL that torch was built with, or "none"."""
    if not torch.distributed.is_nccl_available() or not torch.cuda.is_available():
        return "none"
    return ".".join(map(str, torch.cuda.nccl.version()))


def start_profiler_range() -> None:
    """Make a profiler around the process (nsys with cudaProfilerApi) record from here on."""
    if device_type() == "cuda":
        torch.cuda.profiler.start()


def stop_profiler_range() -> None:
    """End the range that `start_profiler_range` began."""
    if device_type() == "cuda":
        torch.cuda.profiler.stop()


def record_memory_history(max_entries: int) -> None:
    """Keep the last allocations on the accelerator with their stacks; no effect on CPU."""
    if device_type() == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=max_entries)


def dump_memory_history(path: str) -> None:
    """Write the history of `record_memory_history`, for https://pytorch.org/memory_viz."""
    if device_type() == "cuda":
        torch.cuda.memory._dump_snapshot(path)
