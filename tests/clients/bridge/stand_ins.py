"""Empty modules for the imports of megatron-bridge that it does not need on the CPU; CUDA's calls.

The modules belong to Transformer Engine, ModelOpt, NVIDIA's resiliency extension, megatron-energon
and diffusers. Code can import, derive from and build their classes, which do nothing. A call of
their functions is an error, except for `ANSWERS`. `install` changes torch: run it in a process of
its own.
"""

import functools
import importlib.machinery
import sys
import types
from typing import Any

import torch

from tests.gpu_without_gpu.cuda_calls import compute_cuda_calls_on_host

MODULES = [
    "diffusers.models.attention",
    "diffusers.models.embeddings",
    "diffusers.schedulers.scheduling_unipc_multistep",
    "megatron.energon.epathlib.epath",
    "megatron.energon.flavors.base_dataset",
    "megatron.energon.flavors.webdataset.base_webdataset",
    "megatron.energon.task_encoder.base",
    "megatron.energon.task_encoder.cooking",
    "modelopt.torch.distill.plugins.megatron",
    "modelopt.torch.opt.plugins",
    "nvidia_resiliency_ext.checkpointing",
    "nvidia_resiliency_ext.inprocess",
    "transformer_engine.pytorch.ops",
    "webdataset",
]


def _decorate_nothing(decorated: Any = None, **_: object) -> Any:
    return decorated or _decorate_nothing


ANSWERS = {
    # A model that is not distilled needs no other shapes between stages.
    "modelopt.torch.distill.plugins.megatron.get_tensor_shapes_adjust_fn_for_distillation": (
        lambda *_, **__: None
    ),
    "megatron.energon.task_encoder.base.stateless": _decorate_nothing,
}
"""Functions that are called in any case, and what they do instead."""


class _EmptyModule(types.ModuleType):
    """A module that has every class and function, and nothing in them."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _class_of(name) if name[0].isupper() else _function_of(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


def _class_of(name: str) -> type:
    members = {
        "__class_getitem__": classmethod(lambda cls, _: cls),
        "__init__": lambda self, *_, **__: torch.nn.Module.__init__(self),
    }
    return type(name, (torch.nn.Module,), members)


def _function_of(name: str) -> Any:
    def absent(*_: object, **__: object) -> None:
        raise NotImplementedError(f"{name} has no stand-in")

    return ANSWERS.get(name, absent)


def _of_dense_parts(scatter: Any) -> Any:
    """Return `scatter` for columns of a matrix: a copy to a GPU is dense, and gloo expects that."""

    @functools.wraps(scatter)
    def scatter_dense(tensor: Any, parts: Any = None, **options: Any) -> Any:
        dense = None if parts is None else [part.contiguous() for part in parts]
        return scatter(tensor, dense, **options)

    return scatter_dense


@functools.cache
def install() -> None:
    """Put the modules where imports look for them; call it before the library is imported."""
    from megatron.core.extensions import transformer_engine  # looks for the real library
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import backend
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # Specs of the library for single models name these classes; others take the local ones anyway.
    transformer_engine.TEColumnParallelLinear = ColumnParallelLinear
    transformer_engine.TERowParallelLinear = RowParallelLinear
    transformer_engine.TELayerNormColumnParallelLinear = backend.TELayerNormColumnParallelLinear
    transformer_engine.TEDotProductAttention = DotProductAttention
    transformer_engine.TENorm = WrappedTorchNorm

    compute_cuda_calls_on_host()
    torch.distributed.scatter = _of_dense_parts(torch.distributed.scatter)
    for path in MODULES:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules and name != "megatron":
                module = _EmptyModule(name)
                module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
                sys.modules[name] = module
                if end > 1:
                    setattr(sys.modules[name.rpartition(".")[0]], parts[end - 1], module)
