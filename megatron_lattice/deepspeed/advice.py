"""Translate errors of lower layers: name an engine's arguments and configuration keys."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any, TypeVar

from megatron.core.foundation.errors import MegatronError

Function = TypeVar("Function", bound=Callable[..., Any])

_WORDS = {
    "--dist-ckpt-strictness raise_unexpected": "load_module_strict=False",
    "--dist-ckpt-strictness": "load_module_strict",
    "--no-load-optim": "load_optimizer_states=False",
    "--finetune": "load_module_only=True",
    "--load": "load_dir",
    "--save": "save_dir",
    "--lr": "optimizer.params.lr",
    "--clip-grad": "gradient_clipping",
    "--bf16": "bf16.enabled",
    "--fp16": "fp16.enabled",
    "--loss-scale": "fp16.loss_scale",
    "--initial-loss-scale": "fp16.initial_scale_power",
    "--min-loss-scale": "fp16.min_loss_scale",
    "--on-loss-scale-floor": "fp16.loss_scale_raise_error_at_min",
    "--on-nonfinite-grad": "bf16.check_grad_overflow",
    "--param-offload-path": "zero_optimization.offload_param.nvme_path",
    "--optimizer-offload-path": "zero_optimization.offload_optimizer.nvme_path",
    "--ddp-bucket-size": "zero_optimization.reduce_bucket_size",
}
"""Flag of pretrain_gpt.py -> the corresponding argument or key of an engine."""
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_KNOWN = re.compile("|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True))) + r"(?![\w-])")


def in_words_of_the_engine(error: MegatronError) -> MegatronError:
    """Return the error without flags of the command line that an engine does not read.

    A fix that contains such a flag is left out.
    """
    if error.problems:  # of a configuration, by its keys
        return error
    found = copy.copy(error)
    flags = (_WORDS.get(flag, "" if flag.startswith("--") else flag) for flag in error.flags)
    found.flags = tuple(dict.fromkeys(filter(None, flags)))
    found.rule, found.fix = (_KNOWN.sub(lambda m: _WORDS[m[0]], t) for t in (error.rule, error.fix))
    if "pretrain_" not in found.fix and _FLAG.search(found.fix):
        found.fix = ""
    found.args = (found.describe(),)
    return found


def advises_callers_of_an_engine(function: Function) -> Function:
    """Decorate a function so that its errors name the engine's arguments and keys."""

    @functools.wraps(function)
    def translated(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except MegatronError as error:
            raise in_words_of_the_engine(error) from error

    return translated  # type: ignore[return-value]
