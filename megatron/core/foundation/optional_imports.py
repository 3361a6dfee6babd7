"""Optional libraries: only this module detects and imports them.

`require("tensorboard", purpose="--tensorboard-dir")` imports the library or raises an error that
names the extra to install. `has(...)` tests for the library without importing it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from megatron.core.foundation.errors import MissingExtraError

EXTRA_OF = {
    "tokenizers": "tokenizers",
    "sentencepiece": "tokenizers",
    "tiktoken": "tokenizers",
    "regex": "tokenizers",
    "transformers": "hf",
    "safetensors": "hf",
    "tensorboard": "logging",
    "matplotlib": "logging",
    "tqdm": "logging",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "opentelemetry": "otel",
    "yaml": "config",
    "nltk": "nltk",
    "zstandard": "data",
    "pyarrow": "data",
    "fsspec": "data",
    "gigatoken": "fast",
    "orjson": "fast",
    "jinja2": "data",
    "PIL": "images",
    "datatrove": "cluster",
    "ray": "ray",
    "psutil": "logging",
    "rich": "logging",
    "starlette": "server",
    "pydantic": "server",
    "uvicorn": "server",
    "h11": "server",
    "lm_eval": "eval",
}
"""Import name -> extra of the `megatron-lattice` distribution that installs it."""

BUILT_FROM_SOURCE = {
    "transformer_engine": "NVIDIA Transformer Engine (pip package transformer-engine[pytorch])",
    "apex": "NVIDIA apex, built from its repository (the PyPI name is an unrelated project)",
    "fused_layer_norm_cuda": "the compiled norms of NVIDIA apex",
    "flash_attn": "flash-attention (pip package flash-attn)",
    "deep_ep": "DeepEP (deep_ep, built from its repository)",
    "triton": "Triton (part of the CUDA builds of torch)",
}
"""GPU libraries that no extra installs: import name -> the package to install."""


@functools.cache
def has(name: str) -> bool:
    """Return whether the optional library `name` can be found; it is not imported."""
    return importlib.util.find_spec(name) is not None


@functools.cache
def why_missing(name: str) -> str | None:
    """Return why the library `name` (a dotted submodule is allowed) cannot be used; None if it can.

    The library is imported: without its compiled part it may raise any error.
    """
    top = name.partition(".")[0]
    shown = BUILT_FROM_SOURCE.get(top, top).partition(" (")[0]
    if not has(top):
        return f"needs {shown}, which is not installed"
    try:
        importlib.import_module(name)
    except (ImportError, RuntimeError, OSError) as error:
        return f"needs {shown}, which cannot be loaded: {error}"
    return None


def require(name: str, *, purpose: str) -> ModuleType:
    """Import and return the optional library `name` (a dotted submodule is allowed).

    Args:
        name: import name, for example "torch.utils.tensorboard" or "sentencepiece".
        purpose: the flag, tool or tokenizer type that needs the library, for the error.
    Raises:
        MissingExtraError: it is not installed, or not for this machine; the fix names the command.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        missing = (error.name or name).split(".")[0]
        top = name.split(".")[0]
        for candidate in (missing, top):
            if candidate in EXTRA_OF:
                fix = f"pip install 'megatron-lattice[{EXTRA_OF[candidate]}]'"
                break
            if candidate in BUILT_FROM_SOURCE:
                fix = f"install {BUILT_FROM_SOURCE[candidate]}"
                break
        else:
            fix = f"pip install {missing}"
        raise MissingExtraError(
            f"{purpose} needs the Python library '{missing}', which is not installed.", fix=fix
        ) from error
    except (RuntimeError, OSError) as error:
        top = name.split(".")[0]
        raise MissingExtraError(
            f"{purpose} needs the Python library '{top}', which is installed and cannot be loaded:"
            f" {error}",
            fix=f"install {BUILT_FROM_SOURCE.get(top, top)} for this machine",
        ) from error
