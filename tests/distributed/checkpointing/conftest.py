"""Directories in memory, shared by all ranks of this machine."""

from tests.unit.dist_checkpointing.conftest import ram_path

__all__ = ["ram_path"]
