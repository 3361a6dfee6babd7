"""Tokens travel by DeepEP's two buffers, of which stand-ins run here."""

import pytest
import torch

from megatron.core.foundation.errors import ConfigError
from megatron.core.models.common.kernel_choices import kernel_choices
from megatron.core.transformer.moe.dispatchers import (
    MoEDeepEPTokenDispatcher,
    MoEHybridEPTokenDispatcher,
    choose_exchange,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.gpu_without_gpu.deep_ep_library import CALLS, library_on_cpu
from tests.harness.distributed import distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.compare import compare
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import exceeds, run_case, serial_run
from tests.parity.training_case import train
from tests.unit.transformer.moe.small_layer import layer, tokens

KINDS = {"deepep": MoEDeepEPTokenDispatcher, "hybridep": MoEHybridEPTokenDispatcher}
PADDED = {"moe_expert_capacity_factor": 0.5, "moe_pad_expert_input_to_capacity": True}


def trained(moe, x, mask=None):
    x = x.detach().requires_grad_()
    output = moe(x, padding_mask=mask)[0]
    output.square().sum().backward()
    return {
        "output": output.detach(), "gradient of the input": x.grad,
        **{name: p.grad for name, p in moe.named_parameters()},
    }  # fmt: skip


def compare_with_all_to_all(groups, library, options):
    rank = groups.tp_ep.rank()
    x = (tokens() * (1 + 0.5 * rank)).roll(rank, 0)
    positions = len(x) * groups.tp.size()  # ranks hold different rows
    mask = torch.arange(positions).expand(2, -1) >= positions - 1  # the last is padding
    ranks = {"expert_model_parallel_size": groups.ep.size()}
    plain = layer(groups, moe_token_dispatcher_type="alltoall", **ranks, **options)
    expected = trained(plain, x, mask)
    with library_on_cpu(library):
        moe = layer(groups, moe_token_dispatcher_type="flex", moe_flex_dispatcher_num_sms=4,
                    **ranks, **options)  # fmt: skip
        assert type(moe.token_dispatcher) is KINDS[library]
        for _ in range(2):  # the second time with the memory of the first
            moe.zero_grad()
            found = trained(moe, x, mask)
    for name, value in found.items():
        assert_close(value, expected[name], FP32_REORDERED_SUM, name)
    return CALLS


@pytest.mark.parametrize("library", KINDS)
@pytest.mark.parametrize("options", [{"moe_grouped_gemm": True}, PADDED])
@distributed(world_size=4, ep=4)
def test_a_layer_computes_what_it_does_by_all_to_all(groups, library, options):
    calls = compare_with_all_to_all(groups, library, options)
    once = {
        "deepep": ["get_dispatch_layout", "dispatch", "combine", "dispatch with handle", "combine"],
        "hybridep": ["dispatch_with_permute", "combine_with_unpermute",
                     "dispatch_with_permute again", "combine_with_unpermute"],
    }[library]  # fmt: skip
    first = {"deepep": "set_num_sms 4", "hybridep": "HybridEPBuffer 4"}[library]
    assert calls == [first, *once, *once] or calls == [*once, *once]  # of an earlier test's layer


@pytest.mark.parametrize("library", KINDS)
@distributed(world_size=4, ep=2, tp=2, expt_tp=2)
def test_a_token_goes_to_every_shard_of_its_experts(groups, library):
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True,
               "expert_tensor_parallel_size": 2, "moe_grouped_gemm": True}  # fmt: skip
    compare_with_all_to_all(groups, library, options)


def train_by(groups, library, *arguments):
    with library_on_cpu(library):
        return train(groups, *arguments)


def train_by_deep_ep(groups, *arguments):
    """Run a rank whose tokens travel by `Buffer`."""
    return train_by(groups, "deepep", *arguments)


def train_by_hybrid_ep(groups, *arguments):
    """Run a rank whose tokens travel by `HybridEPBuffer`."""
    return train_by(groups, "hybridep", *arguments)


@pytest.mark.parametrize(
    ("job", "layout", "model"),
    [
        (
            train_by_deep_ep,
            LayoutCase(dp=2, ep=2, dispatcher="flex", stage=1),
            ModelCase("llama", True, 0.0, experts="dropless", padded=True),
        ),
        (
            train_by_hybrid_ep,
            LayoutCase(tp=2, sp=True, dp=2, ep=4, dispatcher="flex", grouped=False),
            ModelCase("gpt2", True, 0.1, experts="capacity"),
        ),
    ],
)
def test_training_by_a_library_equals_one_process(job, layout, model):
    errors = compare(run_case(layout, model, 2, job), serial_run(layout.serial, model, 2))
    assert not exceeds(errors), errors


def config_of(**options):
    return TransformerConfig(
        num_layers=1, hidden_size=16, num_attention_heads=2, num_moe_experts=4,
        params_dtype=torch.bfloat16, moe_token_dispatcher_type="flex", **options,
    )  # fmt: skip


def test_a_machine_without_the_library_takes_all_to_all_and_says_why():
    choice = choose_exchange(config_of(), "cuda")
    assert choice.name == "all-to-all"
    assert "deepep needs DeepEP, which is not installed" in choice.reasons
    lines = kernel_choices(config_of(), "cuda")
    (shown,) = (str(line) for line in lines if line.operation == "exchange of tokens")
    assert shown.startswith("exchange of tokens: all-to-all (deepep needs DeepEP")
    planned = choose_exchange(config_of(moe_flex_dispatcher_backend="hybridep"), "cuda",
                              is_planned=True)  # fmt: skip
    assert planned.name == "hybridep if installed, else all-to-all"


def test_what_a_library_cannot_do_goes_by_all_to_all():
    with library_on_cpu("deepep"):
        for options, reason in (
            ({"moe_expert_rank_capacity_factor": 2.0}, "capacity-factor"),
            ({"moe_flex_dispatcher_backend": "ncclep"}, "ncclep"),
        ):
            choice = choose_exchange(config_of(**options), "cuda")
            assert choice.name == "all-to-all"
            assert reason in choice.reasons
        assert choose_exchange(config_of(), "cuda").name == "deepep"


def test_flags_of_the_library_are_checked():
    assert config_of(moe_flex_dispatcher_backend="hybridep",
                     moe_enable_deepep=True).exchange_library == "deepep"  # fmt: skip
    assert config_of(moe_deepep_num_sms=8, moe_flex_dispatcher_num_sms=4).exchange_num_sms == 8
    with pytest.raises(ConfigError, match="half of the multiprocessors send"):
        config_of(moe_deepep_num_sms=3)
