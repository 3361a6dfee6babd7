"""Layers called by graphs, of which a stand-in runs here, compute what they do without."""

from unittest import mock

import pytest
import torch

from megatron.core.foundation import device, device_graph
from megatron.core.foundation.device_graph import MemoryPool
from megatron.core.foundation.errors import ConfigError, ScheduleError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import captured_layer
from megatron.core.transformer.captured_layer import why_not_captured
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.gpu_without_gpu.recorded_graph import GRAPHS, graphs_on_cpu
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.parity import training_case
from tests.parity.compare import compare
from tests.parity.layouts import LayoutCase, ModelCase
from tests.parity.table import exceeds, run_case, serial_run

SHAPE = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "hidden_dropout": 0.0,
         "attention_dropout": 0.0, "cuda_graph_warmup_steps": 1}  # fmt: skip


def block(**options):
    torch.manual_seed(3)
    built = TransformerBlock(TransformerConfig(**SHAPE, **options), get_gpt_layer_local_spec())
    for parameter in built.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return built


def step(built, order="FFBFBB", length=5):
    """Run micro batches in an order of passes; return outputs, gradients of inputs, of weights."""
    generator = torch.Generator().manual_seed(7)
    inputs, outputs, waiting = [], [], []
    for kind in order:
        if kind == "F":
            inputs.append(torch.randn(length, 2, 16, generator=generator).requires_grad_())
            outputs.append(built(inputs[-1], None))
            waiting.append(outputs[-1])
        else:
            waiting.pop(0).square().sum().backward()
    found = {f"output {i}": x.detach().clone() for i, x in enumerate(outputs)}
    found |= {f"input {i}": x.grad for i, x in enumerate(inputs)}
    return found | {name: p.grad for name, p in built.named_parameters()}


def assert_equal(found, expected):
    for name, value in expected.items():
        assert_close(found[name], value, FP32_REORDERED_SUM, name)


def test_micro_batches_in_flight_have_graphs_of_their_own():
    expected = step(block())
    with graphs_on_cpu():
        built = block(cuda_graph_impl="local")
        assert_equal(step(built), expected)
        # Two layers, two micro batches in flight, two passes; each pass of three is one replay.
        assert len(GRAPHS) == 8
        assert sum(graph.num_replays for graph in GRAPHS) == 12
        assert len({graph.pool for graph in GRAPHS}) == 4
        built.zero_grad()
        assert_equal(step(built), expected)
        assert len(GRAPHS) == 8


def test_a_call_that_is_no_step_of_training_is_not_captured():
    with graphs_on_cpu():
        built = block(enable_cuda_graph=True)
        with torch.no_grad():
            built(torch.randn(5, 2, 16), None)
        built.eval()(torch.randn(5, 2, 16), None)
        assert GRAPHS == []
        built.train()
        step(built, "FB", length=3)
        step(built, "FB", length=5)  # of another shape
        assert len(GRAPHS) == 8


def test_a_forward_pass_without_backward_gives_its_graphs_back():
    with graphs_on_cpu():
        built = block(cuda_graph_impl="local")
        for _ in range(3):
            built(torch.randn(5, 2, 16).requires_grad_(), None)
        assert len(GRAPHS) == 4


def test_weights_are_read_where_the_update_writes_them():
    with graphs_on_cpu():
        built = block(cuda_graph_impl="local")
        step(built, "FB")
        with torch.no_grad():
            for parameter in built.parameters():
                parameter.mul_(0.5)
        built.zero_grad()
        found = step(built, "FB")
        (moved, *_) = built.layers[0].parameters()
        moved.data = moved.data.clone()
        with pytest.raises(ScheduleError, match="have moved in memory"):
            step(built, "F")
    plain = block()
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(0.5)
    assert_equal(found, step(plain, "FB"))


def shares_slots(lease, slot, free):
    lease._slot, lease._free = slot, []
    captured_layer.heapq.heappush(free, (slot.number, id(slot), slot))


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (captured_layer, "_copy", lambda static, given: None),
        (captured_layer._Lease, "__init__", shares_slots),
        (torch.Tensor, "clone", torch.Tensor.detach),
    ],
    ids=["inputs are not copied", "micro batches share a slot", "gradients alias"],
)
def test_wrong_use_of_static_memory_is_seen(where, name, wrong):
    expected = step(block())
    with graphs_on_cpu():
        built = block(cuda_graph_impl="local")
        step(built)
        built.zero_grad()
        with mock.patch.object(where, name, wrong), pytest.raises((AssertionError, RuntimeError)):
            assert_equal(step(built), expected)


def train_captured(groups, layout, *arguments):
    """Train as a rank whose layers are called by graphs."""
    make = training_case.transformer_config

    def asking(*given):
        config = make(*given)
        config.cuda_graph_impl, config.cuda_graph_warmup_steps = "local", 1
        return config

    with graphs_on_cpu(), mock.patch.object(training_case, "transformer_config", asking):
        report = training_case.train(groups, layout, *arguments)
        in_flight = layout.pp - groups.pp.rank()
        num_layers = ModelCase("llama", False, 0.0, layers=4).num_layers // layout.pp
        assert len(GRAPHS) == 2 * num_layers * in_flight
        return report


@pytest.mark.parametrize(
    "layout",
    [
        LayoutCase(tp=2, sp=True, cp=2, micro_batch_size=2),
        LayoutCase(pp=2, dp=2, stage=1),
        LayoutCase(pp=2, dp=2, stage=2),
    ],
)
def test_training_by_graphs_equals_one_process(layout):
    model = ModelCase("llama", False, 0.0, layers=4)
    found = run_case(layout, model, 2, train_captured)
    errors = compare(found, serial_run(layout.serial, model, 2))
    assert not exceeds(errors), errors


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_dropout": 0.1},
        {"fp8": "hybrid"},
        {"recompute_granularity": "selective"},
        {"pipeline_schedule": "zb-h1", "pipeline_model_parallel_size": 2,
         "pipeline_dtype": torch.float32},
    ],
)  # fmt: skip
def test_what_a_replay_would_not_repeat_is_not_captured(options):
    config = TransformerConfig(**SHAPE | options, cuda_graph_impl="local")
    assert why_not_captured(config)
    assert captured_layer.captured_layers([], config) == []


@pytest.mark.parametrize(("asked", "made"), [(0, 1), (1, 1), (3, 3)])
def test_libraries_start_in_a_pass_before_a_capture_also_where_none_is_asked_for(asked, made):
    """Recipes of Megatron-LM have --cuda-graph-warmup-steps 0."""
    config = TransformerConfig(**SHAPE | {"cuda_graph_warmup_steps": asked})
    layer = captured_layer.CapturedLayer(torch.nn.Identity(), config.cuda_graph_warmup_steps)
    assert layer._num_warm_ups == made


def test_passes_before_a_capture_are_not_negative():
    with pytest.raises(ConfigError, match="cuda_graph_warmup_steps=-1"):
        TransformerConfig(**SHAPE | {"cuda_graph_warmup_steps": -1})


@pytest.fixture
def older_cuda():
    """A torch without `torch.accelerator.Graph`; its calls for CUDA keep their signatures."""
    cuda = torch.cuda  # noqa: TID251 (it is what is replaced)
    accelerator = mock.Mock(spec=["current_device_index"])
    accelerator.current_device_index.return_value = 0
    stream = mock.MagicMock()
    with (
        mock.patch.object(device, "device_type", return_value="cuda"),
        mock.patch.object(device, "current_stream", return_value=mock.Mock()),
        mock.patch.object(device_graph, "_side_stream", return_value=stream),
        mock.patch.object(torch, "accelerator", accelerator),
        mock.patch.object(cuda, "CUDAGraph") as graphs,
        mock.patch.object(cuda, "current_stream", return_value=stream),
        mock.patch.object(cuda, "graph", autospec=True) as recordings,
    ):
        graphs.side_effect = lambda: mock.Mock(pool=lambda: (0, 7))
        yield recordings


def test_an_older_torch_records_graphs_of_cuda(older_cuda):
    assert device.records_graphs()
    pool = MemoryPool()
    first, second = device_graph.DeviceGraph(pool), device_graph.DeviceGraph(pool)
    assert first.capture(lambda: (None,)) == second.capture(lambda: (None,)) == (None,)
    stream = device_graph._side_stream(None)
    assert [call.kwargs for call in older_cuda.call_args_list] == [
        {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        for pool in (None, (0, 7))
    ]
    assert first._graph is older_cuda.call_args_list[0].args[0]
    second.replay()
    second._graph.replay.assert_called_once()
    first._graph.replay.assert_not_called()


def test_graphs_are_refused_on_a_device_that_records_none(older_cuda):
    device.device_type.return_value = "xpu"
    with pytest.raises(ConfigError, match="records no graphs on xpu"):
        TransformerConfig(**SHAPE, cuda_graph_impl="local")
    TransformerConfig(**SHAPE)
    device.device_type.return_value = "cpu"  # where steps run eagerly, and the run says so
    TransformerConfig(**SHAPE, cuda_graph_impl="local")
