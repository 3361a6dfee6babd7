"""The formats of checkpoints in addition to our own, one per file.

The record `FORMAT` of a file recognises, opens and, if supported, writes its format. This package
imports every file of the folder, so a new file needs no other change. `--load`, the functions of
`dist_checkpointing` and the tools read the records.
"""

from __future__ import annotations

import importlib
import pkgutil

from megatron.core.dist_checkpointing.interop.contents import CheckpointFormat

FORMATS: tuple[CheckpointFormat, ...] = tuple(
    importlib.import_module(f"{__name__}.{module.name}").FORMAT
    for module in pkgutil.iter_modules(__path__)
)
