"""The compiled inner loops of the data path; without them numpy computes the same.

`pip install` builds them if there is a C compiler; in a checkout `compile_helpers()` builds them.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("_native.c")
_FLAGS = ("-O3", "-ffp-contract=off", "-fPIC", "-shared")
_NAME = "megatron.core.datasets._native"


def source_hash() -> str | None:
    """Return the hash of the C source in this folder; None if only its library is installed."""
    try:
        return hashlib.sha256(_SOURCE.read_bytes()).hexdigest()
    except OSError:
        return None


def is_current(library: Path) -> bool:
    """Return whether a library was compiled from the C source in this folder.

    The library is not loaded: a process cannot load another library of the same name later.
    """
    wanted = source_hash()
    return wanted is None or f"source-hash:{wanted}".encode() in library.read_bytes()


def _found() -> Any:
    try:
        spec = importlib.util.find_spec(_NAME)
        if spec is None or spec.origin is None:
            return None
        if not is_current(Path(spec.origin)):
            logger.warning(
                "%s was compiled from another version of its source and is not used; the data "
                "path stays with numpy, which is slower. `pip install -e .` compiles it again.",
                spec.origin,
            )
            return None
        return importlib.import_module(_NAME)
    except (ImportError, OSError):
        return None


compiled: Any = _found()
"""The module of `_native.c`, or None: callers then use numpy."""


def compiler() -> str:
    """Return the command of the C compiler that built Python."""
    return sysconfig.get_config_var("CC") or "cc"


def build(directory: Path, *, flags: Sequence[str] = ()) -> Path:
    """Compile into `directory`; return the library.

    Args:
        flags: for the compiler, after the usual ones.
    Raises:
        OSError, subprocess.CalledProcessError: no compiler, or it failed.
    """
    target = directory / f"_native{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    # Created here, under an unpredictable name, so that the compiler follows no link.
    descriptor, name = tempfile.mkstemp(dir=directory, prefix=f"{target.name}.partial-")
    os.fchmod(descriptor, 0o755)
    os.close(descriptor)
    partial = Path(name)
    dynamic = ("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()
    define = f'-DSOURCE_HASH="{source_hash()}"'
    inputs = [f"-I{sysconfig.get_paths()['include']}", str(_SOURCE)]
    command = [*shlex.split(compiler()), *_FLAGS, *flags, define, *dynamic, *inputs]
    command += ["-o", str(partial)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        os.replace(partial, target)  # many processes may build at once
    finally:
        partial.unlink(missing_ok=True)
    return target


def compile_helpers() -> None:
    """Build the compiled part next to its source, unless it exists; log a warning on failure.

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
