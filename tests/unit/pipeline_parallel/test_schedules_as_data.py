"""Orders, lowering, proof and simulation of pipeline programs: pure integers."""

import dataclasses

import pytest

from megatron.core.foundation.errors import ScheduleError
from megatron.core.pipeline_parallel.instructions import (
    COMPUTE_OPS,
    Op,
    Orders,
    Placement,
    PlacementShape,
    Step,
)
from megatron.core.pipeline_parallel.lower import lower, lower_rank
from megatron.core.pipeline_parallel.schedule import StepPlan
from megatron.core.pipeline_parallel.schedule_definitions.dualpipe_v import dualpipe_v_orders
from megatron.core.pipeline_parallel.schedule_definitions.gpipe import gpipe_orders
from megatron.core.pipeline_parallel.schedule_definitions.interleaved import (
    interleaved_order,
    interleaved_orders,
    microbatch_groups,
)
from megatron.core.pipeline_parallel.schedule_definitions.one_f_one_b import (
    one_f_one_b_order,
    one_f_one_b_orders,
)
from megatron.core.pipeline_parallel.simulate import (
    ChannelModel,
    Costs,
    Span,
    report,
    simulate,
    walk,
)
from megatron.core.pipeline_parallel.step_plan import (
    plan_report,
    rank_program,
    validated_orders,
)
from megatron.core.pipeline_parallel.validate import validate
from tests.parity.schedules import SCHEDULES, CorpusStats, cases, check


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_programs_never_deadlock_and_have_the_textbook_bubble(name, p):
    """A subset of `python -m tests.parity.schedules`."""
    tally = CorpusStats()
    for v, m in cases(name, p, max_v=4, max_m=17):
        if m <= 5 or m % p in (0, 1, p - 1):
            for prefetch in (0, 1):
                check(name, p, v, m, prefetch, tally)
    assert tally.problems == []
    assert tally.num_programs > 0


@pytest.mark.parametrize(
    ("p", "m", "group", "sizes"),
    [
        (4, 8, None, [4, 4]),
        (4, 9, None, [5, 4]),
        (4, 11, None, [6, 5]),
        (4, 3, None, [3]),
        (4, 14, 5, [5, 5, 4]),
        (4, 12, 5, [6, 6]),
        (2, 64, 64, [64]),
    ],
)
def test_a_remainder_too_small_for_the_pipeline_is_dealt_over_the_groups(p, m, group, sizes):
    groups = microbatch_groups(p, m, group)
    assert [len(g) for g in groups] == sizes
    assert [i for g in groups for i in g] == list(range(m))


def test_a_group_smaller_than_the_pipeline_is_refused():
    with pytest.raises(ScheduleError, match="group of 3 is too small for 4"):
        interleaved_order(4, 0, 8, 2, group_size=3)


@pytest.mark.parametrize("orders", [one_f_one_b_orders, dualpipe_v_orders])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 4), (2, 2), (2, 4), (4, 5), (4, 8), (8, 19)])
def test_pairs_finish_and_cost_no_more_than_their_place_in_the_pipeline(orders, p, m):
    if orders is dualpipe_v_orders and m < 2 * p:
        return
    combined = lower(orders(p, m, overlap_f_b=True))
    validate(combined)
    found = simulate(combined, forward=1.0, backward=2.0).makespan
    plain = simulate(lower(orders(p, m)), forward=1.0, backward=2.0).makespan
    # In a V a chunk's output waits for the backward beside it, once on the way along the ranks.
    assert found == plain + (p - 1 if orders is dualpipe_v_orders else 0)
    for rank, steps in enumerate(combined.ranks):
        for at, step in enumerate(steps):
            if step.op is Op.OVERLAP_F_B:
                one, two = steps[at + 1 : at + 3]
                assert (one.op, two.op) == (Op.FORWARD, Op.BACKWARD), rank
                assert one.microbatch > two.microbatch


@pytest.mark.parametrize(("p", "v", "group"), [(1, 2, None), (2, 2, 3), (4, 2, None), (4, 3, 8)])
def test_what_an_interleaved_pair_hides_shortens_all_but_the_warm_up(p, v, group):
    for m in (p, 3 * p, 5 * p):
        program = lower(interleaved_orders(p, m, v, group, overlap_f_b=True))
        first_group = len(microbatch_groups(p, m, group)[0])
        alone = min((v - 1) * first_group + 1, m * v)  # forwards of the last rank before a pair
        found = simulate(program, backward=2.0, pair=2.5)
        assert found.makespan == 3.0 * (p - 1 + alone) + 2.5 * (m * v - alone)
        num_pairs = [sum(step.op is Op.OVERLAP_F_B for step in steps) for steps in program.ranks]
        assert num_pairs == [max(m * v - alone - 2 * (p - 1 - r), 0) for r in range(p)]


def test_a_backward_beside_its_own_forward_is_refused():
    plain = interleaved_orders(2, 4, 2)  # one forward less ahead than pairs need
    pairs = interleaved_orders(2, 4, 2, overlap_f_b=True).pairs
    orders = dataclasses.replace(plain, pairs=lambda rank: [at - 1 for at in pairs(rank)])
    with pytest.raises(ScheduleError, match=r"rank 1: B0\.1 is combined with its own forward"):
        validate(lower(orders))


def test_a_pair_is_a_forward_and_a_whole_backward():
    plain = one_f_one_b_orders(1, 4)
    orders = dataclasses.replace(plain, pairs=lambda rank: [1])
    with pytest.raises(ScheduleError, match="overlap-f-b has no forward and backward after it"):
        validate(lower(orders))


@pytest.mark.parametrize("p", [1, 2, 3, 8])
@pytest.mark.parametrize("m", [1, 4, 17])
def test_what_a_pair_hides_shortens_every_micro_batch_but_one(p, m):
    found = simulate(lower(one_f_one_b_orders(p, m, overlap_f_b=True)), backward=2.0, pair=2.5)
    assert found.makespan == 3.0 * p + 2.5 * (m - 1)
    assert found.busy[-1] == 3.0 + 2.5 * (m - 1)


def test_measured_steps_that_take_turns_are_busy_once():
    forward, backward = Step(Op.FORWARD, 1, 0), Step(Op.BACKWARD, 0, 0)
    spans = [Span(0, forward, 1.0, 3.0), Span(0, backward, 2.0, 5.0), Span(1, forward, 0.0, 4.0)]
    assert report(spans, 2).busy == [4.0, 4.0]


def test_a_slow_stage_and_slow_channels_lengthen_the_makespan():
    program = lower(one_f_one_b_orders(2, 4))
    balanced = simulate(program).makespan
    slow_stage = simulate(program, stage_scale=(1.0, 2.0)).makespan
    assert slow_stage == 1 + 4 * 6 + 2  # the slow stage never waits after its first input
    assert simulate(program, transfer=0.5).makespan > balanced


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_receives_are_posted_the_asked_number_of_steps_ahead(prefetch):
    steps = lower_rank(one_f_one_b_orders(4, 8), 1, prefetch=prefetch)
    posted, computed = {}, {}
    count = 0
    for step in steps:
        if step.op in COMPUTE_OPS:
            computed[step.op, step.microbatch] = count
            count += 1
        elif step.op in (Op.RECV_ACTIVATION, Op.RECV_GRADIENT):
            posted[step.op, step.microbatch] = count
    for (op, microbatch), when in posted.items():
        user = Op.FORWARD if op is Op.RECV_ACTIVATION else Op.BACKWARD
        ahead = computed[user, microbatch] - when
        assert ahead == min(prefetch, computed[user, microbatch])


def test_gradients_are_released_only_for_the_last_backward_of_a_chunk():
    for rank in range(2):
        steps = lower_rank(interleaved_orders(2, 4, 2), rank)
        for chunk in range(2):
            release = steps.index(Step(Op.GRAD_SYNC, 3, chunk))
            later = [s for s in steps[release:] if s.op is Op.BACKWARD and s.chunk == chunk]
            assert later == [Step(Op.BACKWARD, 3, chunk)]


def test_delayed_releases_start_at_the_same_moment_on_all_ranks():
    orders = interleaved_orders(4, 8, 2)
    program = lower(orders, delayed_grad_sync=True)
    validate(program)
    for rank, steps in enumerate(program.ranks):
        backwards = 0
        for step in steps:
            backwards += step.op is Op.BACKWARD
            if step == Step(Op.GRAD_SYNC, -1, 1):  # chunk 1 ends after 4 + 4 + 4 backwards
                assert backwards == 12 + rank


def test_parameters_are_gathered_one_chunk_ahead():
    steps = lower_rank(interleaved_orders(2, 4, 3), 0)
    gathers = [s.chunk for s in steps if s.op is Op.PARAM_GATHER]
    assert gathers == [0, 1, 2]
    for chunk in (1, 2):
        asked = steps.index(Step(Op.PARAM_GATHER, -1, chunk))
        assert asked < steps.index(Step(Op.FORWARD, 0, chunk - 1))


def test_a_pipeline_of_one_rank_neither_sends_nor_receives():
    steps = lower_rank(one_f_one_b_orders(1, 3), 0)
    assert {s.op for s in steps} == {Op.FORWARD, Op.BACKWARD, Op.PARAM_GATHER, Op.GRAD_SYNC}


def swapped(program, rank, first, second):
    """Return the program with two steps of a rank exchanged."""
    steps = list(program.ranks[rank])
    i, j = steps.index(first), steps.index(second)
    steps[i], steps[j] = steps[j], steps[i]
    return with_rank(program, rank, steps)


def with_rank(program, rank, steps):
    ranks = list(program.ranks)
    ranks[rank] = tuple(steps)
    return dataclasses.replace(program, ranks=tuple(ranks))


def without(program, rank, *removed):
    return with_rank(program, rank, [s for s in program.ranks[rank] if s not in removed])


BASE = lower(one_f_one_b_orders(3, 4))
F, B = Op.FORWARD, Op.BACKWARD
BROKEN = [
    (
        "a backward before its forward",
        swapped(BASE, 2, Step(F, 1, 0), Step(B, 1, 0)),
        "is before",
    ),
    ("a missing backward", without(BASE, 0, Step(B, 3, 0)), "B3 is missing"),
    ("a forward twice", with_rank(BASE, 0, [*BASE.ranks[0], Step(F, 0, 0)]), "appears twice"),
    ("a missing receive", without(BASE, 1, Step(Op.RECV_ACTIVATION, 2, 0)), "has no receive"),
    (
        "a missing send",
        without(BASE, 0, Step(Op.SEND_ACTIVATION, 3, 0), Step(Op.FREE_OUTPUT, 3, 0)),
        "sender gives nothing",
    ),
    ("a missing free", without(BASE, 1, Step(Op.FREE_GRADIENT, 3, 0)), "free-grad3 is missing"),
    (
        "receives in another order than sends",
        swapped(
            lower(gpipe_orders(3, 4), prefetch=4),
            1,
            Step(Op.RECV_ACTIVATION, 2, 0),
            Step(Op.RECV_ACTIVATION, 3, 0),
        ),
        "message 2 from rank 0 to rank 1: the sender gives recv-act2, the receiver takes recv-act3",
    ),
    (
        "a micro batch too many",
        with_rank(BASE, 0, [*BASE.ranks[0], Step(F, 4, 0)]),
        "does not exist",
    ),
    (
        "gradients that are never released",
        without(BASE, 1, Step(Op.GRAD_SYNC, 3, 0)),
        "grad-sync is missing",
    ),
    (
        "gradients released before they are complete",
        swapped(BASE, 1, Step(Op.GRAD_SYNC, 3, 0), Step(B, 2, 0)),
        "before they are complete",
    ),
]


@pytest.mark.parametrize(
    ("program", "message"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN]
)
def test_a_broken_program_is_refused_with_the_failing_cell_in_the_grid(program, message):
    with pytest.raises(ScheduleError, match=message) as failure:
        validate(program)
    text = str(failure.value)
    assert "rank  0 |" in text
    assert "[" in text.split("rank  0 |", 1)[1]


def test_orders_that_wait_for_each_other_are_refused_and_every_stuck_cell_is_shown():
    # Rank 1 wants its first gradient before it does the second forward, for which rank 2 waits.
    def order(rank):
        return one_f_one_b_order(4, 3 if rank == 1 else rank, 4)

    orders = Orders("mixed", Placement(4), 4, False, order)
    with pytest.raises(ScheduleError, match="never runs with buffered channels") as failure:
        validate(lower(orders))
    assert str(failure.value).count("[") == 4


def test_unbounded_sends_are_refused():
    program = dataclasses.replace(lower(gpipe_orders(2, 8), send_window=5), send_window=2)
    with pytest.raises(ScheduleError, match="unfinished send number 3"):
        validate(program)


def test_interleaved_with_one_unfinished_send_deadlocks_only_without_buffering():
    """The reason for the send window: two ranks wait for each other's next receive."""
    program = lower(interleaved_orders(2, 4, 2), prefetch=0, send_window=1)
    assert not walk(program, Costs()).blocked
    assert walk(program, Costs(), ChannelModel.RENDEZVOUS).blocked
    with pytest.raises(ScheduleError, match="rendezvous"):
        validate(program)


def split_backward_orders(p: int, m: int) -> Orders:
    """1F1B with every backward split: room for zero-bubble schedules."""

    def order(rank: int) -> list[Step]:
        steps = []
        for op, microbatch, chunk in one_f_one_b_order(p, rank, m):
            if op is Op.BACKWARD:
                steps += [Step(Op.INPUT_GRAD, microbatch, chunk)]
                steps += [Step(Op.WEIGHT_GRAD, microbatch, chunk)]
            else:
                steps.append(Step(op, microbatch, chunk))
        return steps

    return Orders("split", Placement(p), m, False, order)


def test_split_backwards_send_their_gradient_before_the_weight_gradient():
    program = lower(split_backward_orders(4, 8))
    validate(program)
    whole = simulate(lower(one_f_one_b_orders(4, 8)))
    split = simulate(program)
    assert split.makespan < whole.makespan
    assert split.busy == whole.busy


def v_shaped_orders(p: int, m: int) -> Orders:
    """All forwards, then all backwards, over a V: stage p-1 and p are neighbours on one rank."""

    def order(rank: int) -> list[Step]:
        forwards = [Step(Op.FORWARD, i, c) for i in range(m) for c in (0, 1)]
        return forwards + [Step(Op.BACKWARD, i, c) for i in range(m) for c in (1, 0)]

    return Orders("v", Placement(p, 2, PlacementShape.V), m, False, order)


def test_stages_may_turn_back_on_the_last_rank():
    placement = Placement(3, 2, PlacementShape.V)
    assert [placement.location(s) for s in range(6)] == [
        (0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1),
    ]  # fmt: skip
    assert all(placement.stage(*placement.location(s)) == s for s in range(6))
    assert all(placement.stage(*Placement(3, 2).location(s)) is not None for s in range(6))
    program = lower(v_shaped_orders(3, 1))
    validate(program)
    assert simulate(program).makespan == 6 * 3


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (StepPlan("1f1b", 2, 1, 0), "0 micro batches"),
        (StepPlan("zigzag", 2, 1, 4), "'zigzag' is not known"),
        (StepPlan("gpipe", 2, 2, 4), "gpipe schedule with 2 model chunks"),
        (
            StepPlan("zb-h1", 2, 1, 4, overlap_f_b=True),
            "overlapped forwards and backwards in the zb-h1",
        ),
        (StepPlan("1f1b", 4, 2, 8, group_size=2), "group of 2 is too small"),
    ],
)
def test_impossible_plans_are_refused(plan, message):
    with pytest.raises(ScheduleError, match=message):
        validated_orders(plan)


def test_a_large_program_is_checked_by_each_rank_alone():
    plan = StepPlan("1f1b", 64, 4, 512, group_size=64)
    steps = rank_program(plan, 63, False)
    assert len([s for s in steps if s.op in COMPUTE_OPS]) == 2 * 4 * 512


def test_the_report_of_a_plan_names_bubble_and_memory():
    report = plan_report(StepPlan("1f1b", 4, 2, 8))
    assert report.bubble == 3 / 19
    assert report.peak_live_activations == [11, 9, 7, 5]
