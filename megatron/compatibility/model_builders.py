"""Megatron's configs of whole models and the builders that read them (`megatron.training.models`).

A `ModelConfig` describes one model: its layers in `transformer`, and what a training script passes
to the model's class. Its builder makes this rank's chunks and wraps them.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from torch import nn

from megatron.core import distributed
from megatron.core.enums import ModelType
from megatron.core.foundation import device
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.pipeline_parallel.layout import pipeline_layout
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.config import instantiate_utils
from megatron.training.config.resolved import pad_vocabulary
from megatron.training.setup.model import announce_size

ModelT = TypeVar("ModelT", bound=nn.Module)
BuildConfigT = TypeVar("BuildConfigT", bound="ModelConfig")
Hook = Callable[[list[nn.Module]], list[nn.Module] | None]


def compose_hooks(hooks: Sequence[Hook]) -> Hook:
    """Return one hook that calls all in order; a hook that returns None keeps the chunks."""

    def call_all(chunks: list[nn.Module]) -> list[nn.Module]:
        for hook in hooks:
            chunks = hook(chunks) or chunks
        return chunks

    return call_all


class Serializable(ABC):
    """An object that can be written as a mapping and built from it."""

    @abstractmethod
    def as_dict(self) -> dict[str, Any]:
        """Return a mapping whose `_target_` names the class."""

    @classmethod
    @abstractmethod
    def from_dict(cls, data: dict[str, Any]) -> Serializable:
        """Build an object from its mapping."""


@dataclass(kw_only=True)
class ModelConfig(Serializable):
    """A model of any kind. Attributes that it lacks are those of `transformer`, also to set them.

    `builder` is the dotted name of its `ModelBuilder`.
    """

    builder: ClassVar[str]
    transformer: Any
    vocab_size: int | None = None
    should_pad_vocab: bool = False
    make_vocab_size_divisible_by: int = 128
    seq_length: int = 1024
    fp16_lm_cross_entropy: bool = False
    parallel_output: bool = True
    share_embeddings_and_output_weights: bool = False
    position_embedding_type: str = "learned_absolute"
    rotary_base: float = 10000
    rotary_percent: float = 1.0
    seq_len_interpolation_factor: float | None = None
    scatter_embedding_sequence_parallel: bool = True
    restore_modelopt_state: bool = False
    hf_model_id: str | None = None
    pre_wrap_hooks: list[Hook] = field(default_factory=list)
    post_wrap_hooks: list[Hook] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "transformer" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.transformer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        of_layers = name not in _own_names(type(self)) and hasattr(
            vars(self).get("transformer"), name
        )
        object.__setattr__(self.transformer if of_layers else self, name, value)

    def get_builder_cls(self) -> type:
        """Return the class that `builder` names.

        Raises:
            InstantiationException: the name is not permitted or cannot be imported.
        """
        found: type = instantiate_utils._resolve_target(self.builder, "_builder_")
        return found

    def finalize(self) -> None:
        """Check the layers' settings and derive others, if their class waits for that call."""
        if hasattr(self.transformer, "finalize"):
            self.transformer.finalize()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields without the hooks, `_target_` and `_builder_`."""
        return {**_as_dict(self), "_builder_": self.builder}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Build the config that `data["_target_"]` names; keys that are no fields are dropped.

        Raises:
            InstantiationException: the target is not permitted or fails.
        """
        public = {key: value for key, value in data.items() if key != "_builder_"}
        config: ModelConfig = instantiate_utils.instantiate(public)
        config.builder = data["_builder_"]  # type: ignore[misc]  one object has another builder
        return config

    def _rows(self) -> int:
        """Return the rows of the embedding."""
        if self.vocab_size is None:
            raise ValueError(f"{type(self).__name__}.vocab_size is not set")
        if not self.should_pad_vocab:
            return self.vocab_size
        return pad_vocabulary(
            self.vocab_size,
            multiple=self.make_vocab_size_divisible_by,
            tp=self.transformer.tensor_model_parallel_size,
        )

    def options(self) -> dict[str, Any]:
        """Return the keyword arguments of the model's class that do not depend on the stage."""
        names = (
            "fp16_lm_cross_entropy", "parallel_output", "share_embeddings_and_output_weights",
            "position_embedding_type", "rotary_base", "rotary_percent",
            "seq_len_interpolation_factor", "scatter_embedding_sequence_parallel",
        )  # fmt: skip
        return {
            "config": self.transformer,
            "vocab_size": self._rows(),
            "max_sequence_length": self.seq_length,
            **{name: getattr(self, name) for name in names},
        }


def _own_names(of_class: type) -> set[str]:
    return {"builder", *(each.name for each in fields(of_class))}  # type: ignore[arg-type]


def _as_dict(value: Any) -> Any:
    if not is_dataclass(value) or isinstance(value, type):
        return value
    names = [f.name for f in fields(value) if f.init and not f.name.startswith("_")]
    kept = [name for name in names if name not in ("pre_wrap_hooks", "post_wrap_hooks")]
    target = f"{type(value).__module__}.{type(value).__qualname__}"
    return {"_target_": target, **{name: _as_dict(getattr(value, name)) for name in kept}}


def build_virtual_pipeline_stages(
    build_model: Callable[..., nn.Module],
    transformer_config: Any,
    pg_collection: ProcessGroupCollection,
    model_type: ModelType = ModelType.encoder_or_decoder,
) -> list[nn.Module]:
    """Return this rank's chunks in order.

    Args:
        build_model: takes `pg_collection`, `pre_process`, `post_process` and `vp_stage`.
    """
    layout, rank = pipeline_layout(transformer_config), pg_collection.pp.rank()
    count = transformer_config.virtual_pipeline_model_parallel_size or 1
    chunks: list[Any] = []
    for stage in range(count) if count > 1 else (None,):
        first, last = layout.has_embedding(rank, stage), layout.has_loss(rank, stage)
        chunks.append(build_model(pg_collection, first, last, vp_stage=stage))
        chunks[-1].model_type = model_type
    return chunks


def _ddp_wrap(
    model: Sequence[nn.Module],
    data_parallel_random_init: bool,
    ddp_config: Any,
    overlap_param_gather_with_optimizer_step: bool,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    *,
    pg_collection: ProcessGroupCollection,
) -> list[nn.Module]:
    """Return the chunks in the data-parallel wrapper that the options choose."""
    wrapper: Any = distributed.DistributedDataParallel
    if use_torch_fsdp2:
        wrapper = distributed.TorchFullyShardedDataParallel
    if use_megatron_fsdp:
        wrapper = distributed.FullyShardedDataParallel  # type: ignore[attr-defined]  it refuses
    wrapped = [
        wrapper(
            get_model_config(chunk), ddp_config, chunk, pg_collection=pg_collection,
            disable_bucketing=place > 0 or overlap_param_gather_with_optimizer_step,
        )
        for place, chunk in enumerate(model)
    ]  # fmt: skip
    if data_parallel_random_init:
        for chunk in wrapped:
            chunk.broadcast_params()
    return wrapped


def unimodal_build_distributed_models(
    build_model: Callable[..., nn.Module],
    transformer_config: Any,
    pg_collection: ProcessGroupCollection,
    ddp_config: Any = None,
    overlap_param_gather_with_optimizer_step: bool = False,
    use_megatron_fsdp: bool = False,
    use_torch_fsdp2: bool = False,
    wrap_with_ddp: bool = True,
    data_parallel_random_init: bool = False,
    mixed_precision_wrapper: Callable[[Any, nn.Module], nn.Module] | None = Float16Module,
    pre_wrap_hook: Hook | None = None,
    model_type: ModelType = ModelType.encoder_or_decoder,
) -> list[nn.Module]:
    """Build this rank's chunks of a language model, on its device, in its dtype and wrapped.

    Args:
        build_model: see `build_virtual_pipeline_stages`.
        pre_wrap_hook: called with the chunks before they are moved and wrapped.
    Raises:
        ConfigError: `use_megatron_fsdp`; the error names the replacement.
    """
    chunks = build_virtual_pipeline_stages(
        build_model, transformer_config, pg_collection, model_type
    )
    chunks = compose_hooks([pre_wrap_hook] if pre_wrap_hook else [])(chunks) or chunks
    announce_size(chunks, pg_collection)
    if not transformer_config.use_cpu_initialization:
        chunks = [chunk.to(device.current_device()) for chunk in chunks]
    if mixed_precision_wrapper and (transformer_config.fp16 or transformer_config.bf16):
        chunks = [mixed_precision_wrapper(transformer_config, chunk) for chunk in chunks]
    if not wrap_with_ddp:
        return chunks
    return _ddp_wrap(
        chunks, data_parallel_random_init, ddp_config, overlap_param_gather_with_optimizer_step,
        use_megatron_fsdp, use_torch_fsdp2, pg_collection=pg_collection,
    )  # fmt: skip


class ModelBuilder(ABC, Generic[ModelT, BuildConfigT]):
    """Builds the model of one config."""

    def __init__(self, model_config: BuildConfigT) -> None:
        self._model_config = model_config

    @abstractmethod
    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> ModelT:
        """Return one chunk; None for `pre_process` and `post_process` derives them."""

    def build_distributed_models(
        self, pg_collection: ProcessGroupCollection, ddp_config: Any = None, **options: Any
    ) -> list[nn.Module]:
        """Return this rank's chunks; `options` as in `unimodal_build_distributed_models`."""
        config = self._model_config
        chunks = unimodal_build_distributed_models(
            self.build_model, config.transformer, pg_collection, ddp_config,
            pre_wrap_hook=compose_hooks(config.pre_wrap_hooks), **options,
        )  # fmt: skip
        return compose_hooks(config.post_wrap_hooks)(chunks) or chunks

    def _stage(
        self,
        groups: ProcessGroupCollection,
        pre_process: bool | None,
        post_process: bool | None,
        vp_stage: int | None,
    ) -> dict[str, Any]:
        """Return the keyword arguments of the model's class that depend on the stage."""
        layout, rank = pipeline_layout(self._model_config.transformer), groups.pp.rank()
        if pre_process is None:
            pre_process = layout.has_embedding(rank, vp_stage)
        if post_process is None:
            post_process = layout.has_loss(rank, vp_stage)
        return {
            "pre_process": pre_process,
            "post_process": post_process,
            "vp_stage": vp_stage,
            "pg_collection": groups,
        }


def _spec_of(spec: Any, config: Any, vp_stage: int | None) -> Any:
    """Return the spec, which a function may make from the config, the stage or nothing."""
    if not inspect.isfunction(spec) and not isinstance(spec, partial):
        return spec
    known = inspect.signature(spec).parameters
    options = {"vp_stage": vp_stage} if "vp_stage" in known else {}
    return spec(config, **options) if "config" in known else spec(**options)


@dataclass(kw_only=True)
class GPTModelConfig(ModelConfig):
    """A decoder; without a spec its layers are those of the backend that is installed."""

    builder: ClassVar[str] = "megatron.training.models.gpt.GPTModelBuilder"
    transformer_layer_spec: Any = None
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    share_embeddings_and_output_weights: bool = True
    use_transformer_engine_full_layer_spec: bool = False
    use_transformer_engine_op_fuser: bool = False
    use_arbitrary_attention_mask: bool | None = None
    tp_comm_overlap_cfg: str | dict[str, Any] | None = None

    def layer_spec(self, vp_stage: int | None) -> Any:
        """Return the spec of the layers of one stage."""
        if self.transformer_layer_spec is None:
            return get_gpt_decoder_block_spec(
                self.transformer, use_transformer_engine=True, vp_stage=vp_stage
            )
        return _spec_of(self.transformer_layer_spec, self, vp_stage)


def mtp_block_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Return the spec of the layers that predict further tokens, or None."""
    if not config.transformer.mtp_num_layers:
        return None
    spec = config.layer_spec(vp_stage)
    return get_gpt_mtp_block_spec(
        config.transformer, spec, use_transformer_engine=True, vp_stage=vp_stage
    )


class GPTModelBuilder(ModelBuilder[GPTModel, GPTModelConfig]):
    """Builds a `GPTModel`."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Return one chunk."""
        config = self._model_config
        return GPTModel(
            transformer_layer_spec=config.layer_spec(vp_stage),
            mtp_block_spec=mtp_block_spec(config, vp_stage),
            rope_scaling=config.rope_scaling,
            rope_scaling_factor=config.rope_scaling_factor,
            **config.options(),
            **self._stage(pg_collection, pre_process, post_process, vp_stage),
        )


@dataclass(kw_only=True)
class HybridModelConfig(ModelConfig):
    """A stack of layers of several kinds."""

    builder: ClassVar[str] = "megatron.training.models.hybrid.HybridModelBuilder"
    hybrid_stack_spec: Any = None
    hybrid_layer_pattern: str | None = None
    position_embedding_type: str = "none"


class HybridModelBuilder(ModelBuilder[HybridModel, HybridModelConfig]):
    """Builds a `HybridModel`."""

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> HybridModel:
        """Return one chunk."""
        config = self._model_config
        spec = config.hybrid_stack_spec or hybrid_stack_spec
        return HybridModel(
            hybrid_stack_spec=_spec_of(spec, config, vp_stage) if spec is not hybrid_stack_spec
            else spec,
            hybrid_layer_pattern=config.hybrid_layer_pattern,
            **config.options(),
            **self._stage(pg_collection, pre_process, post_process, vp_stage),
        )
