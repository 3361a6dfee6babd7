"""Pretraining: settings, setup, loop, logs, checkpoints.

Names are imported at first use, so that reading a config does not import the model.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULE_OF = {
    "pretrain": "training",
    "get_args": "global_vars",
    "get_signal_handler": "global_vars",
    "get_tensorboard_writer": "global_vars",
    "get_timers": "global_vars",
    "get_tokenizer": "global_vars",
    "get_wandb_writer": "global_vars",
    "initialize_megatron": "initialize",
    "get_model": "setup.model",
    "setup_model_and_optimizer": "setup.third_party",
    "train_step": "setup.third_party",
    "get_train_valid_test_num_samples": "setup.third_party",
    "build_train_valid_test_data_iterators": "setup.third_party",
    "is_last_rank": "launch.printing",
    "print_rank_0": "launch.printing",
    "print_rank_last": "launch.printing",
    "load_checkpoint": "checkpointing",
    "save_checkpoint": "checkpointing",
    "RunConfig": "config",
}
"""Public name -> module of this package that defines it."""

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
