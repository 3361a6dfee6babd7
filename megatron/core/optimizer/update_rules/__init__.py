"""The update rules, one per file.

A file holds the arithmetic of its rule, and its record as `RULE`. Every file of this folder is
imported here, so a new one is known without being named anywhere.
"""

from __future__ import annotations

import importlib
import pkgutil

from megatron.core.optimizer.update_rule import UpdateRule

_RULES: list[UpdateRule] = [
    importlib.import_module(f"{__name__}.{module.name}").RULE
    for module in pkgutil.iter_modules(__path__)
]

UPDATE_RULES = {rule.name: rule for rule in _RULES}
"""The rules by name: the values of `--optimizer`."""
