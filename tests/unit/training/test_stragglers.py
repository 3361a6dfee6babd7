"""Who is named slow, and who is not, from times with noise."""

import json
import socket
import statistics
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.topology.rank_grid import RankGrid
from megatron.resilience.stragglers import (
    LookForStragglers,
    Straggler,
    StragglerWatch,
    groups_by_stage,
    median_of_others,
    slowest_and_fastest,
)
from megatron.training.config.resolved import ResolvedRun
from megatron.training.hooks.times import StepTimes
from megatron.training.run.state import TrainState
from tests.harness.machine import free_port
from tools import plot_ranks

NUM_RANKS, BLOCK = 8, 5
STAGES = [[0, 1, 2, 3], [4, 5, 6, 7]]
LINKS = {"tp": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}
REPLICAS = [[0, 2], [1, 3], [4, 6], [5, 7]]
COMPUTE, STALLED, QUEUED, DATA, WAITS = "compute", "stalled", "queued", "data", "waits"


def times(source, num_steps=BLOCK, *, slow=None, by=1.0, kind=COMPUTE, noise=0.06):
    """Return steps of 8 ranks; the second stage computes twice as long as the first."""
    shape = (num_steps, NUM_RANKS)
    common = source.lognormal(0.0, 0.5, (num_steps, 1))  # slows down all of them

    def noisy(seconds):
        return seconds * common * source.lognormal(0.0, noise, shape)

    work = noisy(np.repeat([0.1, 0.2], 4))
    stalled, queued, data, waits = noisy(0.1), noisy(0.004), noisy(0.01), noisy(0.02)
    waits += source.exponential(0.05, shape) * (np.arange(NUM_RANKS) % 2)  # the first comes last
    by_kind = {COMPUTE: work, STALLED: stalled, QUEUED: queued, DATA: data, WAITS: waits}
    changed = by_kind[kind]
    if slow is not None:
        ranks = list(slow)
        changed[:, ranks] = changed[:, ranks] * by if kind == COMPUTE else changed[:, ranks] + by
    step = np.full(shape, sum(by_kind.values()).max())
    return dict(step=step, work=work, stalled=stalled, queued=queued, data=data, tp=waits)


def joined(*blocks):
    """Return the steps of several blocks as one."""
    return {part: np.concatenate([block[part] for block in blocks]) for part in blocks[0]}


def named(watch, blocks):
    """Return what is named at which check."""
    return {
        check: begins for check, block in enumerate(blocks, 1) if (begins := watch.add(block)[0])
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_slower_by_a_third_is_named_within_twenty_steps_and_no_other(seed):
    source = np.random.default_rng(seed)
    watch, slow = StragglerWatch(STAGES, REPLICAS, LINKS), int(source.integers(NUM_RANKS))
    before = [times(source) for _ in range(4)]
    assert named(watch, before) == {}
    found = named(watch, [times(source, slow=[slow], by=1.3) for _ in range(4)])
    ((check, (finding,)),) = found.items()
    assert check * BLOCK <= 20
    assert (finding.kind, finding.ranks) == ("compute", (slow,))
    assert finding.excess == pytest.approx(1.3, rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_nobody_is_named_for_noise(seed):
    source = np.random.default_rng(seed)
    watch = StragglerWatch(STAGES, REPLICAS, LINKS)
    assert named(watch, [times(source, noise=0.1) for _ in range(40)]) == {}


@pytest.mark.parametrize(
    ("kind", "by", "slow", "expected"),
    [
        (COMPUTE, 1.5, [6], "compute"),
        (STALLED, 0.3, [6], "standstill"),
        (QUEUED, 0.3, [6], "processor"),
        (DATA, 0.3, [6], "loader"),
        (WAITS, 0.3, [4, 5], "tp"),
    ],
)
def test_slow_compute_loaders_links_and_lost_processors_are_told_apart(kind, by, slow, expected):
    source = np.random.default_rng(3)
    watch = StragglerWatch(STAGES, REPLICAS, LINKS)
    blocks = [times(source, slow=slow, by=by, kind=kind, noise=0.05) for _ in range(4)]
    ((_, (finding,)),) = named(watch, blocks).items()
    assert (finding.kind, finding.ranks) == (expected, tuple(slow))


def test_where_all_ranks_wait_for_processors_the_longest_wait_is_no_finding():
    source = np.random.default_rng(11)
    watch = StragglerWatch(STAGES, REPLICAS, LINKS)
    everybody = [times(source, slow=range(8), by=0.2, kind=QUEUED) for _ in range(6)]
    for block in everybody:
        block["queued"][:, 6] += 0.4
    assert named(watch, everybody) == {}


def test_one_slow_step_names_nobody_and_recovery_is_told():
    source = np.random.default_rng(5)
    watch = StragglerWatch(STAGES, REPLICAS, LINKS)
    for _ in range(6):
        hiccup = times(source, 1, slow=[1], by=20.0)
        assert watch.add(joined(times(source, BLOCK - 1), hiccup)) == ([], [])
    for _ in range(4):
        watch.add(times(source, slow=[1], by=1.5))
    assert [finding.ranks for finding in watch.named] == [(1,)]
    ends = [end for _ in range(4) for end in watch.add(times(source))[1]]
    assert ends == [Straggler("compute", (1,), 0.0)]
    assert watch.named == []


@pytest.mark.parametrize("first", range(1, BLOCK + 1))
def test_eight_slow_steps_name_nobody_wherever_they_begin(first):
    source = np.random.default_rng(first)
    watch = StragglerWatch(STAGES, REPLICAS, LINKS)
    steps = [times(source, 1) for _ in range(30)]
    steps[9 + first : 17 + first] = [times(source, 1, slow=[1], by=1.3) for _ in range(8)]
    blocks = [joined(*steps[at : at + BLOCK]) for at in range(0, 30, BLOCK)]
    assert named(watch, blocks) == {}


def test_ranks_without_peers_are_not_judged():
    source = np.random.default_rng(7)
    watch = StragglerWatch([[rank] for rank in range(NUM_RANKS)], [], {})
    assert named(watch, [times(source, slow=[2], by=9.0) for _ in range(6)]) == {}


@pytest.mark.parametrize("num", [2, 3, 4, 7])
def test_the_median_of_the_others_is_that(num):
    x = np.random.default_rng(num).integers(0, 5, (6, num)).astype(float)
    expected = [[statistics.median([*row[:i], *row[i + 1 :]]) for i in range(num)] for row in x]
    assert median_of_others(x).tolist() == expected


def test_the_picture_shows_who_was_slow_when(tmp_path):
    names = ("work", "communication", "bubble", "data", "queued")
    lines = [
        {"iteration": step, "slow-ranks": [1] * (step > 10)}
        | {f"{name}-s-by-rank": [0.1, 0.13] for name in names}
        for step in (5, 10, 15)
    ]
    metrics, out = tmp_path / "metrics.jsonl", tmp_path / "ranks.svg"
    metrics.write_text("".join(json.dumps(line) + "\n" for line in [{"iteration": 1}, *lines]))
    assert plot_ranks.main(["--metrics", str(metrics), "--out", str(out)]) == 0
    assert "named slow" in out.read_text()
    metrics.write_text('{"iteration": 1}\n')
    assert plot_ranks.main(["--metrics", str(metrics), "--out", str(out)]) == 1


def test_the_slowest_are_those_of_their_stage():
    work = [1.0, 1.0, 1.2, 1.0, 2.0, 2.0, 2.0, 1.8]
    slowest, fastest = slowest_and_fastest(work, STAGES, 1)
    assert slowest == [(2, pytest.approx(1.2))]
    assert fastest == [(7, pytest.approx(0.9))]


def test_links_are_compared_with_links_of_the_same_kind_and_stage():
    grid = RankGrid(("tp", "cp", "dp", "pp"), (2, 1, 2, 2))
    assert groups_by_stage(grid, ("tp",)) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert groups_by_stage(grid, ("dp", "cp")) == [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]
    assert groups_by_stage(grid, ("cp",)) == []


def ask(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=10) as answer:
        return answer.read().decode()


def test_a_request_to_the_port_switches_the_search_on_and_off():
    settings = {"log_straggler": True, "disable_straggler_on_startup": True, "log_interval": 10}
    port = free_port()
    run = ResolvedRun().overlaid({**settings, "straggler_ctrlr_port": port})
    times = SimpleNamespace(
        last=StepTimes(step_s=1.0, communication_s=0.0, bubble_s=0.0, data_s=0.0, cpu_s=1.0)
    )
    written, lines = [], []
    scalars = SimpleNamespace(
        write=lambda numbers, step: None, write_by_rank=lambda numbers, step: written.append(step)
    )
    context = SimpleNamespace(run=run, groups=ProcessGroupCollection())
    hook = LookForStragglers(context, times, scalars, lines.append)
    result = SimpleNamespace(read=lambda: SimpleNamespace(was_skipped=False))
    hook.before_training(TrainState())
    try:
        for step in range(1, 31):
            hook.after_step(TrainState(iteration=step), result)
            if step in (10, 20):
                assert ("on" in ask(port)) == (step == 10)
    finally:
        hook.close()
    assert written == [15, 20]
    (report,) = lines
    assert "slowest to compute: rank 0 (1000.0 ms, 1.00 of its stage)" in report


def test_a_port_that_is_taken_ends_no_run(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        run = ResolvedRun().overlaid({"straggler_ctrlr_port": taken.getsockname()[1]})
        context = SimpleNamespace(run=run, groups=ProcessGroupCollection())
        hook = LookForStragglers(context, None, None, print)
        hook.before_training(TrainState())
        hook.close()
    assert "cannot be switched" in capsys.readouterr().out
