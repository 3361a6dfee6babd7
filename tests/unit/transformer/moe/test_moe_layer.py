"""A mixture-of-experts layer on one rank."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.kernels import grouped_products
from megatron.core.kernels.grouped_products import GROUPED_PRODUCTS, torch_grouped_mm
from megatron.core.kernels.registry import Kernel
from megatron.core.parameters.initialization import canonical_names
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_context.context import AuxLossScale, within_step
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.load_balancing import LoadSummary, finish_router_step
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.training.metrics.expert_load import first_bad_router
from tests.harness.groups import fake_groups
from tests.harness.tolerances import BF16_REORDERED_SUM, FP32_REORDERED_SUM, assert_close
from tests.unit.transformer.moe.small_layer import E, H, K, layer, tokens


def by_hand(moe, x):
    """The layer as a loop over tokens."""
    weights = dict(moe.named_parameters())
    out = torch.zeros(x.shape[0] * x.shape[1], H)

    def latent_projection(name, y):
        if f"{name}.weight" not in weights:
            return y
        return F.linear(y, weights[f"{name}.weight"], weights[f"{name}.bias"])

    for index, token in enumerate(x.reshape(-1, H)):
        logits = F.linear(token, weights["router.weight"], weights["router.bias"])
        best = logits.topk(K)
        token = latent_projection("fc1_latent_proj", token)
        combined = torch.zeros_like(token)
        for expert, share in zip(best.indices.tolist(), best.values.softmax(0), strict=True):
            part = {
                kind: weights[f"experts.local_experts.{expert}.{kind}"]
                for kind in (
                    "linear_fc1.weight", "linear_fc1.bias", "linear_fc2.weight", "linear_fc2.bias"
                )
            }  # fmt: skip
            gate, up = F.linear(token, part["linear_fc1.weight"], part["linear_fc1.bias"]).chunk(2)
            y = F.linear(F.silu(gate) * up, part["linear_fc2.weight"], part["linear_fc2.bias"])
            combined += share * y
        out[index] = latent_projection("fc2_latent_proj", combined)
    return out.view(x.shape)


def test_in_a_hash_layer_the_experts_depend_on_the_token_id_alone():
    moe = layer(moe_n_hash_layers=1, unpadded_vocab_size=9, moe_router_score_function="sigmoid",
                moe_router_enable_expert_bias=True)  # fmt: skip
    table = moe.router.token_experts
    assert moe.router.expert_bias is None
    assert table.shape == (9, K)
    assert all(len(set(row)) == K for row in table.tolist())
    x, ids = tokens(), torch.tensor([[3, 1, 3, 8, 0, 1], [2, 2, 7, 3, 5, 4]])
    probs, chosen = moe.router(x, token_ids=ids.t())
    for row, logits, weights in zip(ids.t().flatten(), moe.router._logits(x).flatten(0, 1), probs,
                                    strict=True):  # fmt: skip
        scores = logits.sigmoid()[table[row]]
        expected = torch.zeros(E).scatter(0, table[row], scores / scores.sum())
        assert_close(weights, expected, FP32_REORDERED_SUM, "weights")
    assert chosen.sum() == ids.numel() * K
    with pytest.raises(RuntimeError, match="pass input_ids"):
        moe(x)
    output, _ = moe(x, token_ids=ids)
    again, _ = moe(x.roll(1, 0), token_ids=ids.roll(1, 1))
    assert_close(again.roll(-1, 0), output, FP32_REORDERED_SUM, "output")


def test_hash_layers_have_tables_of_their_own():
    first = layer(moe_n_hash_layers=2, unpadded_vocab_size=50)
    table = first.router.token_experts
    first.set_layer_number(2)
    assert not torch.equal(table, first.router.token_experts)
    assert layer(moe_n_hash_layers=0, unpadded_vocab_size=50).router.token_experts is None


@pytest.mark.parametrize("latent", [None, 10])
def test_the_layer_is_a_weighted_sum_of_the_experts_of_each_token(latent):
    moe, x, y = layer(moe_latent_size=latent), tokens(), tokens()
    output, expected = moe(x)[0], by_hand(moe, y)
    assert_close(output, expected, FP32_REORDERED_SUM, "moe")
    weights = list(moe.parameters())
    given = torch.autograd.grad(output.square().sum(), (x, *weights))
    wanted = torch.autograd.grad(expected.square().sum(), (y, *weights), materialize_grads=True)
    for gradient, reference in zip(given, wanted, strict=True):
        assert_close(gradient, reference, FP32_REORDERED_SUM, "gradient")


@pytest.mark.parametrize(("dispatcher", "latent"), [("allgather", None), ("alltoall", 10)])
def test_grouped_experts_equal_those_one_by_one(dispatcher, latent):
    one_by_one = layer(moe_latent_size=latent)
    grouped = layer(
        moe_grouped_gemm=True, moe_token_dispatcher_type=dispatcher, moe_latent_size=latent
    )
    names = canonical_names(grouped)
    reference = dict(one_by_one.named_parameters())
    for local, parameter in grouped.named_parameters():
        parameter.data.copy_(reference[names[local]].data)
    x, y = tokens(), tokens()
    one_by_one(x)[0].square().sum().backward()
    grouped(y)[0].square().sum().backward()
    assert_close(y.grad, x.grad, FP32_REORDERED_SUM, "moe")
    for local, parameter in grouped.named_parameters():
        assert_close(parameter.grad, reference[names[local]].grad, FP32_REORDERED_SUM, "moe")


def test_rows_that_only_a_device_has_counted_give_the_same_and_the_host_never_asks(monkeypatch):
    """As on an accelerator, whose counts come to the host by a wait alone."""
    options = {"moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
    usual, counted = layer(**options), layer(**options)
    x, y = tokens(), tokens()
    usual(x)[0].square().sum().backward()
    monkeypatch.setattr(token_dispatcher, "is_host_memory", lambda device: False)
    kernels = {"cpu": (Kernel("torch-grouped-mm", torch_grouped_mm),)}
    with (
        mock.patch.dict(GROUPED_PRODUCTS.kernels, kernels),
        mock.patch.dict(GROUPED_PRODUCTS.chosen, clear=True),
        mock.patch.object(Tensor, "tolist", side_effect=AssertionError("the host waited")),
    ):
        counted(y)[0].square().sum().backward()
    assert_close(y.grad, x.grad, FP32_REORDERED_SUM, "input")
    reference = dict(usual.named_parameters())
    for name, parameter in counted.named_parameters():
        assert_close(parameter.grad, reference[name].grad, FP32_REORDERED_SUM, name)


def test_both_forms_begin_with_the_same_weights_and_share_a_checkpoint():
    forms = [layer(moe_grouped_gemm=grouped, add_bias_linear=False) for grouped in (False, True)]
    held = [
        {
            (s.key, s.global_offset, s.global_shape): s.data
            for s in m.sharded_state_dict("mlp.").values()
        }
        for m in forms
    ]
    assert held[0].keys() == held[1].keys()
    assert all(held[0][place].equal(held[1][place]) for place in held[0])
    keys = {key for key, _, _ in held[0]}
    assert "mlp.experts.experts.linear_fc1.weight" in keys
    assert (E, 48, H) in {shape for _, _, shape in held[0]}


def test_experts_of_a_rank_are_those_of_the_whole_model():
    whole = dict(layer().named_parameters())
    second = layer(fake_groups(ep=(1, 2)), expert_model_parallel_size=2)
    names = canonical_names(second)
    assert len(second.experts.local_experts) == 2
    for local, parameter in second.experts.named_parameters():
        name = names[f"experts.{local}"]
        assert "local_experts.2" in name or "local_experts.3" in name
        if "weight" in local:
            assert parameter.equal(whole[name])


def test_padding_visits_no_expert_and_changes_no_other_token():
    moe, x = layer(add_bias_linear=False), tokens()
    mask = torch.zeros(2, 6, dtype=torch.bool)
    mask[1, 4:] = True
    out, plain = moe(x, padding_mask=mask)[0], moe(x)[0]
    assert out[4:, 1].eq(0).all()
    assert_close(out[:4], plain[:4], FP32_REORDERED_SUM, "moe")


def test_side_losses_are_weighted_like_the_micro_batch_and_leave_the_output_alone():
    grads = {}
    for factor in (1.0, 0.25):
        with within_step(aux_loss_scale=AuxLossScale(factor)):
            moe = layer(moe_aux_loss_coeff=0.1, moe_z_loss_coeff=0.01)
            out = moe(tokens())[0]
            (out * 0).sum().backward()
            grads[factor] = moe.router.weight.grad
    assert grads[1.0].abs().max() > 0
    assert_close(grads[0.25], grads[1.0] / 4, FP32_REORDERED_SUM, "moe")


def test_the_bias_moves_towards_experts_with_too_few_visits():
    moe = layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    moe(tokens())[0].sum().backward()
    finish_router_step([moe], ProcessGroupCollection.single())
    assignments = moe.router.load.step_assignments
    assert int(assignments.sum()) == 6 * 2 * K
    assert moe.router.expert_bias.equal(1e-3 * torch.sign(assignments.mean() - assignments).float())
    assert "router.expert_bias" in moe.sharded_state_dict()


def test_the_bias_stays_fp32_in_a_half_precision_model():
    moe = layer(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True)
    moe.router.expert_bias.fill_(1.0 + 2.0**-20)
    moe.to(torch.bfloat16)
    assert moe.router.weight.dtype == torch.bfloat16
    assert moe.router.expert_bias.dtype == torch.float32
    assert moe.router.expert_bias.eq(1.0 + 2.0**-20).all()


RECOMPUTES = [
    {"moe_layer_recompute": True},
    {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
    *(
        {
            "recompute_granularity": "selective",
            "recompute_modules": ["moe_act", "shared_experts"],
            "moe_grouped_gemm": is_grouped,
        }
        for is_grouped in (False, True)
    ),
]


@pytest.mark.parametrize("options", RECOMPUTES)
def test_recomputation_counts_each_visit_once_and_changes_no_gradient(options):
    fields = {"moe_aux_loss_coeff": 0.1, "moe_shared_expert_intermediate_size": 8}
    fields["moe_grouped_gemm"] = options.get("moe_grouped_gemm", False)
    plain, again = layer(**fields), layer(**fields | options)
    for moe in (plain, again):
        moe(tokens())[0].square().sum().backward()
        finish_router_step([moe], ProcessGroupCollection.single())
    assert again.router.load.step_assignments.equal(plain.router.load.step_assignments)
    for a, b in zip(again.parameters(), plain.parameters(), strict=True):
        assert_close(a.grad, b.grad, FP32_REORDERED_SUM, "moe")


def test_forced_balance_spreads_tokens_whatever_the_router_says():
    moe = layer(moe_router_force_load_balancing=True)
    torch.nn.init.zeros_(moe.router.weight)
    moe(tokens(s=400))[0].sum().backward()
    finish_router_step([moe], ProcessGroupCollection.single())
    summary = LoadSummary.of(moe.router.load)
    assert 0.8 < summary.lowest <= summary.median <= summary.p90 <= summary.highest < 1.2


def test_a_router_that_meets_what_is_not_finite_is_named():
    groups = ProcessGroupCollection.single()
    moe, x = layer(), tokens()
    moe.set_layer_number(7)
    moe(x)[0].sum().backward()
    finish_router_step([moe], groups)
    assert first_bad_router([moe], groups) == ""
    with torch.no_grad():
        moe.router.weight[1, 2] = float("nan")
    moe(x)[0].sum().backward()
    finish_router_step([moe], groups)
    assert "The router of layer 7 is the first" in first_bad_router([moe], groups)


@pytest.mark.parametrize("grouped", [False, True])
def test_inputs_padded_to_the_capacity_have_one_length_and_change_nothing(grouped, monkeypatch):
    options = {"moe_expert_capacity_factor": 0.75, "moe_grouped_gemm": grouped}
    plain, pad_to_capacity = (
        layer(**options),
        layer(**options, moe_pad_expert_input_to_capacity=True),
    )
    pad_to_capacity.load_state_dict(plain.state_dict())
    lengths = []
    compute = pad_to_capacity.experts.forward

    def watch(rows, counts, probs):
        lengths.append(list(counts))
        return compute(rows, counts, probs)

    monkeypatch.setattr(pad_to_capacity.experts, "forward", watch)
    x, y = tokens(s=8), tokens(s=8)
    plain(x)[0].square().sum().backward()
    pad_to_capacity(y)[0].square().sum().backward()
    assert lengths == [[6] * E]  # two sequences, each of 8 * 2 / 4 * 0.75
    assert_close(y.grad, x.grad, FP32_REORDERED_SUM, "gradient of the input")
    for p, q in zip(pad_to_capacity.parameters(), plain.parameters(), strict=True):
        assert_close(p.grad, q.grad, FP32_REORDERED_SUM, "gradient")


class _Products(TorchDispatchMode):
    """Notes the shapes of the operands of products."""

    def __init__(self):
        super().__init__()
        self.shapes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.add(tuple(x.shape for x in args if isinstance(x, Tensor)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grouped", [False, True])
def test_products_of_16_bits_have_few_shapes_however_many_rows_an_expert_gets(grouped, dtype):
    """A CPU compiles each shape anew."""
    one, other = (layer(moe_grouped_gemm=grouped).to(dtype).experts for _ in range(2))
    source = torch.Generator().manual_seed(11)
    x = torch.randn(480, H, generator=source).to(dtype)
    probs = torch.rand(480, generator=source)
    draws = [torch.randint(0, 120, (E,), generator=source).tolist() for _ in range(6)]
    filled, as_they_are = _Products(), _Products()
    for counts in draws:
        rows, shares = (y[: sum(counts)] for y in (x, probs))
        with filled:
            output = one(rows, counts, shares)[0]
            output.square().mean().backward()
        with as_they_are, mock.patch.object(grouped_products, "ROWS_OF_A_TILE", 1):
            expected = other(rows, counts, shares)[0]
            expected.square().mean().backward()
        assert_close(output, expected, BF16_REORDERED_SUM, "output")
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert_close(p.grad, q.grad, BF16_REORDERED_SUM, "gradient")
    assert len(filled.shapes) < len(as_they_are.shapes) / 3


def test_megatrons_scaler_gives_an_attached_loss_its_scale():
    x = torch.ones(3, requires_grad=True)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(4.0))
    out = MoEAuxLossAutoScaler.apply(x * 2, x.square().sum())
    MoEAuxLossAutoScaler.set_loss_scale(1.0)
    out.sum().backward()
    assert x.grad.tolist() == [2.0 + 4.0 * 2.0] * 3
