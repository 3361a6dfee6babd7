"""The contract of `get_forward_backward_func`, on one process."""

import contextlib
from collections import namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.core.foundation.errors import ConfigError, DataError, ScheduleError
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parameters.rng import rng_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel import stage as stages
from megatron.core.pipeline_parallel.grad_sync import GradSync
from megatron.core.pipeline_parallel.instructions import NO_MICROBATCH
from megatron.core.pipeline_parallel.schedules import get_tensor_shapes
from megatron.core.pipeline_parallel.stage import LossSettings, Stage, StepReport
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.step_context.deferred_wgrad import enable_wgrad_deferral
from megatron.core.tensor_parallel.linear_with_overlap import LinearCommSpec, parallel_linear
from megatron.core.timers import Timers
from megatron.core.topology.group import SINGLE_RANK
from tests.harness.groups import FakeGroup, fake_groups

WEIGHT = 3.0


@dataclass
class Config(ModelParallelConfig):
    """A config with a width."""

    hidden_size: int = 4


class Scale(nn.Module):
    """y = w * x: the gradient of w is the sum of what flows back."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.tensor(WEIGHT))
        self.input: Tensor | None = None

    def set_input_tensor(self, tensor: Tensor) -> None:
        self.input = tensor

    def forward(self, x: Tensor | None) -> Tensor:
        return self.weight * (x if self.input is None else self.input)


def step_with(loss_func):
    return lambda iterator, model: (model(next(iterator)), loss_func)


def run(model, loss_func, data, *, sizes=(), **options):
    call = {
        "forward_step_func": step_with(loss_func),
        "data_iterator": iter(data),
        "num_microbatches": len(data),
        "seq_length": 1,
        "micro_batch_size": 1,
    }
    return get_forward_backward_func(*sizes)(model=model, **(call | options))


DATA = [torch.tensor([1.0, 2.0]), torch.tensor([5.0])]


def test_a_pair_is_a_mean_loss_divided_by_the_micro_batches():
    model = Scale(Config())
    reports = run(model, lambda out: (out.mean(), {"mean": out.mean().detach()}), DATA)
    assert model.weight.grad == pytest.approx((1.5 + 5.0) / 2)
    assert [float(r["mean"]) for r in reports] == [1.5 * WEIGHT, 5.0 * WEIGHT]


def test_a_bare_tensor_is_a_mean_loss_that_reports_itself():
    model = Scale(Config())
    reports = run(model, lambda out: out.mean(), DATA)
    assert model.weight.grad == pytest.approx(3.25)
    assert [float(r) for r in reports] == [1.5 * WEIGHT, 5.0 * WEIGHT]
    assert not any(r.requires_grad for r in reports)


def test_a_pair_is_multiplied_by_the_context_parallel_size():
    model = Scale(Config())
    run(
        model,
        lambda out: (out.mean(), {}),
        DATA,
        pg_collection=fake_groups(cp=(0, 4)),
    )
    assert model.weight.grad == pytest.approx(4 * 3.25)


def count_tokens(out):
    tokens = torch.tensor(out.numel(), dtype=torch.int)
    return out.sum(), tokens, {"sum": torch.stack([out.sum().detach(), tokens])}


def test_a_triple_is_a_sum_divided_by_its_tokens_and_the_micro_batches():
    model = Scale(Config())
    reports = run(model, count_tokens, DATA)
    assert model.weight.grad == pytest.approx((1.5 + 5.0) / 2)
    assert [r["sum"].tolist() for r in reports] == [[9.0, 2.0], [15.0, 1.0]]


def test_a_micro_batch_without_tokens_adds_nothing():
    model = Scale(Config())
    run(model, lambda out: (out.sum() * 0, torch.tensor(0, dtype=torch.int), {}), DATA)
    assert model.weight.grad == 0


def test_per_token_losses_are_not_divided_and_the_tokens_are_handed_to_finalisation():
    seen = []

    def finalize(chunks, num_tokens, pg_collection=None):
        seen.append((chunks, num_tokens, pg_collection))

    config = Config(calculate_per_token_loss=True, finalize_model_grads_func=finalize)
    model = Scale(config)
    groups = ProcessGroupCollection.single()
    run(model, count_tokens, DATA, pg_collection=groups)
    assert model.weight.grad == pytest.approx(8.0)
    [(chunks, num_tokens, passed)] = seen
    assert chunks == [model]
    assert num_tokens.item() == 3
    assert num_tokens.dtype == torch.int
    assert passed == groups.frozen()


def test_finalisation_gets_no_tokens_otherwise_and_is_not_called_in_evaluation():
    seen = []
    config = Config(finalize_model_grads_func=lambda *a, **k: seen.append((a, k)))
    model = Scale(config)
    run(model, count_tokens, DATA, force_all_reduce=True)
    run(model, count_tokens, DATA, forward_only=True)
    [(arguments, options)] = seen
    assert arguments == ([model], None)
    assert options["force_all_reduce"] is True


def test_the_loss_is_scaled_for_backward_and_not_in_the_report():
    model = Scale(Config(grad_scale_func=lambda loss: loss * 1024))
    reports = run(model, lambda out: (out.mean(), out.mean().detach()), DATA)
    assert model.weight.grad == pytest.approx(1024 * 3.25)
    assert float(reports[1]) == 5.0 * WEIGHT


def test_non_loss_data_are_collected_as_they_are():
    def loss_func(out, non_loss_data=False):
        assert non_loss_data
        return out.numel()

    assert run(Scale(Config()), loss_func, DATA, forward_only=True, collect_non_loss_data=True) == [
        2,
        1,
    ]


def test_evaluation_leaves_no_gradient_with_and_without_no_grad():
    model = Scale(Config())
    run(model, lambda out: (out.mean(), {}), DATA, forward_only=True)
    with torch.no_grad():
        run(model, lambda out: (out.mean(), {}), DATA, forward_only=True)
    assert model.weight.grad is None


WRONG_LOSSES = {
    "4 values": lambda out: (out.mean(), 2, 3, 4),
    "1 values": lambda out: (out.mean(),),
    "None": lambda out: None,
    "{'loss'": lambda out: {"loss": out.mean()},
    r"a tensor of shape \(2,\) and type torch.float32 for the loss": lambda out: out,
    "1.5 for the loss": lambda out: (1.5, {}),
    r"type torch.int64 for the loss": lambda out: (out.mean().long(), {}),
    "3 for the number of tokens": lambda out: (out.sum(), 3, {}),
    r"shape \(2,\) and type torch.int64 for the number": lambda out: (out.sum(), out.long(), {}),
    "type torch.bool for the number": lambda out: (out.sum(), out.sum() > 0, {}),
    "which is a number of tokens, for the report": lambda out: (out.sum(), torch.tensor(2)),
    "2, which is a number of tokens": lambda out: (out.sum(), 2),
}
"""What the message says -> a loss function that returns it."""


@pytest.mark.parametrize("found", WRONG_LOSSES)
def test_a_loss_function_that_returns_something_else_is_told_the_forms(found):
    for options in ({}, {"forward_only": True}):
        with pytest.raises(ConfigError, match=f"returned .*{found}.*") as caught:
            run(Scale(Config()), WRONG_LOSSES[found], DATA, **options)
        assert "(summed loss, number of tokens, report)" in caught.value.rule


@pytest.mark.parametrize(
    "loss_func", [lambda out: (out.mean(), {}), lambda out: [out.mean(), {}], torch.mean]
)
def test_a_loss_without_a_number_of_tokens_is_refused_where_gradients_are_divided_by_it(loss_func):
    model = Scale(Config(calculate_per_token_loss=True))
    with pytest.raises(ConfigError, match="returned no number of tokens") as caught:
        run(model, loss_func, DATA)
    assert caught.value.flags == ("--calculate-per-token-loss",)
    assert model.weight.grad is None
    assert len(run(model, loss_func, DATA, forward_only=True)) == 2  # nothing is divided


def test_a_loss_that_is_cut_from_the_output_is_refused():
    for loss_func in (lambda out: out.mean().detach(), lambda out: (torch.zeros(()), {})):
        with pytest.raises(ConfigError, match="does not depend on the model's output"):
            run(Scale(Config()), loss_func, DATA)
    frozen = Scale(Config()).requires_grad_(False)
    assert len(run(frozen, torch.mean, DATA)) == 2  # nothing to train is no mistake of the loss


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (lambda data, model: model(next(data)), "returned a tensor of shape"),
        (lambda data, model: (model(next(data)), torch.mean, 3), "returned 3 values"),
        (lambda data, model: (model(next(data)), {"loss": 1}), "for the loss function"),
        (lambda data, model: None, "returned None"),
    ],
)
def test_a_forward_step_that_returns_something_else_is_told_what_it_returns(step, found):
    with pytest.raises(ConfigError, match=f"the forward step .*{found}"):
        run(Scale(Config()), None, DATA, forward_step_func=step)


def test_an_earlier_stage_that_returns_no_tensors_is_told_so():
    loss = LossSettings(num_microbatches=1, cp_group=SINGLE_RANK)
    for output in (None, {"states": torch.ones(1)}, [torch.ones(1), None], []):
        stage = Stage(
            nn.Linear(1, 1), lambda _, model, out=output: (out, None), None, is_last=False,
            loss=loss, reported=StepReport(),
        )  # fmt: skip
        with pytest.raises(ConfigError, match="for the output of an earlier stage"):
            stage.forward(0, None)


def test_data_that_end_within_a_step_are_an_error_of_the_data():
    with pytest.raises(DataError, match="ended before the last micro batch"):
        run(
            Scale(Config()), None, DATA,
            forward_step_func=lambda _, model: (model(next(iter(()))), torch.mean),
        )  # fmt: skip


@dataclass
class Diary:
    """Records what happens in which order."""

    entries: list[Any] = field(default_factory=list)

    @contextlib.contextmanager
    def no_sync(self):
        self.entries.append("(")
        yield
        self.entries.append(")")

    def hooked(self, model):
        model.weight.register_hook(lambda grad: self.entries.append("B"))
        return model


def test_reductions_are_open_only_in_the_last_backward():
    diary = Diary()
    config = Config(no_sync_func=diary.no_sync)
    run(diary.hooked(Scale(config)), count_tokens, DATA * 2)
    assert "".join(diary.entries) == "(BBB)B"


def test_reductions_are_open_when_gradients_are_finalised():
    diary = Diary()
    config = Config(
        no_sync_func=[diary.no_sync],
        finalize_model_grads_func=lambda *a, **k: diary.entries.append("!"),
    )
    run(diary.hooked(Scale(config)), count_tokens, DATA)
    assert "".join(diary.entries) == "(B)B!"


def test_a_failing_step_leaves_no_sync():
    diary = Diary()
    config = Config(no_sync_func=diary.no_sync)

    def explode(iterator, model):
        raise ValueError("no data")

    with pytest.raises(ValueError, match="no data"):
        run(Scale(config), None, DATA, forward_step_func=explode)
    assert diary.entries == ["(", ")"]


def test_each_chunk_has_its_own_no_sync_and_its_own_start():
    diaries = [Diary(), Diary()]
    started = []
    chunks = [nn.Linear(1, 1), nn.Linear(2, 2)]
    sync = GradSync(
        chunks,
        [diary.no_sync for diary in diaries],
        [lambda p, i=i: started.append((i, len(list(p)))) for i in range(2)],
    )
    with sync:
        sync.open(NO_MICROBATCH, 1)
        assert diaries[1].entries == ["(", ")"]
        assert diaries[0].entries == ["("]
        assert started == [(1, 2)]
        sync.open(3, 0)  # in the last backward: hooks start it, not we
        sync.after_backward()
    assert diaries[0].entries == ["(", ")"]
    assert started == [(1, 2)]


def test_a_no_sync_shared_by_chunks_closes_again_for_the_others():
    diary = Diary()
    with GradSync([nn.Linear(1, 1), nn.Linear(1, 1)], diary.no_sync, None) as sync:
        sync.open(5, 1)
        diary.entries.append("last backward of chunk 1")
        sync.after_backward()
        diary.entries.append("chunk 0")
        sync.after_backward()
    assert diary.entries == ["(", ")", "last backward of chunk 1", "(", "chunk 0", ")"]


def test_parameters_are_asked_for_before_the_first_forward():
    diary = Diary()
    config = Config(param_sync_func=lambda parameters: diary.entries.append(list(parameters)))
    model = Scale(config)
    run(model, count_tokens, DATA)
    assert diary.entries == [[model.weight]]


def test_random_numbers_are_keyed_by_the_micro_batch():
    rng_state().begin_step(100, micro_batch_size=2, dp_rank=1, dp_size=4)
    seen = []

    def step(iterator, model):
        seen.append(rng_state().first_sample)
        return model(next(iterator)), lambda out: (out.mean(), {})

    run(Scale(Config()), None, DATA * 2, forward_step_func=step)
    assert seen == [100 + 2 * (4 * i + 1) for i in range(4)]


def test_weight_caches_are_renewed_once_a_step():
    class Listener(Scale):
        told = 0

        def set_is_first_microbatch(self):
            self.told += 1

    model = Listener(Config())
    run(model, count_tokens, DATA)
    assert model.told == 1
    run(model, count_tokens, DATA, forward_only=True, first_val_step=False)
    assert model.told == 1
    run(model, count_tokens, DATA, forward_only=True, first_val_step=True)
    assert model.told == 2


def test_several_chunks_on_one_rank_are_run_one_after_the_other():
    chunks = [Scale(Config()), Scale(Config())]

    def step(iterator, model):
        return model(next(iterator)), lambda out: (out.mean(), out.detach())

    reports = run(
        chunks,
        None,
        DATA,
        sizes=(None, 2),
        forward_step_func=step,
        data_iterator=[iter(DATA), iter(DATA)],
    )
    assert [r.tolist() for r in reports] == [[9.0, 18.0], [45.0]]
    assert [float(c.weight.grad) for c in chunks] == [pytest.approx(3 * 3.25)] * 2


def test_timers_count_the_step_and_its_halves():
    timers = Timers(log_level=2, log_option="max")
    run(Scale(Config(timers=timers)), count_tokens, DATA)
    seconds = timers.seconds_of_all_ranks()
    assert set(seconds) == {"forward-backward", "forward-compute", "backward-compute"}
    assert all(value[0] > 0 for value in seconds.values())


def test_autocast_is_entered_for_the_forward():
    seen = []

    def step(iterator, model):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        return model(next(iterator)), lambda out: (out.mean(), {})

    config = Config(enable_autocast=True, autocast_dtype=torch.bfloat16)
    run(Scale(config), None, DATA, forward_step_func=step)
    assert seen == [(True, torch.bfloat16)] * 2


@pytest.mark.parametrize(
    ("options", "num_chunks", "error", "message"),
    [
        ({}, 2, ConfigError, "1 data iterators for 2 model chunks"),
        ({"num_microbatches": 0}, 1, ScheduleError, "0 micro batches"),
        ({"sizes": (2, None)}, 1, ConfigError, "pipeline size 2"),
        ({"sizes": (1, 3)}, 1, ConfigError, "3 model chunks"),
    ],
)
def test_contradictory_calls_are_refused(options, num_chunks, error, message):
    chunks = [Scale(Config()) for _ in range(num_chunks)]
    with pytest.raises(error, match=message):
        run(chunks, count_tokens, DATA, **options)


def test_training_inside_no_grad_is_refused():
    with torch.no_grad(), pytest.raises(ConfigError, match=r"inside torch.no_grad"):
        run(Scale(Config()), count_tokens, DATA)


def test_boundary_tensors_are_split_over_context_and_sequence_parallel_ranks():
    config = Config(tensor_model_parallel_size=4, sequence_parallel=True)
    shapes = get_tensor_shapes(
        seq_length=64,
        micro_batch_size=3,
        config=config,
        tp_group=FakeGroup(0, 4),
        cp_group=FakeGroup(0, 2),
    )
    assert shapes == [(8, 3, 4)]


def test_place_in_the_pipeline():
    assert is_pp_first_stage(None)
    assert is_pp_last_stage(None)
    assert not is_pp_first_stage(FakeGroup(1, 2))
    assert is_pp_last_stage(FakeGroup(1, 2))
    assert is_vp_first_stage(None, None)
    assert is_vp_last_stage(None, 1)
    assert is_vp_first_stage(0, 2)
    assert not is_vp_last_stage(0, 2)


def test_input_gradients_leave_weight_gradients_to_their_own_step():
    linear = torch.nn.Linear(3, 2)
    x = torch.randn(4, 3, requires_grad=True)
    stage = Stage(
        linear,
        lambda _, model: (
            parallel_linear(x, model.weight, model.bias, LinearCommSpec(SINGLE_RANK)),
            torch.mean,
        ),
        None,
        is_last=True,
        loss=LossSettings(num_microbatches=1, cp_group=SINGLE_RANK),
        reported=StepReport(),
    )
    seen = []
    with enable_wgrad_deferral():
        stage.forward(0, None)
        stage.input_grad(0, None)
        seen.append((x.grad is not None, linear.bias.grad is not None, linear.weight.grad))
        stage.weight_grad(0)
    assert seen == [(True, True, None)]
    expected = torch.autograd.grad(linear(x.detach()).mean(), linear.weight)[0]
    torch.testing.assert_close(linear.weight.grad, expected)


class Doubling(torch.autograd.Function):
    """A Python function: before torch has ownership tokens, its node dies with its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


@pytest.mark.parametrize(
    "fields", [("node", "output_nr"), ("node", "output_nr", "ownership_token")]
)
def test_a_stage_that_ends_in_a_python_function_outlives_its_output(monkeypatch, fields):
    if "ownership_token" in stages.GradientEdge._fields:  # else this torch is the old one itself
        monkeypatch.setattr(stages, "GradientEdge", namedtuple("GradientEdge", fields))
    x = torch.ones(3, requires_grad=True)
    edge = stages._edge_of(Doubling.apply(x))
    stages._run_backward([edge], [torch.ones(3)])
    assert x.grad.tolist() == [2.0, 2.0, 2.0]
