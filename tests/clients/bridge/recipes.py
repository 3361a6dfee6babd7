"""Recipes of megatron-bridge, cut down to what a CPU trains in seconds.

What is changed in them is said here, and nothing else: sizes, the number of steps, fp32 (so that
losses of several layouts can be compared), gloo, no CUDA graphs, and no files.
"""

import contextlib
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.clients.hugging_face_models import S, V, save_model

NUM_STEPS = 5


@dataclass(frozen=True)
class Recipe:
    """A recipe of the library."""

    module: str
    """Below `megatron.bridge.recipes`."""
    name: str
    model: str
    """Name on the hub that it asks for: a directory of this name is found before the hub is."""
    family: str
    """Which small model lies there."""


RECIPES = {
    "llama": Recipe("llama", "llama32_1b_pretrain_config", "meta-llama/Llama-3.2-1B", "llama"),
    "llama_8b": Recipe("llama", "llama3_8b_pretrain_config", "meta-llama/Meta-Llama-3-8B", "llama"),
    "qwen3": Recipe("qwen", "qwen3_600m_pretrain_config", "Qwen/Qwen3-0.6B", "qwen3"),
    "qwen3_moe": Recipe("qwen", "qwen3_30b_a3b_pretrain_config", "Qwen/Qwen3-30B-A3B", "qwen3_moe"),
}


def train(_groups: object, recipe: Recipe, directory: str, layout: dict[str, int]) -> list[float]:
    """Train in the layout that the ranks are arranged in.

    Returns:
        The loss of each step, on ranks of the last stage; nothing on the others.
    """
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    losses: list[float] = []
    callbacks = CallbackManager()
    callbacks.register(
        "on_train_step_end",
        lambda context: losses.extend(float(loss) for loss in context.loss_dict.values()),
    )
    with contextlib.chdir(directory):
        config = getattr(
            importlib.import_module(f"megatron.bridge.recipes.{recipe.module}"), recipe.name
        )()
        _cut_down(config, layout)
        pretrain(config, forward_step, callbacks)
    return losses


def _cut_down(config: Any, layout: dict[str, int]) -> None:
    model = config.model
    model.tensor_model_parallel_size = layout.get("tp", 1)
    model.pipeline_model_parallel_size = layout.get("pp", 1)
    model.expert_model_parallel_size = layout.get("ep", 1)
    model.expert_tensor_parallel_size = layout.get("expt_tp", 1)
    model.context_parallel_size = layout.get("cp", 1)
    model.sequence_parallel = model.sequence_parallel and layout.get("tp", 1) > 1
    model.seq_length = config.dataset.seq_length = S
    model.vocab_size = V
    model.use_cpu_initialization = True
    model.cuda_graph_impl = "none"
    config.tokenizer.tokenizer_type = "NullTokenizer"
    config.tokenizer.tokenizer_model = None
    config.tokenizer.vocab_size = V
    config.tokenizer.use_tokenizer_vocab_size = False  # its padding depends on the layout
    config.dataset.num_workers = 0
    config.train.train_iters = NUM_STEPS
    config.train.global_batch_size, config.train.micro_batch_size = 4, 1
    config.train.eval_iters = 0
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 1, 2 * NUM_STEPS
    config.checkpoint.save = config.checkpoint.load = None
    config.logger.tensorboard_dir, config.logger.log_interval = None, 1
    config.dist.distributed_backend = "gloo"
    config.mixed_precision = None
    for part in (model, config.optimizer):
        part.bf16, part.params_dtype = False, torch.float32
    model.pipeline_dtype = torch.float32


def save_models(directory: Path) -> None:
    """Put a small model where each recipe looks for one."""
    for recipe in RECIPES.values():
        save_model(recipe.family, directory / recipe.model)
