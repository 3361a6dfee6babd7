"""The formats of checkpoints besides our own, one per file.

A file says how its format is told from others, opened and, if it can be, written: its record is
`FORMAT`. Every file of this folder is imported here, so a new one is known without being named
anywhere. `--load`, the functions of `dist_checkpointing` and the tools read the records.
"""

from __future__ import annotations

import importlib
import pkgutil

from megatron.core.dist_checkpointing.interop.format import CheckpointFormat

FORMATS: tuple[CheckpointFormat, ...] = tuple(
    importlib.import_module(f"{__name__}.{module.name}").FORMAT
    for module in pkgutil.iter_modules(__path__)
)
