"""Names of `megatron.core.utils` and of small modules of `megatron.core`: config, jit, fp8."""

from __future__ import annotations

import enum
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron.core import num_microbatches_calculator
from megatron.core.foundation.errors import ConfigError
from megatron.core.foundation.optional_imports import require
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tokenizers.base import TextTokenizer
from megatron.core.topology.group import Group
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport import torch_collectives
from megatron.core.utils import get_pg_rank, get_pg_size

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass
class _State:
    """The settings of this process that functions of this module keep between calls."""

    is_experimental: bool = False
    annotates_ranges: bool = False
    open_ranges: list[tuple[str, Any]] = field(default_factory=list)


@functools.cache
def _state() -> _State:
    """Return the state of this process."""
    return _State()


__package_name__ = "megatron-lattice"


try:
    __version__ = metadata.version(__package_name__)
except metadata.PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"
__shortversion__ = __version__


# Settings -------------------------------------------------------------------------------


def set_experimental_flag(flag: bool) -> None:
    """Store the flag that `is_experimental_enabled` returns; no feature depends on it."""
    _state().is_experimental = bool(flag)


def is_experimental_enabled() -> bool:
    """Return the flag that `set_experimental_flag` stored."""
    return _state().is_experimental


def has_config_logger_enabled(config: TransformerConfig) -> bool:
    """Return whether a config names a directory to be written to."""
    return bool(getattr(config, "config_logger_dir", ""))


class _Calculator:
    """A proxy of the current micro batch calculator of this process."""

    def __getattr__(self, name: str) -> Any:
        return getattr(num_microbatches_calculator._calculator, name)


CURRENT_CALCULATOR = _Calculator()


def jit_fuser(function: _Function) -> _Function:
    """Return the function unchanged: elementwise operations are fused by hand."""
    return function


def apply_module(m: _Function, *, check_subclass: bool = True) -> _Function:
    """Return the module unchanged: it is called as the function that it is."""
    return m


def do_nothing(*_: object, **__: object) -> None:
    """Replace functions without effect here.

    `jit_fuser` compiles nothing, linear layers hold the amax histories, and the launcher sets the
    CPU affinity.
    """


def nested_values(x: dict[Any, Any] | list[Any]) -> Iterator[Any]:
    """Yield the values of nested dicts and lists, in order."""
    for value in x.values() if isinstance(x, dict) else x:
        if isinstance(value, dict | list):
            yield from nested_values(value)
        else:
            yield value


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, and any other tensor [...] itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def get_fp8_context(
    config: Any, layer_no: int = -1, is_init: bool = False
) -> AbstractContextManager[None]:
    """Return a context that does nothing: linear layers read the FP8 recipe from their config."""
    return nullcontext()


def get_quant_config_or_none(name: str, recipe: object = None) -> None:
    """Return None: layers are not quantized."""
    if recipe is not None:
        raise ConfigError(
            f"a quantization recipe was given for {name}.",
            rule="weights are not quantized in training",
            fix="leave it out",
        )


# Tensors and arguments ------------------------------------------------------------------


class WrappedTensor:
    """A holder that releases its tensor to the callee, so that the caller keeps no reference."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def unwrap(self) -> Tensor:
        """Return the tensor, once."""
        if self._tensor is None:
            raise RuntimeError("WrappedTensor: the tensor was taken out already")
        tensor, self._tensor = self._tensor, None
        return tensor


def deprecate_inference_params(inference_context: object, inference_params: object) -> Any:
    """Return `inference_context`; else `inference_params`, its former name, with a warning."""
    if inference_context is None and inference_params is not None:
        warnings.warn("inference_params is the former name of inference_context", stacklevel=2)
        return inference_params
    return inference_context


def get_tensor_model_parallel_group_if_none(
    tp_group: Group, is_expert: bool = False, check_initialized: bool = True
) -> Group:
    """Return `tp_group`, or the current collection's for dense layers or experts."""
    if tp_group is not None or not dist.is_initialized():
        return tp_group
    groups = ProcessGroupCollection.current()
    return groups.expt_tp if is_expert else groups.tp


@torch.no_grad()
def check_param_hashes_across_dp_replicas(
    model: list[nn.Module], cross_check: bool = False
) -> bool:
    """Return whether all replicas hold the same weights, bit for bit.

    Args:
        cross_check: return False on all ranks if the replicas of any rank differ; otherwise each
            rank compares its own replicas only.
    Communication:
        one all-gather of 8 bytes per parameter over the replicas, and with `cross_check` an
        all-reduce of one number over all ranks.
    """
    groups = ProcessGroupCollection.current()
    same = True
    for is_expert, group in ((False, groups.dp_cp), (True, groups.expt_dp)):
        sums = [
            _bits_sum(parameter)
            for chunk in model
            for parameter in chunk.parameters()
            if (not getattr(parameter, "allreduce", True)) == is_expert
        ]
        if not sums or get_pg_size(group) == 1:
            continue
        mine = torch.stack(sums)
        every = torch_collectives.all_gather(mine, group)
        same = same and all(torch.equal(other, every[0]) for other in every)
    if cross_check and dist.is_initialized():
        where = torch_collectives.tensor_device(torch_collectives.world())
        anybody = torch.tensor([0 if same else 1], device=where)
        same = not bool(
            torch_collectives.all_reduce(anybody, torch_collectives.world(), dist.ReduceOp.MAX)
        )
    return same


def _bits_sum(parameter: Tensor) -> Tensor:
    """Return an int64 [] that depends on every bit and on the order of the elements."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = parameter.detach().contiguous().view(integers[parameter.element_size()]).view(-1).long()
    places = torch.arange(1, bits.numel() + 1, device=bits.device)
    return (bits * (places * 2654435761 % 4294967291)).sum()


# Versions -------------------------------------------------------------------------------


def _numbers(version: str) -> tuple[int, ...]:
    found = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def get_te_version() -> tuple[int, ...]:
    """Return the release numbers of Transformer Engine, or (0, 0, 0)."""
    try:
        return _numbers(metadata.version("transformer-engine"))
    except metadata.PackageNotFoundError:
        return (0, 0, 0)


def is_fa_min_version(version: str, check_equality: bool = True) -> bool:
    """Return whether flash-attention is at least (or, without equality, above) `version`."""
    try:
        have = _numbers(metadata.version("flash-attn"))
    except metadata.PackageNotFoundError:
        return False
    want = _numbers(version)
    return have >= want if check_equality else have > want


class StragglerDetector:
    """A context around parts of a step that measures nothing; use `--log-straggler` instead."""

    enabled = False

    def configure(self, *_: object, **options: object) -> None:
        """Raise ConfigError: the detector cannot be switched on."""
        raise ConfigError(
            "StragglerDetector measures nothing.",
            rule="scripts may use the context; the training loop finds slow ranks",
            flags=["--log-straggler"],
            fix="leave out the call of configure, and use --log-straggler",
        )

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Return the context."""
        return self

    def __enter__(self) -> StragglerDetector:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class MegatronLegacyTokenizer(TextTokenizer):
    """`megatron.core.datasets.megatron_tokenizer`: the base class of a script's own tokenizer.

    Subclasses define `tokenize`, `detokenize`, `vocab`, `vocab_size` and their special ids; other
    special ids are None.
    """

    def __init__(self, *tokenizer_paths: str, **tokenizer_options: Any) -> None:
        super().__init__(tokenizer_path=list(tokenizer_paths), **tokenizer_options)


# Logs and profiles ----------------------------------------------------------------------


def log_single_rank(logger: logging.Logger, *args: Any, rank: int = 0, **kwargs: Any) -> None:
    """Call `logger.log(*args, **kwargs)` on one rank."""
    if not dist.is_initialized() or dist.get_rank() == rank:
        logger.log(*args, **kwargs)


def log_on_each_pipeline_stage(
    logger: logging.Logger,
    *args: Any,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
    **kwargs: Any,
) -> None:
    """Call `logger.log(*args, **kwargs)` on the first rank of each pipeline stage."""
    groups = ProcessGroupCollection.current()
    if not get_pg_rank(tp_group or groups.tp) and not get_pg_rank(dp_cp_group or groups.dp_cp):
        logger.log(*args, **kwargs)


def configure_nvtx_profiling(enabled: bool) -> None:
    """Switch `nvtx_range_push` on or off."""
    _state().annotates_ranges = enabled


def nvtx_range_push(msg: str | None = None, suffix: str | None = None) -> None:
    """Open a range in the profiler's trace; ranges nest."""
    if not _state().annotates_ranges:
        return
    name = "range" if msg is None else msg
    mark = torch.profiler.record_function(name if suffix is None else f"{name}.{suffix}")
    mark.__enter__()
    _state().open_ranges.append((name, mark))


def nvtx_range_pop(msg: str | None = None, suffix: str | None = None) -> None:
    """Close the range that was opened last."""
    if not _state().annotates_ranges:
        return
    if not _state().open_ranges or (msg is not None and msg != _state().open_ranges[-1][0]):
        inner = repr(_state().open_ranges[-1][0]) if _state().open_ranges else "none"
        raise RuntimeError(f"nvtx_range_pop({msg!r}): the innermost open range is {inner}")
    _, mark = _state().open_ranges.pop()
    mark.__exit__(None, None, None)


def nvtx_decorator(
    message: str | None = None, color: str | None = None
) -> Callable[[_Function], _Function]:
    """Return a decorator that marks each call of a function as a range."""

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def marked(*args: Any, **kwargs: Any) -> Any:
            nvtx_range_push(message or function.__qualname__)
            try:
                return function(*args, **kwargs)
            finally:
                nvtx_range_pop()

        return marked  # type: ignore[return-value]

    return decorate


# Kernels and machines -------------------------------------------------------------------

FP8_TENSOR_CLASS: tuple[type, ...] = ()
"""Classes of parameters that are stored in 8 bits; empty, because weights are cast when used."""
HAVE_TE_FP8_TENSOR_CLASS = False
HAVE_FA3 = False  # --attention-backend chooses kernels


class CudaGraphScope(enum.Enum):
    """The scope of a CUDA graph, for code that compares with its members; none is captured."""

    full_iteration = 1
    attn = 2
    mlp = 3
    moe = 4
    moe_router = 5
    moe_preprocess = 6
    mamba = 7


class FullCudaGraphWrapper:
    """Megatron's wrapper of whole-step CUDA graphs; building one raises `ConfigError`."""

    cuda_graph: Mapping[str, object] = MappingProxyType({})
    result: Mapping[str, object] = MappingProxyType({})

    def __init__(self, forward_backward_func: object, cuda_graph_warmup_steps: int = 1) -> None:
        raise ConfigError(
            f"{forward_backward_func} cannot be captured after {cuda_graph_warmup_steps} steps.",
            rule="steps run eagerly, and no CUDA graph is captured",
            flags=["--cuda-graph-impl"],
            fix="leave the flag out",
        )


class MultiStorageClientFeature:
    """Whether the multi-storage client opens paths: never."""

    @staticmethod
    def is_enabled() -> bool:
        """Return False."""
        return False

    @staticmethod
    def import_package() -> Any:
        """Import the client, for code that opens paths by itself."""
        return require("multistorageclient", purpose="MultiStorageClientFeature")


def local_multi_tensor_applier(
    op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: list[list[Tensor]], *args: Any
) -> Any:
    """Call `op` on lists of tensors, with the chunk size of a fused kernel."""
    return op(2048 * 32, noop_flag_buffer, tensor_lists, *args)


def local_multi_tensor_l2_norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    per_tensor: bool,
    *_: object,
) -> tuple[Tensor, Tensor | None]:
    """Return the joint norm of the tensors of the first list, fp32 [1].

    Returns also the norm of each tensor if `per_tensor` is set, else None.
    """
    norms = torch.stack([torch.linalg.vector_norm(each.float()) for each in tensor_lists[0]])
    return torch.linalg.vector_norm(norms).reshape(1), norms if per_tensor else None


def get_data_parallel_group_if_dtensor(
    tensor: Tensor, data_parallel_group: Group | None = None
) -> Group | None:
    """Return the group of a DTensor's mesh; for other tensors `data_parallel_group`.

    Raises:
        ConfigError: the tensor is split over a group other than `data_parallel_group`.
    """
    if not isinstance(tensor, DTensor):
        return data_parallel_group
    group = tensor.device_mesh.get_group()
    if data_parallel_group is not None and group != data_parallel_group:
        raise ConfigError(
            "tensors are split over different data-parallel groups.",
            rule="a norm of several tensors is summed over one group",
            fix="call once for each group",
        )
    return group


# Image models ---------------------------------------------------------------------------

IGNORE_INDEX = -100
"""Label of a position that the loss leaves out."""
DEFAULT_IMAGE_TOKEN_INDEX = -200
IMAGE_TOKEN = "<image>"
"""The placeholder of an image in a prompt."""
