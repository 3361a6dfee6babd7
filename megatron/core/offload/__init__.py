"""State outside of the device: host memory and files."""

from megatron.core.offload.host_memory import available_host_bytes, host_memory_problem
from megatron.core.offload.state_stores import FileStateStore, HostStateStore, StateStore

__all__ = [
    "FileStateStore",
    "HostStateStore",
    "StateStore",
    "available_host_bytes",
    "host_memory_problem",
]
