"""Ranks with different settings end at once, naming flag, ranks and values."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron.core.foundation.errors import ConfigError, MegatronError, TopologyError
from megatron.training.cli.parser import parse_command_line
from megatron.training.rules.settings_agreement import agree_on_settings, comparable


def settings(line: str):
    """Return what a rank launched with this command line brings: settings or its error."""
    try:
        return comparable(parse_command_line(line.split()).config)
    except MegatronError as error:
        return error


def meet(lines: list[str], timeout_s: float = 10.0) -> list[MegatronError | None]:
    """Let one rank per command line agree; return what each of them raised."""
    store = dist.HashStore()

    def one(rank: int) -> MegatronError | None:
        try:
            agree_on_settings(
                store, rank, len(lines), settings(lines[rank]), timeout=timedelta(seconds=timeout_s)
            )
        except MegatronError as error:
            return error
        return None

    with ThreadPoolExecutor(len(lines)) as pool:
        return list(pool.map(one, range(len(lines))))


def test_equal_settings_agree():
    assert meet(["--lr 1 --swiglu", "--swiglu --lr 1.0", "--lr=1e0 --swiglu"]) == [None] * 3


def test_a_different_flag_is_named_on_every_rank_with_ranks_and_values():
    started = time.monotonic()
    found = meet(["--lr 0.001", "--lr 0.002", "--lr 0.001", "--lr 0.002"])
    assert time.monotonic() - started < 10
    assert all(isinstance(error, ConfigError) for error in found)
    for error in found:
        assert "--lr: ranks 1, 3 0.002, rank 0 0.001" in str(error)
        assert error.flags == ("--lr",)


def test_several_differences_are_named_together():
    text = str(meet(["--swiglu", "--lr 1", "--seed 2 --swiglu"])[0])
    assert "--swiglu: rank 1 false, rank 0 true" in text
    assert "--lr: rank 1 1.0, rank 0 null" in text
    assert "--seed: rank 2 2, rank 0 1234" in text


def test_an_invalid_command_line_on_one_rank_stops_all():
    found = meet(["--lr 1", "--lrr 1", "--lr 1"])
    assert "unknown flag --lrr" in str(found[1])
    for rank in (0, 2):
        assert "the command line of rank 1 is invalid" in str(found[rank])
        assert "unknown flag --lrr" in str(found[rank])


def test_an_error_that_all_ranks_share_is_raised_as_it_is():
    found = meet(["--lrr 1", "--lrr 1"])
    assert [str(error) for error in found] == [str(settings("--lrr 1"))] * 2


def test_flags_that_a_launcher_sets_per_rank_may_differ():
    assert meet(["--local-rank 0", "--local-rank 1"]) == [None, None]


def test_a_missing_rank_is_told_after_the_timeout():
    store = dist.HashStore()
    with pytest.raises(TopologyError, match="rank 0 of 2 waited"):
        agree_on_settings(store, 0, 2, settings(""), timeout=timedelta(seconds=0.3))


def test_one_process_needs_no_store():
    agree_on_settings(None, 0, 1, settings("--lr 1"), timeout=timedelta(seconds=1))
    with pytest.raises(ConfigError, match="unknown flag"):
        agree_on_settings(None, 0, 1, settings("--lrr 1"), timeout=timedelta(seconds=1))


@pytest.mark.parametrize("line", ["--lr 1", "--nun-layers 1"])
def test_the_rank_whose_process_may_hold_the_store_leaves_last(line: str):
    """Rank 0's process may end with its error: what the others have not read is then gone."""
    store = dist.HashStore()
    timeout = timedelta(seconds=10)

    class SlowStore:
        """The store as a rank sees it that is far away."""

        def wait(self, keys, timeout):
            store.wait(keys, timeout)
            time.sleep(0.3)

        def __getattr__(self, name):
            return getattr(store, name)

    def first() -> bool:
        with suppress(MegatronError):
            agree_on_settings(store, 0, 2, settings(line), timeout=timeout)
        return other.done() or store.add("settings/num_informed", 0) == 2

    def second() -> None:
        with pytest.raises(MegatronError) if "nun" in line else nullcontext():
            agree_on_settings(SlowStore(), 1, 2, settings(line), timeout=timeout)

    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(second)
        assert pool.submit(first).result()
        other.result()
