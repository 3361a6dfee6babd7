"""The compiled inner loops of the data path, where they were built; numpy does the same without.

`pip install` builds them where there is a C compiler; in a checkout `compile_helpers()` does.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import logging
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("_native.c")
_FLAGS = ("-O3", "-ffp-contract=off", "-fPIC", "-shared")
_NAME = "megatron.core.datasets._native"


def _found() -> Any:
    try:
        return importlib.import_module(_NAME)
    except ImportError:
        return None


compiled: Any = _found()
"""The module of `_native.c`, or None: callers then use numpy."""


def build(directory: Path) -> Path:
    """Compile into `directory`; return the library.

    Raises:
        OSError, subprocess.CalledProcessError: no compiler, or it failed.
    """
    target = directory / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    compiler = shlex.split(sysconfig.get_config_var("CC") or "cc")
    dynamic = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    include = f"-I{sysconfig.get_paths()['include']}"
    command = [*compiler, *_FLAGS, *dynamic, include, str(_SOURCE), "-o", str(partial)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(partial, target)  # many processes may build at once
    finally:
        partial.unlink(missing_ok=True)
    return target


def compile_helpers() -> None:
    """Build the compiled part beside its source, unless it is there; say so if that fails.

    Launch scripts written for Megatron-LM call this before training.
    """
    global compiled
    if compiled is not None:
        return
    try:
        build(_SOURCE.parent)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        logger.warning("the data path stays with numpy, its compiled part failed: %s", reason)
        return
    importlib.invalidate_caches()
    compiled = _found()
