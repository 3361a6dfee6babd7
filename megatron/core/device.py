"""The one place that asks which kind of device this process computes on."""

from __future__ import annotations

import atexit
import ctypes
import functools
import mmap
import os
import platform
import time

import torch

HUGE_PAGE_BYTES = 2 << 20
RETURNED_BLOCK_BYTES = 2 << 20
KEPT_HEAP_BYTES = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of settings in glibc's malloc.h."""


_SETTLING_SECONDS = 0.05
"""Long enough for a thread that others keep from its core."""

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Blocks of 2 MiB and more (gradients, logits) come fresh from the system in every step; in a huge
# page one page fault serves where it took 512. Of the 60,000 faults in a step of stage 1 of the
# sharding ladder (100 ms of 900) three quarters are gone. torch asks for huge pages if it finds
# this in the environment when it first allocates.


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
    """Return the device that new parameters and activations of this rank live on."""
    if device_type() == "cpu":
        return torch.device("cpu")
    return torch.device(device_type(), torch.accelerator.current_device_index())


def set_local_device(local_rank: int) -> torch.device:
    """Bind this process to the accelerator `local_rank`; no effect on CPU."""
    if device_type() != "cpu":
        torch.accelerator.set_device_index(local_rank)
    return current_device()


def communication_backend() -> str:
    """Return the name of the torch.distributed backend for this device: "nccl" or "gloo"."""
    return {"cuda": "nccl"}.get(device_type(), "gloo")


@functools.cache
def settle_backends_at_exit() -> None:
    """Let a backend's threads come to rest before this process takes Python down.

    gloo wakes the thread that waits before it lets go of the tensors it worked on. If it is the
    last to hold one, it needs the interpreter for that; where that is gone, the process is aborted
    ("terminate called without an active exception") after all its work was done.
    """
    atexit.register(time.sleep, _SETTLING_SECONDS)


def synchronize() -> None:
    """Wait for all work queued on this rank's accelerator; no effect on CPU."""
    if device_type() != "cpu":
        torch.accelerator.synchronize()


def current_stream() -> torch.Stream | None:
    """Return this thread's queue of work on the accelerator; None on CPU."""
    return None if device_type() == "cpu" else torch.accelerator.current_stream()


def set_current_stream(stream: torch.Stream | None) -> None:
    """Let this thread queue its work on `stream`, and on the device of it; None on CPU."""
    if stream is not None:
        torch.accelerator.set_stream(stream)


def peak_memory_bytes() -> int:
    """Return the peak bytes allocated on the accelerator, or the peak RSS on CPU."""
    if device_type() != "cpu":
        return torch.get_device_module(device_type()).max_memory_allocated()
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """Ask for huge pages behind anonymous memory; without effect where the system has none."""
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError):  # another system, or a kernel without them
        return


def return_freed_host_blocks() -> None:
    """Let the C library give blocks of 2 MiB and more back to the system as they are freed.

    glibc does so at first, but raises the limit to the size of what it sees freed, up to 32 MiB:
    afterwards layers, gradients and logits come from one heap, where blocks of so different sizes
    leave holes. Of the 960 MiB of a 34-million-parameter GPT in ZeRO-3 70 were holes of this kind.

    For the whole process. Without effect on other C libraries, and where the user has chosen
    (MALLOC_MMAP_THRESHOLD_ in the environment).
    """
    library = _glibc()
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or library is None:
        return
    mallopt = library.mallopt
    mallopt(_M_MMAP_THRESHOLD, RETURNED_BLOCK_BYTES)
    # The top of the heap may stay: giving back and asking again costs page faults at every step.
    mallopt(_M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)


def return_free_host_pages() -> None:
    """Let the C library give the free pages of its heap back to the system now.

    Freed activations leave holes that the heap keeps. Worth its time (a millisecond, and the page
    faults of the next pass) just before something large is allocated. Without effect on other C
    libraries than glibc.
    """
    library = _glibc()
    if device_type() == "cpu" and library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if "glibc" in platform.libc_ver()[0] else None


def device_name() -> str:
    """Return what the accelerator calls itself, or "cpu"."""
    if device_type() == "cpu":
        return "cpu"
    return str(torch.get_device_module(device_type()).get_device_name())


def start_profiler_range() -> None:
    """Let a profiler around the process (nsys with cudaProfilerApi) record from here on."""
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
    """Write what `record_memory_history` kept, for https://pytorch.org/memory_viz."""
    if device_type() == "cuda":
        torch.cuda.memory._dump_snapshot(path)


def multiprocessor_count() -> int:
    """Return the number of multiprocessors of the accelerator, or of CPU cores."""
    if device_type() == "cpu":
        return os.cpu_count() or 1
    module = torch.get_device_module(device_type())
    return module.get_device_properties(current_device()).multi_processor_count
