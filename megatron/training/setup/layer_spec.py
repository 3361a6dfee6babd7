"""Which layers a model is made of: the built-in ones, or a spec of the user's."""

from __future__ import annotations

import inspect
from argparse import Namespace
from typing import Any

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.settings.flags import from_args
from megatron.core.transformer.spec_utils import import_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.config.model import ModelSettings


def layer_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> Any:
    """Return the spec of the layers of this chunk, from --spec and --transformer-impl.

    `--spec my_package.my_module my_spec` names a ModuleSpec, or a function that takes the
    TransformerConfig (or nothing), and vp_stage if it has such an argument, and returns one.
    """
    model = from_args(ModelSettings, vars(args))
    if not model.spec:
        uses_engine = model.transformer_impl == "transformer_engine"
        return get_gpt_decoder_block_spec(config, uses_engine, vp_stage=vp_stage)
    found = import_module(_module_and_name(model.spec))
    if found is None:
        raise ConfigError(
            f"--spec {' '.join(model.spec)} names nothing that can be imported.",
            rule="--spec is a module and the name of a spec or function in it",
            flags=["--spec"],
            fix="use --spec package.module name, with the package on PYTHONPATH",
        )
    if not callable(found):
        return found
    if "vp_stage" in inspect.signature(found).parameters:
        return found(config, vp_stage=vp_stage)
    try:
        return found(config)
    except TypeError:
        return found()


def _module_and_name(words: list[str]) -> tuple[str, str]:
    if len(words) == 1:
        module, _, name = words[0].rpartition(".")
        return module, name
    return words[0], words[1]
