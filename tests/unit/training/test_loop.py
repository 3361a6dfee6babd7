"""The loop and its hooks, on a fake step."""

import gc
import json
import os
import signal
from types import SimpleNamespace

import pytest
import torch

import megatron.training.hooks.evaluation as hook_module
import megatron.training.run.loop as loop
from megatron.core.foundation.errors import ConfigError
from megatron.core.process_groups_config import SINGLE_RANK, ProcessGroupCollection
from megatron.resilience.replica_check import CompareReplicas
from megatron.resilience.signals import SignalFlag
from megatron.resilience.status import RunStatus
from megatron.training.config.resolved import ResolvedRun
from megatron.training.datasets.iterators import build_data, sample_counts
from megatron.training.hooks.base import Hook, Hooks
from megatron.training.hooks.log import IntervalMeans, LinesForFirstRank, LogLine
from megatron.training.hooks.profiling import CollectGarbage, Profile
from megatron.training.hooks.progress_file import ProgressFile
from megatron.training.hooks.scalars import JsonLinesSink, Scalars, TensorBoardSink
from megatron.training.hooks.standard import evaluation_plan
from megatron.training.hooks.stop import ExitDuration, ExitInterval, ExitOnSignal, StepBudget
from megatron.training.run.context import ValidationSet
from megatron.training.run.loss_reduction import DeferredLosses
from megatron.training.run.state import BatchPlan, StepResult, StopReason, TrainState
from megatron.training.setup.model import build_model
from tests.harness.resolved_run import run_of


def result(loss: float = 1.0, **changes) -> StepResult:
    fields = {
        "losses": {"lm loss": loss}, "grad_norm": 1.0, "num_zeros": None, "learning_rate": 0.1,
        "decoupled_learning_rate": None, "loss_scale": 1.0, "num_samples": 4, "num_tokens": 64,
        "num_microbatches": 2, "was_skipped": False, "flops": 10.0,
    }  # fmt: skip
    return StepResult(**{**fields, **changes})


class Recorder(Hook):
    """Writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before_training(self, state):
        self.calls.append(f"begin {state.iteration}")
        return state

    def before_step(self, state):
        self.calls.append(f"before {state.iteration}")

    def after_step(self, state, result):
        self.calls.append(f"after {state.iteration}")
        return state

    def after_training(self, state, stop):
        self.calls.append(f"end {state.iteration} {stop.name}")
        return state


@pytest.fixture
def run():
    """Return a function that runs the loop with hooks, on a step that does nothing."""
    parts = SimpleNamespace(plan_step=lambda consumed: None)
    return lambda *hooks, state=None: loop.train(
        parts, state or TrainState(), Hooks(hooks), lambda parts, state, plan: result()
    )


def test_hooks_surround_each_step(run):
    recorder = Recorder()
    state, stop = run(recorder, StepBudget(2))
    assert stop is StopReason.FINISHED
    assert recorder.calls == [
        "begin 0", "before 0", "after 1", "before 1", "after 2", "end 2 FINISHED",
    ]  # fmt: skip
    assert (state.iteration, state.consumed_train_samples, state.flops_so_far) == (2, 8, 20.0)


def test_a_finished_run_has_nothing_to_do(run):
    recorder = Recorder()
    run(recorder, StepBudget(5), state=TrainState(iteration=5))
    assert recorder.calls == ["begin 5", "end 5 FINISHED"]


def test_an_exit_interval_stops_at_its_multiples_but_not_before_the_first_step(run):
    state, stop = run(ExitInterval(3), StepBudget(10))
    assert (state.iteration, stop) == (3, StopReason.EXIT_INTERVAL)
    state, stop = run(ExitInterval(3), StepBudget(10), state=state)
    assert (state.iteration, stop) == (6, StopReason.EXIT_INTERVAL)


def test_a_duration_stops_the_run(run):
    state, stop = run(ExitDuration(0.0), StepBudget(10))
    assert (state.iteration, stop) == (0, StopReason.EXIT_DURATION)


def test_a_signal_stops_the_run_at_the_step_boundary(run):
    before = signal.getsignal(signal.SIGTERM)

    class Kill(Hook):
        def before_step(self, state):
            if state.iteration == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # a second one changes nothing

    hook = ExitOnSignal(SignalFlag())
    state, stop = run(hook, Kill(), StepBudget(10))
    assert (state.iteration, stop) == (4, StopReason.EXIT_SIGNAL)
    hook.close()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_ends_at_once_and_setup_can_be_left_at_any_time():
    before = signal.getsignal(signal.SIGINT)
    flag = SignalFlag("SIGTERM", "SIGINT")
    with pytest.raises(KeyboardInterrupt), flag.paused():
        os.kill(os.getpid(), signal.SIGINT)
    assert not flag.is_set
    os.kill(os.getpid(), signal.SIGINT)
    assert flag.is_set
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    flag.restore()
    assert signal.getsignal(signal.SIGINT) is before


def test_a_signal_leaves_an_evaluation_between_two_batches(monkeypatch):
    """It lasts 200 passes; the samples count as evaluated, so that later ones stay the same."""
    passes, lines = [], []
    monkeypatch.setattr(
        hook_module, "forward_backward", lambda *args, **named: passes.append(args[2]) or []
    )
    monkeypatch.setattr(hook_module, "is_last_rank", lambda: True)
    sets = [ValidationSet("", iter(()), 1)]
    hook = hook_module.Evaluate(
        SimpleNamespace(
            run=ResolvedRun().overlaid({"eval_iters": 200, "eval_interval": 5}),
            data=SimpleNamespace(valid=sets),
            model=[],
        ),
        plan=BatchPlan(num_microbatches=2, micro_batch_size=1, global_batch_size=8),
        status=RunStatus(),
        scalars=None,
        write=lines.append,
        should_exit=lambda: len(passes) == 3,
    )
    state = hook.after_step(TrainState(iteration=5), result(1.0))
    assert passes == [0, 8, 16]
    assert lines == [" the evaluation at iteration 5 is skipped because of an exit signal"]
    assert state.consumed_valid_samples == 200 * 8


def test_evaluations_begin_at_their_step_in_batches_of_their_own_size(monkeypatch):
    passes, collected = [], []
    monkeypatch.setattr(
        hook_module, "evaluate", lambda _, data, rows, plan, **o: passes.append(rows)
    )
    monkeypatch.setattr(hook_module, "is_last_rank", lambda: False)
    settings = {
        "eval_iters": 3, "eval_interval": 5, "start_eval_at_iter": 10, "micro_batch_size": 2,
        "global_batch_size": 8, "eval_global_batch_size": 4, "eval_micro_batch_size": 1,
    }  # fmt: skip
    run = ResolvedRun().overlaid(settings)
    context = SimpleNamespace(
        run=run, data=SimpleNamespace(valid=[ValidationSet("", iter(()), 1)]), model=[]
    )
    plan = evaluation_plan(context)
    assert (plan.num_microbatches, plan.micro_batch_size, plan.row_size) == (4, 1, 1)
    assert sample_counts(run).test == 3 * 4
    hook = hook_module.Evaluate(context, plan=plan, status=RunStatus(), scalars=None, write=print)
    monkeypatch.setattr(gc, "collect", lambda: collected.append(len(passes)))
    hook.at_begin_and_end = CollectGarbage(0, around_evaluation=True).collect_around_evaluation
    states = [hook.after_step(TrainState(iteration=step), result(1.0)) for step in (5, 10)]
    assert [state.consumed_valid_samples for state in states] == [0, 12]
    assert passes == [12]
    assert collected == [0, 1]


UNMEASURED = SimpleNamespace(shares={})
"""In place of the hook that measures times."""


def test_all_reasons_are_asked_and_the_first_wins(run):
    _, stop = run(StepBudget(3), ExitInterval(3))
    assert stop is StopReason.FINISHED


def test_means_leave_out_steps_that_did_not_train():
    means = IntervalMeans()
    means.add(result(1.0), 0.5)
    means.add(result(3.0), 0.5)
    means.add(result(float("nan"), was_nan=True), 0.5)
    means.add(result(100.0, was_skipped=True), 0.5)
    assert means.mean_losses() == {"lm loss": 2.0}
    assert (means.num_steps, means.num_skipped, means.num_nan) == (4, 1, 1)
    assert means.num_tokens == 4 * 64


def test_a_skipped_step_names_what_overflowed(monkeypatch):
    lines = []
    run = ResolvedRun().overlaid({"log_interval": 10})
    hook = LogLine(SimpleNamespace(run=run), UNMEASURED, lines.append, train_iters=20)
    reason = "gradient of output_layer.weight is not finite on global rank 1"
    skipped = result(1.0, was_skipped=True, skip_reason=reason, loss_scale=512.0)
    hook.after_step(TrainState(iteration=3), skipped)
    hook.after_step(TrainState(iteration=4), result(1.0))
    assert len(lines) == 1
    assert "3 | step skipped: gradient of output_layer.weight" in lines[0]
    assert "next loss scale: 512.0" in lines[0]


@pytest.mark.parametrize(("num_steps", "reported"), [(3, [3]), (10, [10]), (12, [10]), (0, [])])
def test_a_run_too_short_for_a_line_has_one_at_its_end(num_steps, reported, monkeypatch):
    found = []

    def report(hook, state, result):
        found.append(state.iteration)
        hook._has_reported_memory = True

    monkeypatch.setattr(LogLine, "_report", report)
    run = ResolvedRun().overlaid({"log_interval": 10})
    hook = LogLine(SimpleNamespace(run=run), UNMEASURED, [].append, train_iters=20)
    for step in range(1, num_steps + 1):
        hook.after_step(TrainState(iteration=step), result(1.0))
    hook.after_training(TrainState(iteration=num_steps), StopReason.FINISHED)
    assert found == reported


def test_losses_are_token_means_over_micro_batches():
    reports = [
        {"lm loss": torch.tensor([10.0, 4.0]), "mtp": (1.0, 2.0)},
        {"lm loss": torch.tensor([2.0, 2.0]), "mtp": (3.0, 2.0)},
    ]
    assert DeferredLosses.of(reports).read().means(SINGLE_RANK) == {"lm loss": 2.0, "mtp": 1.0}


def test_plain_means_are_averaged():
    reports = [{"lm loss": torch.tensor(1.0)}, {"lm loss": 3.0}]
    assert DeferredLosses.of(reports).read().means(SINGLE_RANK) == {"lm loss": 2.0}


def test_a_report_of_one_number_is_the_loss():
    assert DeferredLosses.of([torch.tensor(1.0), 3.0]).read().means(SINGLE_RANK) == {"loss": 2.0}


@pytest.mark.parametrize(
    ("reports", "found"),
    [
        ([{"lm loss": torch.ones(3)}], "reported 'lm loss' as"),
        ([{"lm loss": "high"}], "reported 'lm loss' as 'high'"),
        ([{"lm loss": None}], "reported 'lm loss' as None"),
        ([{"lm loss": (1.0, 2.0, 3.0)}], "reported 'lm loss' as"),
        ([None], "reported 'loss' as None"),
        ([{"a": 1.0}, {"b": 1.0}], "reported a for one micro batch and b for another"),
        ([{"a": 1.0}, {"a": 1.0, "b": 1.0}], "reported a for one micro batch and a, b for"),
        ([{}, {"a": 1.0}], "reported nothing for one micro batch and a for"),
    ],
)
def test_a_report_that_is_no_mean_is_refused(reports, found):
    with pytest.raises(ConfigError, match=found):
        DeferredLosses.of(reports)


def test_a_rank_without_losses_reports_none():
    assert DeferredLosses.of([]).read().means(SINGLE_RANK) == {}
    assert DeferredLosses.of([]).read().first_not_finite() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_first_loss_that_is_not_finite_is_named(bad):
    reports = [{"lm loss": torch.tensor([x, 2.0])} for x in (1.0, bad, bad)]
    microbatch, name, _ = DeferredLosses.of(reports).read().first_not_finite()
    assert (microbatch, name) == (1, "lm loss")


def test_replicas_are_compared_at_their_interval_before_every_save_and_at_the_end(run):
    compared: list[int] = []
    check = SimpleNamespace(optimizer=SimpleNamespace(norm_checks=[]), compare=compared.append)
    run(CompareReplicas(check, 4, [3, None]), StepBudget(10))
    assert compared == [3, 4, 6, 8, 9, 10]


def test_garbage_collection_is_taken_over_and_given_back():
    hook = CollectGarbage(2)
    hook.before_training(TrainState())
    assert not gc.isenabled()
    hook.after_step(TrainState(iteration=2), result())
    hook.close()
    assert gc.isenabled()


def scalars_of(path, sinks, interval=1, **settings) -> Scalars:
    names = (
        "log_timers_to_tensorboard", "log_learning_rate_to_tensorboard", "log_throughput",
        "log_loss_scale_to_tensorboard", "log_memory_to_tensorboard",
        "log_validation_ppl_to_tensorboard",
    )  # fmt: skip
    known = dict.fromkeys(names, True) | {"seq_length": 8, "log_timers_to_tensorboard": False}
    run = ResolvedRun().overlaid({**known, **settings})
    return Scalars(SimpleNamespace(run=run), UNMEASURED, sinks, interval)


def test_json_lines_keep_all_digits(tmp_path):
    hook = scalars_of(tmp_path, [JsonLinesSink(str(tmp_path / "x" / "metrics.jsonl"))])
    loss = 1.0 / 3.0
    for step in (1, 2):
        hook.before_step(TrainState(iteration=step - 1))
        hook.after_step(TrainState(iteration=step), result(loss))
    hook.write_evaluation("validation", {"lm loss": 0.1}, 2)
    hook.close()
    lines = [json.loads(x) for x in (tmp_path / "x" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 2]
    assert lines[0]["lm loss"] == loss
    assert lines[2]["lm loss validation"] == 0.1


def test_scalars_have_megatrons_names_and_interval():
    seen: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *a: seen.append(a), close=lambda: None)
    hook = scalars_of(None, [TensorBoardSink(writer)], interval=2)
    for step in (1, 2, 3):
        hook.before_step(TrainState(iteration=step - 1))
        hook.after_step(TrainState(iteration=step), result())
    assert {step for _, _, step in seen} == {2}
    names = {name for name, _, _ in seen}
    assert {"lm loss", "learning-rate", "grad-norm", "batch-size", "loss-scale"} <= names
    hook.write_evaluation("validation", {"lm loss": 0.0}, 4)
    assert ("lm loss validation ppl", 1.0, 4) in seen


def test_the_progress_file_tells_begin_and_end(tmp_path):
    hook = ProgressFile(str(tmp_path), 4)
    hook.before_training(TrainState(iteration=3))
    hook.after_training(TrainState(iteration=9, flops_so_far=1e9), StopReason.EXIT_INTERVAL)
    first, last = (tmp_path / "progress.txt").read_text().splitlines()
    assert "Iteration: 3\tstarting job" in first
    assert "Iteration: 9\tstopped by: --exit-interval" in last


def test_a_profile_says_where_it_is_and_names_its_steps(run, tmp_path, capsys):
    profile = Profile(2, 4, str(tmp_path), 0, use_torch=True)
    run(profile, StepBudget(5))
    trace = tmp_path / "trace-rank0.json"
    assert str(trace) in capsys.readouterr().out
    events = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {name for name in events if str(name).startswith("step ")} == {"step 2", "step 3"}


def test_lines_of_the_last_rank_are_kept_until_all_meet(run, capsys):
    relay = LinesForFirstRank([2, None])

    class Writes(Hook):
        def after_step(self, state, result):
            relay.write(f"line {state.iteration}")
            assert "line" not in capsys.readouterr().out or state.iteration == 3
            return state

    run(Writes(), relay, StepBudget(3))
    assert capsys.readouterr().out == "line 3\n"


WORDS = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 16"
    " --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 2"
    " --hidden-dropout 0 --attention-dropout 0 --tokenizer-type NullTokenizer --vocab-size 30"
)


def test_rows_are_shared_only_where_every_rank_builds_the_datasets():
    words = (
        f"{WORDS} --calculate-per-token-loss --hybrid-context-parallel"
        " --max-seqlen-per-dp-cp-rank 8"
    )
    groups = ProcessGroupCollection.single()
    with pytest.raises(ConfigError, match="set is_distributed = True on the datasets provider"):
        build_data(run_of(words, 2), lambda counts: (None, None, None), groups, TrainState())


def test_providers_that_return_something_else_are_told_what_they_return():
    run, groups = run_of(WORDS, 1), ProcessGroupCollection.single()
    for found in (None, [], (None, None), "three"):
        with pytest.raises(ConfigError, match="the datasets provider returned"):
            build_data(run, lambda counts, found=found: found, groups, TrainState())
        with pytest.raises(ConfigError, match="the model provider returned"):
            build_model(run, lambda found=found: found, groups)
