"""What functions of Megatron remember between calls, and nothing here asks for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RememberedState:
    """The state of this process that only code written against Megatron uses."""

    is_experimental: bool = False
    annotates_ranges: bool = False
    open_ranges: list[tuple[str, Any]] = field(default_factory=list)
    memory_buffer: Any = None
    rerun_machine: Any = None


STATE = RememberedState()
