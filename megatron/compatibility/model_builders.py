"""Megatron's configs of whole models and the builders that read them (`megatron.training.models`).

A `ModelConfig` describes one model: its layers in `transformer`, and what a training script passes
to the model's class. Its builder makes this rank's chunks and wraps them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

from torch import nn

from megatron.compatibility.config_container import ConfigContainerBase
from megatron.core import distributed
from megatron.core.enums import ModelType
from megatron.core.foundation import device
from megatron.core.foundation.errors import refuse_given
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
from megatron.training.setup.model import announce_size, build_chunks

ModelT = TypeVar("ModelT", bound=nn.Module)
BuildConfigT = TypeVar("BuildConfigT", bound="ModelConfig")
Chunks = list[nn.Module]
Hook = Callable[[Chunks], Chunks | None]


def compose_hooks(hooks: Sequence[Hook]) -> Callable[[Chunks], Chunks]:
    """Return one hook that calls all in order; a hook that returns None keeps the chunks."""

    def call_all(chunks: Chunks) -> Chunks:
        for hook in hooks:
            chunks = hook(chunks) or chunks
        return chunks

    return call_all


@dataclass(kw_only=True)
class ModelConfig:
    """A model of any kind. Attributes that it lacks are those of `transformer`, also to set them.

    `builder` is the dotted name of its `ModelBuilder`. The hooks get the chunks before and after
    they are wrapped. The other fields are arguments of the model's class.
    """

    builder: ClassVar[str]
    model_class: ClassVar[type[GPTModel]] = GPTModel
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
        layers = vars(self).get("transformer")
        is_own = name in type(self).__dataclass_fields__ or not hasattr(layers, name)
        object.__setattr__(self if is_own else layers, name, value)

    def get_builder_cls(self) -> Any:
        """Return the class that `builder` names.

        Raises:
            InstantiationException: the name is not permitted or cannot be imported.
        """
        return instantiate_utils._resolve_target(self.builder, "_builder_")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields without the hooks, `_target_` and `_builder_`."""
        written = ConfigContainerBase._convert_value_to_dict(self)
        kept = {name: value for name, value in written.items() if not name.endswith("_hooks")}
        return {**kept, "_builder_": self.builder}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelConfig:
        """Build the config that `data["_target_"]` names; keys that are no fields are dropped."""
        public = {key: value for key, value in data.items() if key != "_builder_"}
        config: ModelConfig = instantiate_utils.instantiate(public)
        object.__setattr__(config, "builder", data["_builder_"])
        return config

    def options(self, vp_stage: int | None) -> dict[str, Any]:
        """Return the arguments of the model's class for one chunk.

        Raises:
            ConfigError: there is no vocabulary, or other layers are requested than those of specs.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        refuse_given(
            type(self).__name__,
            {f"{name}=True": values.get(name) for name in _OTHER_LAYERS}
            | {"no vocab_size": self.vocab_size is None},
            rule="a model has a vocabulary, and the layers of its spec",
            fix="set vocab_size, or pass another spec",
        )
        if self.should_pad_vocab and self.vocab_size is not None:
            tp = self.transformer.tensor_model_parallel_size
            multiple = self.make_vocab_size_divisible_by
            values["vocab_size"] = pad_vocabulary(self.vocab_size, multiple=multiple, tp=tp)
        known = inspect.signature(GPTModel).parameters
        return {
            **{name: value for name, value in values.items() if name in known},
            "max_sequence_length": self.seq_length,
            "vp_stage": vp_stage,
        }


_OTHER_LAYERS = (
    "restore_modelopt_state", "use_transformer_engine_full_layer_spec",
    "use_transformer_engine_op_fuser", "use_arbitrary_attention_mask",
)  # fmt: skip


def _spec_of(spec: Any, config: ModelConfig, vp_stage: int | None) -> Any:
    """Return the spec, which a function may make from the config, the stage or nothing."""
    if not inspect.isroutine(spec):
        return spec
    options = {"config": config, "vp_stage": vp_stage}
    known = inspect.signature(spec).parameters
    return spec(**{name: value for name, value in options.items() if name in known})


@dataclass(kw_only=True)
class GPTModelConfig(ModelConfig):
    """A decoder; without a spec its layers are those of the backend that is installed."""

    builder: ClassVar[str] = "megatron.training.models.gpt.GPTModelBuilder"
    share_embeddings_and_output_weights: bool = True
    transformer_layer_spec: Any = None
    rope_scaling: bool = False
    rope_scaling_factor: float = 8.0
    use_transformer_engine_full_layer_spec: bool = False
    use_transformer_engine_op_fuser: bool = False
    use_arbitrary_attention_mask: bool | None = None

    def options(self, vp_stage: int | None) -> dict[str, Any]:
        """Return the arguments of the model's class for one chunk."""
        spec = _layer_spec(self, vp_stage)
        added = {"transformer_layer_spec": spec, "mtp_block_spec": mtp_block_spec(self, vp_stage)}
        return super().options(vp_stage) | added


def _layer_spec(config: GPTModelConfig, vp_stage: int | None) -> Any:
    if config.transformer_layer_spec is not None:
        return _spec_of(config.transformer_layer_spec, config, vp_stage)
    return get_gpt_decoder_block_spec(config.transformer, True, vp_stage=vp_stage)


def mtp_block_spec(config: GPTModelConfig, vp_stage: int | None = None) -> Any:
    """Return the spec of the layers that predict further tokens, or None."""
    if not config.transformer.mtp_num_layers:
        return None
    spec = _layer_spec(config, vp_stage)
    return get_gpt_mtp_block_spec(config.transformer, spec, True, vp_stage=vp_stage)


@dataclass(kw_only=True)
class HybridModelConfig(ModelConfig):
    """A stack of layers of several kinds."""

    builder: ClassVar[str] = "megatron.training.models.hybrid.HybridModelBuilder"
    model_class: ClassVar[type[GPTModel]] = HybridModel
    position_embedding_type: str = "none"
    hybrid_stack_spec: Any = None
    hybrid_layer_pattern: str | None = None

    def options(self, vp_stage: int | None) -> dict[str, Any]:
        """Return the arguments of the model's class for one chunk."""
        spec = hybrid_stack_spec
        if self.hybrid_stack_spec not in (None, spec):
            spec = _spec_of(self.hybrid_stack_spec, self, vp_stage)
        added = {"hybrid_stack_spec": spec, "hybrid_layer_pattern": self.hybrid_layer_pattern}
        return super().options(vp_stage) | added


class ModelBuilder:
    """Builds the model of one config."""

    def __init__(self, model_config: Any) -> None:
        self._model_config = model_config

    def build_model(
        self,
        pg_collection: ProcessGroupCollection,
        pre_process: bool | None = None,
        post_process: bool | None = None,
        vp_stage: int | None = None,
    ) -> GPTModel:
        """Return one chunk; None for `pre_process` and `post_process` derives them."""
        config = self._model_config
        layout, rank = pipeline_layout(config.transformer), pg_collection.pp.rank()
        first, last = layout.has_embedding(rank, vp_stage), layout.has_loss(rank, vp_stage)
        chunk: GPTModel = config.model_class(
            config.transformer,
            pre_process=first if pre_process is None else pre_process,
            post_process=last if post_process is None else post_process,
            pg_collection=pg_collection,
            **config.options(vp_stage),
        )
        return chunk

    def build_distributed_models(
        self, pg_collection: ProcessGroupCollection, ddp_config: Any = None, **options: Any
    ) -> Chunks:
        """Return this rank's chunks; `options` as in `unimodal_build_distributed_models`."""
        config = self._model_config
        options["pre_wrap_hook"] = compose_hooks(config.pre_wrap_hooks)
        chunks = unimodal_build_distributed_models(
            self.build_model, config.transformer, pg_collection, ddp_config, **options
        )
        return compose_hooks(config.post_wrap_hooks)(chunks)


def build_virtual_pipeline_stages(
    build_model: Callable[..., nn.Module],
    transformer_config: Any,
    pg_collection: ProcessGroupCollection,
    model_type: ModelType = ModelType.encoder_or_decoder,
) -> Chunks:
    """Return this rank's chunks in order.

    Args:
        build_model: takes `pg_collection`, `pre_process`, `post_process` and `vp_stage`.
    """
    chunks = build_chunks(transformer_config, build_model, pg_collection)
    for chunk in chunks:
        chunk.model_type = model_type  # type: ignore[assignment]
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
) -> Chunks:
    """Return the chunks in the data-parallel wrapper that the options choose."""
    kind = "TorchFullyShardedDataParallel" if use_torch_fsdp2 else "DistributedDataParallel"
    # The first name has no definition: its call raises the error with the replacement.
    wrapper = getattr(distributed, "FullyShardedDataParallel" if use_megatron_fsdp else kind)
    plain = overlap_param_gather_with_optimizer_step
    wrapped: Chunks = [
        wrapper(
            get_model_config(chunk), ddp_config, chunk, disable_bucketing=plain or place > 0,
            pg_collection=pg_collection,
        )
        for place, chunk in enumerate(model)
    ]  # fmt: skip
    for chunk in wrapped if data_parallel_random_init else ():
        chunk.broadcast_params()  # type: ignore[operator]
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
) -> Chunks:
    """Build this rank's chunks of a language model, on its device, in its dtype and wrapped.

    Args:
        build_model: see `build_virtual_pipeline_stages`.
        pre_wrap_hook: called with the chunks before they are moved and wrapped.
    Raises:
        ConfigError: `use_megatron_fsdp`; the error names the replacement.
    """
    config = transformer_config
    chunks = build_virtual_pipeline_stages(build_model, config, pg_collection, model_type)
    chunks = compose_hooks([pre_wrap_hook] if pre_wrap_hook else [])(chunks)
    announce_size(chunks, pg_collection)
    if not config.use_cpu_initialization:
        chunks = [chunk.to(device.current_device()) for chunk in chunks]
    if mixed_precision_wrapper and (config.fp16 or config.bf16):
        chunks = [mixed_precision_wrapper(config, chunk) for chunk in chunks]
    if not wrap_with_ddp:
        return chunks
    return _ddp_wrap(
        chunks, data_parallel_random_init, ddp_config, overlap_param_gather_with_optimizer_step,
        use_megatron_fsdp, use_torch_fsdp2, pg_collection=pg_collection,
    )  # fmt: skip
