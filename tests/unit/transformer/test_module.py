"""The base module and the half-precision wrapper."""

import pytest
import torch
from torch import nn

from megatron.core.parameters.param_meta import ParamMeta, set_param_meta
from megatron.core.transformer.module import Float16Module, MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.groups import fake_groups


def make_config(**fields):
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2, **fields)


class Stage(MegatronModule):
    def __init__(self, config, pre_process=True, post_process=True):
        super().__init__(config)
        self.pre_process, self.post_process = pre_process, post_process
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(2))
        self.register_buffer("scratch", torch.ones(2), persistent=False)
        self.seen = None

    def set_input_tensor(self, tensor):
        self.seen = tensor

    def forward(self, x, ids, extras=None):
        self.seen = (x.dtype, ids.dtype)
        return {"out": self.linear(x.to(self.linear.weight.dtype)), "ids": ids}


@pytest.mark.parametrize(("field", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_half_module_converts_weights_inputs_of_the_first_and_outputs_of_the_last_stage(
    field, dtype
):
    wrapped = Float16Module(make_config(**{field: True}), Stage(make_config()))
    out = wrapped(torch.randn(3, 4), torch.arange(3))
    assert wrapped.module.linear.weight.dtype == dtype
    assert wrapped.module.seen == (dtype, torch.int64)
    assert out["out"].dtype == torch.float32
    assert out["ids"].dtype == torch.int64
    assert wrapped(torch.randn(3, 4), torch.arange(3), fp32_output=False)["out"].dtype == dtype


def test_half_module_leaves_activations_between_stages_alone():
    stage = Stage(make_config(), pre_process=False, post_process=False)
    wrapped = Float16Module(make_config(bf16=True), stage)
    out = wrapped(torch.randn(3, 4), torch.arange(3))
    assert stage.seen[0] == torch.float32
    assert out["out"].dtype == torch.bfloat16
    wrapped.set_input_tensor("activation")
    assert stage.seen == "activation"


def test_half_module_leaves_no_trace_in_state_dict_names():
    stage = Stage(make_config())
    wrapped = Float16Module(make_config(bf16=True), stage)
    assert set(wrapped.state_dict()) == {"linear.weight", "linear.bias", "table"}
    assert set(wrapped.sharded_state_dict()) == set(wrapped.state_dict())
    wrapped.load_state_dict(wrapped.state_dict())


def test_default_declaration_follows_the_parameters_facts():
    module = Stage(make_config())
    module.pg_collection = fake_groups(tp=(1, 2), dp_cp=(3, 4))
    set_param_meta(module.linear.weight, ParamMeta(split_dim=0, split_axis="tp"))
    declared = module.sharded_state_dict("block.", ((0, 2, 5),))
    weight, bias = declared["block.linear.weight"], declared["block.linear.bias"]
    assert weight.global_shape == (5, 8, 4)
    assert weight.global_offset == (2, 4, 0)
    assert weight.replica_id == (0, 0, 3)
    assert bias.global_shape == (5, 4)
    assert bias.replica_id == (0, 1, 3)
    assert "block.table" in declared
    assert "block.scratch" not in declared
