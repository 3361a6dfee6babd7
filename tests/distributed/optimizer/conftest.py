"""Fixtures of these tests."""

from tests.unit.dist_checkpointing.conftest import ram_path

__all__ = ["ram_path"]
