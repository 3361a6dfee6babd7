"""Fields of Megatron's configs that nothing here reads: found, and answered when they are set."""

import dataclasses
import warnings
from types import SimpleNamespace

import pytest

from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.foundation.errors import ConfigError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.settings.inert_flags import inert_fields
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.config.run import all_flags

SHAPE = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
REQUIRED = {TransformerConfig: SHAPE, MLATransformerConfig: SHAPE}
CONFIGS = (
    *(ModelParallelConfig, TransformerConfig, MLATransformerConfig),
    *(OptimizerConfig, DistributedDataParallelConfig),
)
READ_BY_LIBRARIES = {
    TransformerConfig: "pipeline_model_parallel_comm_backend tp_comm_overlap is_hybrid_model"
    " cuda_graph_impl cuda_graph_scope cuda_graph_warmup_steps transformer_impl"
    " fine_grained_activation_offloading tp_comm_bootstrap_backend moe_flex_dispatcher_backend"
    " moe_use_legacy_grouped_gemm moe_per_layer_logging fp8_param",
    OptimizerConfig: "reuse_grad_buf_for_mxfp8_param_ag barrier_with_L1_time config_logger_dir",
    DistributedDataParallelConfig: "reuse_grad_buf_for_mxfp8_param_ag nccl_ub fp8_param_gather",
}
"""What megatron-bridge reads or sets."""


def other_value(row):
    """Return a value that is not the default."""
    if isinstance(row.default, bool):
        return not row.default
    if row.metadata.choices:
        return next(choice for choice in row.metadata.choices if choice != row.default)
    return [1] if row.metadata.nargs else 7


@pytest.mark.parametrize("kind", READ_BY_LIBRARIES)
def test_what_libraries_read_is_a_field(kind):
    assert set(READ_BY_LIBRARIES[kind].split()) <= {f.name for f in dataclasses.fields(kind)}


def test_configs_are_quiet_where_nothing_is_set():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for kind in CONFIGS:
            kind(**REQUIRED.get(kind, {}))
        TransformerConfig(**SHAPE, cuda_graph_scope="full", offload_modules=None)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_field_without_effect_is_accepted_with_its_reason(kind):
    accepted = [row for row in inert_fields(kind) if row.metadata.note]
    given = {row.name: other_value(row) for row in accepted}
    with pytest.warns(UserWarning, match=kind.__name__) as told:
        config = kind(**REQUIRED.get(kind, {}), **given)
    for warning, row in zip(told, accepted, strict=True):
        shown = f"{kind.__name__}.{row.name}={given[row.name]!r}: {row.metadata.note}."
        assert str(warning.message) == shown
        assert warning.filename == __file__
        assert getattr(config, row.name) == given[row.name]


@pytest.mark.parametrize("kind", [TransformerConfig, DistributedDataParallelConfig])
def test_a_field_of_what_is_not_here_is_refused_with_what_to_use(kind):
    refused = [row for row in inert_fields(kind) if row.metadata.refuse]
    given = {row.name: other_value(row) for row in refused}
    with pytest.raises(ConfigError) as caught:
        kind(**REQUIRED.get(kind, {}), **given)
    for row in refused:
        shown = f"{kind.__name__}.{row.name}={given[row.name]!r} is not supported yet"
        assert shown in str(caught.value)
        assert row.metadata.refuse in str(caught.value)


def test_a_config_that_gives_a_field_another_default_gets_the_same_answer():
    @dataclasses.dataclass
    class Provider(TransformerConfig):
        external_cuda_graph: bool = True
        fp8_multi_head_attention: bool = True

    with pytest.raises(
        ConfigError, match=r"Provider\.fp8_multi_head_attention=True is not supported"
    ):
        Provider(**SHAPE)
    with pytest.warns(UserWarning, match=r"Provider\.external_cuda_graph=True: --cuda-graph-impl"):
        Provider(**SHAPE, fp8_multi_head_attention=False)


def test_a_field_of_the_tables_has_the_answer_of_its_flag():
    for kind in CONFIGS:
        for row in inert_fields(kind):
            if row.metadata.is_flag:
                flag = all_flags()[row.metadata.name].metadata
                assert (flag.note, flag.refuse) == (row.metadata.note, row.metadata.refuse), row


def test_a_config_of_a_script_shows_what_the_command_line_has_said_already():
    args = SimpleNamespace(**SHAPE, tp_comm_overlap=True, moe_permute_fusion=True)
    config = core_transformer_config_from_args(args)
    assert config.tp_comm_overlap
    assert config.moe_permute_fusion


def test_embeddings_begin_with_a_standard_deviation_of_their_own():
    import torch

    config = TransformerConfig(**SHAPE, init_method_std=0.02, embedding_init_method_std=1.0)
    weights = torch.empty(2, 4000)
    config.embedding_init_method(weights[0])
    config.init_method(weights[1])
    assert weights.std(1).tolist() == pytest.approx([1.0, 0.02], rel=0.05)
