"""Losses and gradient norms far above the recent ones: warn, skip, roll back or stop."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

import megatron.training.run.loop as loop
from megatron.core.dist_checkpointing import typed_json
from megatron.core.foundation.errors import SpikeError
from megatron.resilience import spike_guard
from megatron.resilience.spike_guard import (
    Rollback,
    SpikeGuard,
    WarnOfSpikes,
    next_skipped,
    num_rollbacks_at,
)
from megatron.resilience.status import RunStatus
from megatron.training.checkpointing.run_state import (
    CheckpointContext,
    plain_run_state,
    train_state_of,
)
from megatron.training.hooks.base import Hooks
from megatron.training.hooks.stop import ExitInterval, StepBudget
from megatron.training.run.state import RollbackNeeded, StepResult, TrainState


def result(loss: float = 1.0, **changes) -> StepResult:
    fields = {
        "losses": {"lm loss": loss}, "grad_norm": 1.0, "num_zeros": None, "learning_rate": 0.1,
        "decoupled_learning_rate": None, "loss_scale": 1.0, "num_samples": 4,
        "num_microbatches": 2, "was_skipped": False,
    }  # fmt: skip
    return StepResult(**{**fields, **changes})


def test_a_spike_is_told_and_slow_drift_is_not():
    said: list[str] = []
    watch = WarnOfSpikes(said.append)
    for step in range(60):
        watch.after_step(TrainState(iteration=step), result(10 - 0.05 * step + 0.02 * (step % 3)))
    assert said == []
    watch.after_step(TrainState(iteration=61, consumed_train_samples=100), result(30.0))
    assert len(said) == 1
    assert "samples 96 to 99" in said[0]


def test_a_jump_in_the_first_steps_is_told_and_their_fall_is_not():
    said: list[str] = []
    watch = WarnOfSpikes(said.append)
    for step, loss in enumerate((10.8, 10.7, 10.9, 10.2, 9.6, 9.9)):
        watch.after_step(TrainState(iteration=step), result(loss))
    assert said == []
    watch.after_step(TrainState(iteration=6), result(3e36))
    assert len(said) == 1
    assert "lm loss 3.000000E+36" in said[0]


class Guarded:
    """A guard after 20 usual steps, and what it said."""

    def __init__(self, policy: str) -> None:
        self.said: list[str] = []
        self.checks: list = []
        self.guard = SpikeGuard(policy, self.said.append, self.checks)
        self.guard.before_training(TrainState())
        self.state = TrainState()
        for step in range(20):
            assert self.step(1.0 + 0.1 * (step % 3), 2.0) == (None, None)

    def step(self, norm: float, loss: float) -> tuple[str | None, str | None]:
        """Return what is said of the loss and then, if that is usual, of the norm."""
        self.guard.before_step(self.state)
        assert not self.guard.share_losses({"lm loss": loss}, False)
        of_loss = self.guard.judge_losses()
        of_norm = self.checks[0](norm) if of_loss is None else None
        self.state = self.guard.after_step(self.state.advanced(result()), result())
        return of_loss, of_norm


@pytest.mark.parametrize(
    ("norm", "loss", "name"), [(30.0, 2.0, "gradient norm"), (1.0, 60.0, "lm loss")]
)
def test_a_spike_is_answered_before_the_update_as_the_policy_says(norm, loss, name):
    warned = Guarded("warn")
    assert warned.step(norm, loss) == (None, None)
    assert len(warned.said) == 1
    assert f"iteration 21: {name} " in warned.said[0]
    skipped = Guarded("skip")
    before = skipped.state.recent_values[name]
    assert any(reason and reason.startswith(name) for reason in skipped.step(norm, loss))
    assert skipped.state.recent_values[name] == before
    assert skipped.step(1.1, 2.0) == (None, None)
    with pytest.raises(SpikeError, match=rf"iteration 21: {name} .* \(threshold "):
        Guarded("stop").step(norm, loss)
    with pytest.raises(RollbackNeeded, match=f"{name} "):
        Guarded("rollback").step(norm, loss)


def test_a_run_remembers_recent_figures_over_a_checkpoint():
    before = replace(Guarded("rollback").state, rolled_back=((5, 7), (9, 9)))
    plain = plain_run_state(
        CheckpointContext([], groups=None), before, with_optimizer=False, with_rng=False
    )
    after = train_state_of(typed_json.decode(typed_json.encode(plain)))
    assert after == before
    checks: list = []
    guard = SpikeGuard("skip", print, checks)
    guard.before_training(after)
    assert checks[0](30.0) is not None
    assert train_state_of({"iteration": 3}) == TrainState(iteration=3)


@pytest.mark.parametrize(
    ("iteration", "earlier", "expected"),
    [
        (12, [], 0),
        (12, [(5, 10)], 1),
        (14, [(5, 10)], 0),
        (20, [(5, 10), (12, 17)], 2),
        (40, [(5, 10), (12, 17), (30, 38)], 1),
    ],
)
def test_spikes_soon_after_skipped_steps_are_at_one_place(iteration, earlier, expected):
    assert num_rollbacks_at(iteration, earlier, 3) == expected


@pytest.mark.parametrize(
    ("returned_to", "spike", "earlier", "expected"),
    [
        (4, 6, [], (5, 7)),
        (4, 20, [], (5, 20)),
        (4, 8, [(5, 7)], (8, 10)),
        (4, 12, [(5, 7), (8, 10)], (11, 13)),
        (8, 9, [(5, 7)], (9, 11)),
    ],
)
def test_samples_are_passed_over_up_to_the_spike_and_farther_each_time(
    returned_to, spike, earlier, expected
):
    assert next_skipped(returned_to, spike, earlier, 3) == expected


class Run:
    """A run whose state at iteration 4 was kept, and which meets spikes."""

    def __init__(self, monkeypatch, *, kept: int | None = 4, **settings) -> None:
        self.trained: list[int] = []
        self.opened: list[int] = []
        names = {"rollback_iterations_to_skip": 3, "max_rollbacks": 2, **settings}
        plan = SimpleNamespace(global_batch_size=4)
        self.context = SimpleNamespace(
            run=SimpleNamespace(schedule=SimpleNamespace(**names)),
            data=SimpleNamespace(close=lambda: None), groups=None, plan_step=lambda consumed: plan,
        )  # fmt: skip
        monkeypatch.setattr(
            spike_guard, "build_data", lambda run, provider, groups, state: self.open(state)
        )
        loaded = None
        if kept is not None:
            state = TrainState(iteration=kept, consumed_train_samples=4 * kept)
            loaded = SimpleNamespace(train_state=state)
        checkpointer = SimpleNamespace(load_newest=lambda not_after: loaded)
        self.context.roll_back = Rollback(self.context, checkpointer, None, RunStatus())

    def open(self, state: TrainState):
        self.opened.append(state.consumed_train_samples)
        return self.context.data

    def step(self, context, state, plan) -> StepResult:
        iteration = state.iteration + 1
        if state.skips_iteration(iteration):
            return result(was_skipped=True, was_passed_over=True)
        self.trained.append(iteration)
        return result()

    def train(self, spikes: set[int], last: int, *hooks) -> TrainState:
        class Spikes(SpikeGuard):
            def after_step(self, state, result):
                if state.iteration in spikes and not result.was_passed_over:
                    raise RollbackNeeded("lm loss 9.0E+00 is far above")
                return state

        guard = Spikes("rollback", print, None)
        state, _ = loop.train(
            self.context, TrainState(), Hooks([guard, *hooks, StepBudget(last)]), self.step
        )
        return state


def test_a_run_goes_back_and_passes_over_the_samples(monkeypatch, capsys):
    run = Run(monkeypatch)
    state = run.train({6}, 10, ExitInterval(12))
    assert run.trained == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert run.opened == [16]
    assert (state.iteration, state.consumed_train_samples) == (10, 40)
    assert (state.skipped_train_samples, state.rolled_back) == (12, ((5, 7),))
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    for text in (
        "iteration 6: lm loss 9",
        "samples 20 to 23",
        "to iteration 4",
        "5 to 7",
        "time 1",
    ):
        assert text in said


def test_a_run_that_may_exit_where_it_returns_to_goes_on(monkeypatch):
    assert Run(monkeypatch, kept=0).train({2}, 9, ExitInterval(100)).iteration == 9


def test_a_place_is_left_after_its_rollbacks(monkeypatch):
    run = Run(monkeypatch)
    with pytest.raises(SpikeError) as caught:
        run.train(set(range(6, 20)), 20)
    assert run.trained == [1, 2, 3, 4, 5, 6, 8, 11]
    assert "iteration 11: lm loss 9" in str(caught.value)
    assert "samples 40 to 43" in str(caught.value)
    assert "for this place 2 times" in str(caught.value)


def test_a_spike_before_the_first_save_ends_the_run(monkeypatch):
    with pytest.raises(SpikeError, match="There is no earlier state"):
        Run(monkeypatch, kept=None).train({2}, 5)
