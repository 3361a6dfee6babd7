"""One wrong bit in one of several copies is found and named; copies that are right pass."""

import re

import pytest
import torch

from megatron.core.distributed.model_parameters import names_in_model
from megatron.core.foundation.errors import ReplicaMismatchError
from megatron.resilience.replica_check import ReplicaCheck
from tests.distributed.checkpointing.gpt_run import Layout, Model, Run
from tests.faults.wrong_numbers import bit_flips
from tests.harness.distributed import run_distributed

FC1, NORM = "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.input_layernorm.weight"
EXPERT = "decoder.layers.2.mlp.experts.local_experts.1.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def flip(tensor):
    """Change the lowest bit of the first element, whose effect no loss shows."""
    view = tensor.detach().view(-1)
    view.view({2: torch.int16, 4: torch.int32}[view.element_size()])[0] ^= 1


def weight(run, name):
    (found,) = (
        (chunk, parameter)
        for chunk in run.chunks
        for local, parameter in chunk.module.named_parameters()
        if names_in_model(chunk.module)[local] == name
    )
    return found


def flip_weight(run, name):
    chunk, parameter = weight(run, name)
    flip(chunk.shards_of(parameter)[0].values if chunk.sharded_values() else parameter)


def flip_shard(run, name):
    """Change what this rank owns first, whatever it is."""
    flip(run.optimizer.shards[0].shard.values)


def flip_state(run, kind):
    item = next(item for item in run.optimizer.shards if item.shard.name == FC1)
    flip(item.main_param if kind == "main" else run.optimizer.state[item.main_param][kind])


def check_before_and_after(groups, layout, model, rank, damage, where, ddp):
    """Return what is raised after a bit of one rank has changed; nothing before."""
    run = Run(groups, layout, model, ddp=ddp)
    run.train(2)
    check = ReplicaCheck(run.chunks, run.optimizer, groups)
    check.compare(2)
    if torch.distributed.get_rank() == rank:
        damage(run, where)
    try:
        check.compare(3)
    except ReplicaMismatchError as error:
        return error.found
    return ""


CASES = [
    (Layout(dp=4), Model(), 2, flip_weight, FC1, r"ranks \[2\] differs from \[0, 1, 3\] \(dp_cp"),
    (Layout(dp=2), Model(), 1, flip_weight, FC1, r"ranks \[\[0\], \[1\]\] \(dp_cp"),
    (Layout(dp=2), Model(dtype="bf16"), 1, flip_state, "main", r"fp32 weight .*fc1.* \(dp_cp"),
    (Layout(dp=2), Model(), 0, flip_state, "exp_avg_sq", r"exp_avg_sq .*fc1.* \(dp_cp"),
    (Layout(dp=2, zero=1), Model(), 1, flip_weight, FC1, r"\(dp_cp"),
    # A majority is no proof where the owner of a shard sends it to the others.
    (Layout(dp=4, zero=1), Model(), 1, flip_weight, FC1,
     r"fc1.* differs .*\(dp_cp\); the fault is in the smaller set, or on the rank that owns"),
    (Layout(tp=2, cp=2), Model(), 3, flip_weight, FC1, r"ranks \[\[1\], \[3\]\] \(dp_cp"),
    (Layout(tp=4), Model(), 1, flip_weight, NORM, r"ranks \[1\] differs from \[0, 2, 3\] \(tp"),
    (Layout(tp=2, sp=True), Model(is_llama=False), 1, flip_weight, NORM, r"\(tp"),
    (Layout(pp=2), Model(), 0, flip_weight, EMBEDDING, "weight of the tied embedding .*embd"),
    (Layout(dp=4, ep=2), Model(experts=4), 2, flip_weight, EXPERT, r"\[\[0\], \[2\]\] \(expt_dp"),
    (Layout(dp=4, zero=3), Model(), 3, flip_shard, "", r"\[\[1\], \[3\]\] \(inter_dist_opt"),
    (Layout(dp=2, fsdp2=True), Model(), 1, flip_weight, FC1, None),
]  # fmt: skip


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "model", "rank", "damage", "where", "said"),
    CASES,
    ids=[f"{layout}-{damage.__name__}-{where}" for layout, _, _, damage, where, _ in CASES],
)
def test_one_changed_bit_is_found_on_all_ranks_and_named(layout, model, rank, damage, where, said):
    instances = 2 if layout.zero == 3 else 1
    results = run_distributed(
        check_before_and_after, layout.size, layout, model, rank, damage, where,
        {"num_distributed_optimizer_instances": instances},
        **layout.axes(), num_distributed_optimizer_instances=instances,
    )  # fmt: skip
    assert all(found == results[0] for found in results)
    if said is None:  # a part that exists once has nothing to be compared with
        assert results[0] == ""
    else:
        assert results[0].startswith("iteration 3: ")
        assert re.search(said, results[0]), results[0]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "model", "kind", "seed"),
    [
        (Layout(dp=4), Model(dtype="bf16"), "gradient", 1),
        (Layout(dp=2, tp=2), Model(dtype="bf16"), "weight", 9),
        (Layout(dp=4), Model(), "exp_avg", 7),
    ],
    ids=["gradient", "weight that an update overwrites", "moment"],
)
def test_a_bit_that_changes_between_comparisons_is_named_at_the_next(layout, model, kind, seed):
    flip = bit_flips.Flip(layout, model, kind, 1, seed)
    results = bit_flips.run_case(flip)
    rank, step = flip.draw()
    assert step < bit_flips.INTERVAL
    assert bit_flips.judge(flip, results) == "noticed", (results[0]["said"], results[rank]["name"])


@pytest.mark.distributed
def test_replicas_never_decide_differently_about_an_update():
    found = run_distributed(make_one_norm_infinite, 2)
    assert all(text == found[0] for text in found)
    assert re.search(r"gradient .* differs between global ranks \[\[0\], \[1\]\]", found[0])
    assert "gradient norm differs" in found[0]


def make_one_norm_infinite(groups):
    """Put an infinity into the reduced gradient of rank 1, where the others would go on."""
    run = Run(groups, Layout(dp=2), Model())
    run.train(1)
    check = ReplicaCheck(run.chunks, run.optimizer, groups)
    run.optimizer.norm_checks.append(lambda norm: check.before_update(norm, 2))
    if torch.distributed.get_rank() == 1:
        run.optimizer.shards[0].shard.gradient.view(-1)[0] = float("inf")
    before = [item.main_param.detach().clone() for item in run.optimizer.shards]
    with pytest.raises(ReplicaMismatchError) as error:
        run.optimizer.step()
    after = [item.main_param for item in run.optimizer.shards]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    return error.value.found
