"""Routing is recorded alike in every layout, and replayed in another."""

import pytest
import torch

from megatron.core.foundation.errors import DataError
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.router_replay import (
    NOT_GIVEN,
    RouterReplay,
    RouterReplayAction,
    record_routing,
    replay_routing,
)
from megatron.post_training.log_probs import compute_log_probs
from tests.harness.distributed import run_distributed
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.log_probs import sizes_of
from tests.parity.training_case import SEED, build_chunks, global_batch, transformer_config

MODEL = ModelCase("llama", False, 0.0, experts="deepseek", later_tokens=1)
LAYOUTS = (
    LayoutCase(tp=2, sp=True, cp=2, ep=4),
    LayoutCase(pp=2, vp=2, cp=2, ep=2),
    LayoutCase(pp=4, schedule="zb-h1"),
)
ROWS = (1, 2, 1)


def batches():
    batch = global_batch(0, sum(ROWS))
    return [
        {"tokens": tokens, "labels": labels}
        for tokens, labels in zip(
            batch["tokens"].split(ROWS), batch["labels"].split(ROWS), strict=True
        )
    ]


def recorded_and_replayed(groups, layout, given):
    rng_state().set_seed(SEED)
    config = transformer_config(layout, MODEL)
    chunks = build_chunks(config, MODEL, layout, groups)
    with record_routing(chunks) as record:
        own = compute_log_probs(chunks, batches())
    routing = [one[:b] for one, b in zip(record.gather(), ROWS, strict=False)]
    if given is None:
        # Another choice: the experts after those that were chosen.
        given = [torch.where(r < 0, r, (r + 1) % config.num_moe_experts) for r in routing]
    other = compute_log_probs(chunks, batches(), routing=given)
    with record_routing(chunks):
        again = compute_log_probs(chunks, batches())
    assert all(torch.equal(a.log_probs, b.log_probs) for a, b in zip(own, again, strict=True))
    return routing, given, [[one.log_probs for one in part] for part in (own, other)]


def test_what_one_layout_records_another_replays():
    ((expected, given, (own, other)),) = run_distributed(
        recorded_and_replayed, 1, LayoutCase(), None
    )
    assert (torch.cat(own) - torch.cat(other)).abs().max() > 1e-3
    assert (expected[0][:, :, 0] == NOT_GIVEN).all()  # a dense layer
    for layout in LAYOUTS:
        for routing, _, found in run_distributed(
            recorded_and_replayed, 4, layout, given, **sizes_of(layout)
        ):
            for mine, theirs in zip(routing, expected, strict=True):
                assert torch.equal(mine.sort(-1).values, theirs.sort(-1).values), str(layout)
            for mine, theirs, what in zip(found, (own, other), ("own", "given"), strict=True):
                assert_close(torch.cat(mine), torch.cat(theirs), FP32_REORDERED_SUM, what)


def test_the_routing_of_another_model_is_refused():
    layout = LayoutCase()
    (chunk,) = build_chunks(
        transformer_config(layout, MODEL), MODEL, layout, ProcessGroupCollection.single()
    )
    for wrong, words in (
        (torch.zeros(1, 4, 3, 2), "shape"),
        (torch.full((1, 4, 4, 2), 4), "experts from 4 to 4"),
    ):
        with pytest.raises(DataError, match=words), replay_routing(chunk, [wrong]):
            pass


def test_the_functions_of_megatron_record_and_replay_what_this_rank_holds():
    layout = LayoutCase()
    rng_state().set_seed(SEED)
    (chunk,) = build_chunks(
        transformer_config(layout, MODEL), MODEL, layout, ProcessGroupCollection.single()
    )
    batch = batches()[1]
    mine = [r.router_replay for r in chunk.modules() if hasattr(r, "router_replay")]
    assert all(one in RouterReplay.global_router_replay_instances for one in mine)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    own = chunk(batch["tokens"], None, None)
    recorded = [one.get_recorded_indices() for one in mine]
    assert recorded[0].shape == (batch["tokens"].numel(), 2)
    RouterReplay.clear_global_indices()
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for one, indices in zip(mine, recorded, strict=True):
        one.set_target_indices((indices + 1) % 4 if one is mine[0] else indices)
    other = chunk(batch["tokens"], None, None)
    RouterReplay.clear_global_router_replay_action()
    RouterReplay.clear_global_indices()
    assert not torch.equal(own, other)
    assert torch.equal(chunk(batch["tokens"], None, None), own)
