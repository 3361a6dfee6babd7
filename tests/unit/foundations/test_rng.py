"""Random numbers keyed by purpose, not by rank."""

import pytest
import torch

from megatron.core.parameters.keyed_draws import keyed_attention_keep_mask, keyed_dropout
from megatron.core.parameters.rng import derive_seed, rng_state
from megatron.core.step_context.context import within_step
from megatron.core.step_context.random_scope import SequenceShard


@pytest.fixture(autouse=True, params=["by-blocks", "by-counter"])
def fresh_state(request):
    """Every claim holds for the numbers of the CPU and for those of accelerators."""
    state = rng_state()
    state.counts_on_cpu = request.param == "by-counter"
    state.set_seed(7)
    state.begin_step(0, micro_batch_size=2, dp_rank=0, dp_size=1)
    yield
    state.counts_on_cpu = False
    state.set_seed(1234)
    state.begin_step(0, micro_batch_size=1, dp_rank=0, dp_size=1)


def drop(x, rows, *path):
    with rng_state().in_scope(*path, rows=rows):
        return keyed_dropout(x, 0.5)


def test_seeds_tell_ints_from_strings_and_do_not_depend_on_the_process():
    assert derive_seed(1, "a") != derive_seed("1", "a")
    assert derive_seed(1234, "decoder", 3) == 8000189298532497770


@pytest.mark.parametrize(("total", "size"), [(32, 4), (64, 8), (24, 3), (30, 5)])
def test_a_sequence_shard_drops_what_the_whole_drops(total, size):
    x = torch.ones(total, 2, 3)
    rows = SequenceShard.full(total)
    full = drop(x, rows, "decoder", 1)
    for rank in range(size):
        piece = x.chunk(size)[rank]
        assert torch.equal(drop(piece, rows.shard(rank, size), "decoder", 1),
                           full.chunk(size)[rank])  # fmt: skip


def test_zigzag_rows_drop_what_the_whole_drops():
    x = torch.ones(32, 1, 4)
    full = drop(x, SequenceShard.full(32), "decoder", 1)
    rows = SequenceShard(((0, 8), (24, 32)), 32)
    piece = drop(x[:16], rows, "decoder", 1)
    assert torch.equal(piece, torch.cat([full[:8], full[24:]]))
    assert torch.equal(drop(x[:8], rows.shard(1, 2), "decoder", 1), full[24:])


def test_data_parallel_rank_and_micro_batch_size_do_not_matter():
    x = torch.ones(8, 4, 3)
    state = rng_state()
    state.begin_step(100, micro_batch_size=4, dp_rank=0, dp_size=1)
    full = drop(x, None, "decoder", 1)
    for microbatch in range(2):
        for dp_rank in range(2):
            state.begin_step(100, micro_batch_size=1, dp_rank=dp_rank, dp_size=2)
            state.set_microbatch(microbatch)
            sample = microbatch * 2 + dp_rank
            assert torch.equal(drop(x[:, :1], None, "decoder", 1), full[:, sample : sample + 1])


def test_layers_calls_samples_and_seeds_draw_differently():
    x = torch.ones(16, 1, 16)
    first = drop(x, None, "decoder", 1)
    assert not torch.equal(first, drop(x, None, "decoder", 2))
    with rng_state().in_scope("decoder", 1):
        assert torch.equal(keyed_dropout(x, 0.5), first)
        assert not torch.equal(keyed_dropout(x, 0.5), first)
    rng_state().set_microbatch(1)
    assert not torch.equal(first, drop(x, None, "decoder", 1))


def test_recomputation_draws_again_from_the_remembered_scope():
    x = torch.ones(16, 2, 4)
    with rng_state().in_scope("decoder", 5):
        scope = rng_state().scope
        first = keyed_dropout(x, 0.3)
    rng_state().set_microbatch(3)
    with within_step(random_scope=scope):
        assert torch.equal(keyed_dropout(x, 0.3), first)
    assert rng_state().first_sample == 6


def test_heads_of_a_shard_drop_what_the_whole_drops():
    def mask(heads, first_head):
        with rng_state().in_scope("decoder", 1):
            return keyed_attention_keep_mask(
                (2, heads, 16, 16), 0.9, first_head=first_head,
                dtype=torch.float32, device=torch.device("cpu"),
            )  # fmt: skip

    full = mask(4, 0)
    assert torch.equal(mask(2, 2), full[:, 2:])


def test_the_kept_share_and_the_mean_are_right():
    x = torch.ones(64, 4, 512)
    y = drop(x, None, "decoder", 9)
    kept = (y != 0).float().mean().item()
    # 131,072 draws with p = 0.5: five standard deviations are 0.007.
    assert abs(kept - 0.5) < 0.007
    assert set(y.unique().tolist()) == {0.0, 2.0}
