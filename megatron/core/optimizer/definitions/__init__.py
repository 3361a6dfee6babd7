"""The optimizers, one per file.

A file contains the arithmetic of its optimizer, and its record as `OPTIMIZER`. Every file here is
imported, so a new optimizer needs no entry elsewhere.
"""

from __future__ import annotations

import importlib
import pkgutil

from megatron.core.optimizer.definition import OptimizerDefinition

_DEFINITIONS: list[OptimizerDefinition] = [
    importlib.import_module(f"{__name__}.{module.name}").OPTIMIZER
    for module in pkgutil.iter_modules(__path__)
]

OPTIMIZERS = {each.name: each for each in _DEFINITIONS}
"""The optimizers by name: the values of `--optimizer`."""
