"""Numbers that are a function of their place."""

import pytest
import torch

from megatron.core.kernels.attention_options import AttentionOptions
from megatron.core.kernels.block_mask import MaskSpec
from megatron.core.kernels.blockwise_attention import blockwise_attention
from megatron.core.kernels.torch_attention import cpu_block_attention, unfused
from megatron.core.parameters import counter_random
from megatron.core.parameters.counter_random import (
    keep_threshold,
    keyed_word_blocks,
    keyed_words,
    philox,
    unit_interval,
)
from megatron.core.parameters.keyed_draws import AttentionKeepMask, keyed_keep_mask, keyed_uniform
from megatron.core.parameters.rng import rng_state
from megatron.core.step_context.random_scope import SequenceShard
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

ALL_ONES = 0xFFFFFFFF
SEED = 0x123456789ABCDEF


@pytest.fixture
def counting():
    rng_state().counts_on_cpu = True
    yield
    rng_state().counts_on_cpu = False


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_philox_gives_the_known_answers_of_its_authors(counter, key, words):
    found = philox(tuple(torch.tensor(word) for word in counter), key)
    assert tuple(int(word) for word in found) == words


def test_a_word_depends_on_its_place_only():
    rows = torch.arange(12)
    whole = keyed_words(SEED, rows, 30, sample=5, head=3)
    assert torch.equal(keyed_words(SEED, rows[7:9], 30, sample=5, head=3), whole[7:9])
    assert torch.equal(keyed_words(SEED, rows, 17, sample=5, head=3), whole[:, :17])
    for other in ({"sample": 6, "head": 3}, {"sample": 5, "head": 2}):
        assert (keyed_words(SEED, rows, 30, **other) != whole).all()
    assert (keyed_words(SEED + 1, rows, 30, sample=5, head=3) != whole).all()
    assert len(whole.unique()) == whole.numel()


def test_blocks_bound_the_memory_and_change_nothing(monkeypatch):
    monkeypatch.setattr(counter_random, "_MAX_ELEMENTS", 70)
    rows = torch.arange(9)
    blocks = list(keyed_word_blocks(SEED, rows, 30, sample=0))
    assert [words.shape for _, words in blocks] == [(2, 30)] * 4 + [(1, 30)]
    assert torch.equal(
        torch.cat([words for _, words in blocks]), keyed_words(SEED, rows, 30, sample=0)
    )


def test_words_are_uniform():
    words = keyed_words(SEED, torch.arange(512), 512, sample=0)
    numbers = unit_interval(words)
    assert numbers.min() >= 0 and numbers.max() < 1
    # 262,144 numbers: five standard deviations of the mean are 0.0028, of a share of 0.1 0.0029.
    assert abs(numbers.mean().item() - 0.5) < 0.0028
    assert abs((words < keep_threshold(0.9)).float().mean().item() - 0.9) < 0.0029
    # Neighbours in both directions: five standard deviations of a correlation are 0.0098.
    for dim in (0, 1):
        pair = torch.stack((numbers.roll(1, dim).flatten(), numbers.flatten()))
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.0098


@pytest.mark.parametrize("keep", [0.0, 0.1, 0.5, 1.0])
def test_a_threshold_is_the_probability_in_words(keep):
    assert keep_threshold(keep) == pytest.approx(keep * 2**32, abs=1)


def test_masks_and_numbers_of_a_shard_are_cut_out_of_the_whole(counting):
    x = torch.empty(16, 3, 2, 5)
    shard = SequenceShard.zigzag(16, 1, 4)
    for draw in (lambda x, rows: _mask(x, rows), keyed_uniform):
        drawn = []
        for part, rows in ((x, SequenceShard.full(16)), (x[:4], shard)):
            with rng_state().in_scope("here"):
                drawn.append(draw(part, rows))
        assert torch.equal(drawn[1], drawn[0][shard.positions()])


def _mask(x, rows):
    with rng_state().in_scope("there", rows=rows):
        return keyed_keep_mask(x, 0.7)


def test_a_keep_mask_follows_the_words(counting):
    with rng_state().in_scope("here"):
        draws = AttentionKeepMask.next(0.75, 21)
    mask = draws.draw(2, 6, SequenceShard.full(8), torch.float32, torch.device("cpu"))
    words = keyed_words(draws.seed, torch.arange(8), 21, sample=draws.first_sample + 2, head=6)
    assert torch.equal(mask, (words < 0.75 * 2**32).float())


@pytest.mark.parametrize("attend", [blockwise_attention, cpu_block_attention])
def test_kernels_by_blocks_drop_what_the_formula_drops(counting, attend):
    torch.manual_seed(0)
    inputs = [torch.randn(37, 2, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
    weight = torch.randn(37, 2, 32)
    results = []
    for run in (attend, unfused):
        with rng_state().in_scope("here"):
            out = run(*inputs, AttentionOptions(0.3, MaskSpec((-1, 0)), dropout=0.4, first_head=4))
        results.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for name, actual, expected in zip(("output", "query", "key", "value"), *results, strict=True):
        assert_close(actual, expected, FP32_REORDERED_SUM, name)
