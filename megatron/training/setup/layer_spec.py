"""Select the layer spec of a model: a built-in spec or the user's."""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.model_settings import ModelSettings
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig

LOCAL = ["local"]
"""Megatron's value of --spec for layers in plain torch, instead of a module and a name."""


def layer_spec(model: ModelSettings, config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Return the spec of the layers of this chunk, from --spec and --transformer-impl.

    `--spec my_package.my_module my_spec` names a ModuleSpec or a function that returns one. The
    function takes the TransformerConfig or nothing, and optionally vp_stage. `--spec local` means
    --transformer-impl local.

    Raises:
        ConfigError: the spec cannot be imported, or needs other arguments.
    """
    if not model.spec or model.spec == LOCAL:
        uses_engine = model.transformer_impl == "transformer_engine" and not model.spec
        return get_gpt_decoder_block_spec(config, uses_engine, vp_stage=vp_stage)
    found = imported_spec(model.spec)
    if not callable(found):
        return found
    signature = inspect.signature(found)
    takes_config = any(
        "config" in p.name or p.default is p.empty
        for p in signature.parameters.values()
        if p.name != "vp_stage" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    words = [config] if takes_config else []
    options = {"vp_stage": vp_stage} if "vp_stage" in signature.parameters else {}
    try:
        signature.bind(*words, **options)
    except TypeError as error:
        raise ConfigError(
            f"--spec {' '.join(model.spec)} cannot be called with a config only: {error}.",
            rule="a function of --spec takes the TransformerConfig or nothing, optionally vp_stage",
            flags=["--spec"],
            fix="write a function of the config that calls it, and name your function",
        ) from error
    return found(*words, **options)


def imported_spec(words: list[str]) -> Any:
    """Return the object that --spec names.

    Raises:
        ConfigError: the words are not a module and a name, or the object cannot be imported.
    """
    path = ".".join(words)
    module, _, name = path.rpartition(".")
    if len(words) > 2 or not module or not name or module.startswith("."):
        raise ConfigError(
            f"--spec {' '.join(words)} is not a module and a name.",
            rule="--spec is a module and the name of a spec or function in it",
            flags=["--spec"],
            fix="use --spec package.module name, with the package on PYTHONPATH",
        )
    return import_module((module, name))
