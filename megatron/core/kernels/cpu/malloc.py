"""Settings of the C library's allocator that return large blocks to the system."""

from __future__ import annotations

import ctypes
import functools
import os
import platform

from megatron.core.foundation.device import device_type

RETURNED_BLOCK_BYTES = 2 << 20
KEPT_HEAP_BYTES = 32 << 20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Names of settings in glibc's malloc.h."""


def return_freed_blocks() -> None:
    """Make the C library return blocks of 2 MiB and more to the system as they are freed.

    glibc does so at first, but raises the limit to the largest block freed so far, up to 32 MiB.
    Then layers, gradients and logits share one heap, where blocks of such different sizes leave
    holes: 70 MiB of the 960 MiB of a 34-million-parameter GPT in ZeRO-3.

    Applies to the whole process. No effect if parameters are on an accelerator, with other C
    libraries, or if the user has set MALLOC_MMAP_THRESHOLD_ in the environment.
    """
    library = _glibc()
    if "MALLOC_MMAP_THRESHOLD_" in os.environ or library is None:
        return
    mallopt = library.mallopt
    mallopt(_M_MMAP_THRESHOLD, RETURNED_BLOCK_BYTES)
    # Keep the top of the heap: returning and allocating it again costs page faults at every step.
    mallopt(_M_TRIM_THRESHOLD, KEPT_HEAP_BYTES)


def return_free_pages() -> None:
    """Make the C library return the free pages of its heap to the system now.

    Freed activations leave holes that the heap keeps. Call it just before a large allocation; it
    costs a millisecond and the page faults of the next pass. No effect with other C libraries than
    glibc.
    """
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@functools.cache
def _glibc() -> ctypes.CDLL | None:
    """Return glibc if this process computes on the CPU and allocates with glibc, else None."""
    on_cpu = device_type() == "cpu"
    return ctypes.CDLL(None) if on_cpu and "glibc" in platform.libc_ver()[0] else None
