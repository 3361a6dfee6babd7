"""With one replica the wrapper still provides main gradients, and changes no number."""

import torch

from megatron.core.parameters.param_meta import accumulate_main_grad
from megatron.core.process_groups_config import ProcessGroupCollection
from tests.distributed.distributed.replicas import (
    Model,
    accumulate,
    loss_of,
    samples,
    serial_gradients,
    wrap,
)
from tests.harness.tolerances import EXACT, FP32_REORDERED_SUM, assert_close

SINGLE = ProcessGroupCollection.single()


def test_gradients_of_one_micro_batch_are_those_of_the_bare_model():
    ddp = wrap(SINGLE)
    accumulate(ddp, SINGLE, 0, 1)
    for name, parameter in ddp.module.named_parameters():
        expected = serial_gradients(0)[name].view_as(parameter)
        assert_close(parameter.main_grad, expected, EXACT, name)
        assert parameter.grad is None


def test_a_new_step_overwrites_the_old_gradients_without_zeroing():
    ddp = wrap(SINGLE)
    accumulate(ddp, SINGLE, 0, 1)
    accumulate(ddp, SINGLE, 1, 4)
    for name, parameter in ddp.module.named_parameters():
        expected = serial_gradients(1)[name].view_as(parameter)
        assert_close(parameter.main_grad, expected, FP32_REORDERED_SUM, name)


def test_a_parameter_that_took_no_part_has_a_zero_gradient():
    ddp = wrap(SINGLE)
    accumulate(ddp, SINGLE, 0, 1)
    ddp.zero_grad_buffer()
    ddp.module.first.bias.sum().backward()
    ddp.finish_grad_sync()
    for name, parameter in ddp.module.named_parameters():
        expected = 1.0 if name == "first.bias" else 0.0
        assert torch.all(parameter.main_grad == expected), name


def test_a_backward_that_wrote_the_main_gradient_itself_is_not_added_again():
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.weight = weight
            ctx.save_for_backward(x)
            return x @ weight.T

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            accumulate_main_grad(ctx.weight, grad.T @ x)
            return grad @ ctx.weight, None

    model = torch.nn.Linear(5, 3, bias=False)
    ddp = wrap(SINGLE, model=model)
    ddp.zero_grad_buffer()
    x = torch.randn(4, 5)
    for _ in range(3):
        Fused.apply(x, model.weight).sum().backward()
    ddp.finish_grad_sync()
    assert_close(model.weight.main_grad, 3 * x.sum(0).expand(3, 5), FP32_REORDERED_SUM, "weight")


def test_bf16_gradients_are_added_in_fp32():
    ddp = wrap(SINGLE, dtype=torch.bfloat16, grad_reduce_in_fp32=True)
    accumulate(ddp, SINGLE, 0, 4)
    model = Model(torch.bfloat16)
    total = torch.zeros(model.first.weight.shape)
    for ids in samples(0).chunk(4):
        model.zero_grad()
        (loss_of(model, ids) / 4).backward()
        total += model.first.weight.grad.float()
    assert ddp.module.first.weight.main_grad.dtype == torch.float32
    assert_close(ddp.module.first.weight.main_grad, total, EXACT, "sum of four micro batches")


def test_frozen_parameters_have_no_buffer():
    model = Model()
    model.first.weight.requires_grad_(False)
    ddp = wrap(SINGLE, model=model)
    accumulate(ddp, SINGLE, 0, 1)
    assert not hasattr(model.first.weight, "main_grad")
    assert ddp.shards_of(model.first.weight) == []


def test_the_state_dict_is_that_of_the_module():
    ddp = wrap(SINGLE)
    assert list(ddp.state_dict()) == list(Model().state_dict())
    ddp.load_state_dict(Model().state_dict())


def test_one_replica_may_keep_its_parameters_in_a_file(tmp_path):
    settings = {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "param_offload_path": str(tmp_path),
    }
    curves = []
    for ddp in (wrap(SINGLE), wrap(SINGLE, **settings)):
        curves.append([])
        for step in range(3):
            ddp.zero_grad_buffer()
            loss = loss_of(ddp, samples(step))
            loss.backward()
            ddp.finish_grad_sync()
            for span in ddp.spans():
                for shard in span.shards:
                    shard.values.detach().sub_(shard.gradient, alpha=0.1)
            ddp.start_param_sync()
            curves[-1].append(loss.item())
        assert ddp.sharded_values() or not curves[1:]
    assert curves[0] == curves[1]
