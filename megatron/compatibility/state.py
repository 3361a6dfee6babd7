"""State that Megatron's functions keep between calls and the framework itself does not use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RememberedState:
    """The state of this process."""

    is_experimental: bool = False
    annotates_ranges: bool = False
    open_ranges: list[tuple[str, Any]] = field(default_factory=list)
    memory_buffer: Any = None
    rerun_machine: Any = None


STATE = RememberedState()
