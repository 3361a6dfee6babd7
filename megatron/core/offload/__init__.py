"""State that does not live on the device: host memory and files, visited in one order."""

from megatron.core.offload.file_state_store import FileStateStore
from megatron.core.offload.host_memory import available_host_bytes, host_memory_problem
from megatron.core.offload.host_state_store import HostStateStore, StateStore

__all__ = [
    "FileStateStore",
    "HostStateStore",
    "StateStore",
    "available_host_bytes",
    "host_memory_problem",
]
