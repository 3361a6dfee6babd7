"""State that does not live on the device: host memory and files, visited in one order."""

from megatron.core.offload.file_columns import FileColumns
from megatron.core.offload.host_memory import available_host_bytes, host_memory_problem
from megatron.core.offload.memory_columns import ColumnStore, MemoryColumns

__all__ = [
    "ColumnStore",
    "FileColumns",
    "MemoryColumns",
    "available_host_bytes",
    "host_memory_problem",
]
