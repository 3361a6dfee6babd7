"""The benchmark measures what it says, on a model small enough for a test."""

import pytest

from benchmarks.candidates import CANDIDATES, FAMILIES, model_flops, sizes_of
from benchmarks.single_device import Flags, measure, print_breakdown, print_table
from megatron.core.settings.command_line import read_command_line

SMALL = [
    "--sequence", "16", "--vocabulary", "64", "--layers", "1", "--hidden", "32", "--heads", "4",
    "--kv-heads", "2", "--ffn", "48", "--rounds", "1",
]  # fmt: skip


def test_flops_are_those_counted_by_hand():
    gpt2 = sizes_of("gpt2", num_layers=1, hidden_size=8, num_heads=2, ffn_size=32, vocab_size=10,
                    num_kv_heads=2, sequence=4)  # fmt: skip
    # A token: qkv 8x24, projection 8x8, MLP 2x8x32, head 8x10; the causal half of two 4x8 products.
    forward = 2 * (8 * 24 + 8 * 8 + 2 * 8 * 32) + 2 * 2 * 4 * 8 / 2 + 2 * 8 * 10
    assert model_flops("gpt2", gpt2, batch=3) == 3 * (3 * 4) * forward


@pytest.mark.parametrize("family", FAMILIES)
def test_every_candidate_runs_and_is_reported(family, capsys):
    result = measure(family, "fp32", read_command_line(Flags, SMALL))
    assert set(result["seconds"]) == set(CANDIDATES)
    assert all(seconds > 0 for seconds in result["seconds"].values())
    print_table([result])
    printed = capsys.readouterr().out
    assert all(name in printed for name in CANDIDATES)


def test_the_breakdown_names_operators(capsys):
    options = read_command_line(Flags, [*SMALL, "--only", "lattice", "--rows", "5"])
    print_breakdown("llama", "bf16", options)
    assert "aten::mm" in capsys.readouterr().out
