"""What a changed package is asked beside its commands; run by path, with the copy before it.

python checks.py NAME [ARGUMENTS]
"""

import sys
from pathlib import Path

import torch

from tests.harness.tolerances import FP32_REORDERED_SUM, FP32_ROUNDED_ONCE, assert_close


def kernel() -> None:
    """The new kernel gives the results and gradients of the one that holds all scores."""
    from megatron.core.kernels.attention import choose_attention
    from megatron.core.kernels.attention_options import AttentionOptions
    from megatron.core.kernels.block_mask import MaskSpec

    torch.manual_seed(1)
    for window in ((40, 0), (100, 0), (30, 20), (-1, 0)):
        options = AttentionOptions(scale=0.3, mask=MaskSpec(window))
        inputs = [torch.randn(200, 2, heads, 8, requires_grad=True) for heads in (4, 2, 2)]
        chosen, plain = (
            choose_attention(*inputs, options, backend=backend).kernel
            for backend in ("auto", "unfused")
        )
        assert (chosen.name, plain.name) == ("windowed", "unfused")
        upstream = torch.randn(200, 2, 32)
        found, expected = [], []
        for kernel, results in ((chosen, found), (plain, expected)):
            output = kernel.run(*inputs, options)
            results += [output, *torch.autograd.grad(output, inputs, upstream)]
        for name, one, other in zip(("out", "q", "k", "v"), found, expected, strict=True):
            assert_close(one, other, FP32_REORDERED_SUM, f"{name} {window}")


def schedule() -> None:
    """Programs of many sizes cannot deadlock, and idle as long as the interleaved schedule."""
    from megatron.core.pipeline_parallel.lower import lower
    from megatron.core.pipeline_parallel.schedule import SCHEDULES, StepPlan
    from megatron.core.pipeline_parallel.simulate import simulate
    from megatron.core.pipeline_parallel.validate import validate

    for p in (2, 3, 4, 8):
        for v in (1, 2, 3):
            for m in (p, 2 * p, 3 * p + 1):
                plan = StepPlan("breadth-first", p, v, m)
                program = lower(SCHEDULES["breadth-first"].orders(plan))
                validate(program)
                assert abs(simulate(program).bubble - (p - 1) / (v * m + p - 1)) < 1e-9, plan


def flag() -> None:
    """A multiplied MLP is one whose last matrix and bias were multiplied."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    def model(multiplier: float) -> GPTModel:
        config = TransformerConfig(
            num_layers=2, hidden_size=32, num_attention_heads=4, hidden_dropout=0.0,
            attention_dropout=0.0, use_cpu_initialization=True, mlp_multiplier=multiplier,
        )  # fmt: skip
        return GPTModel(
            config, get_gpt_layer_local_spec(), 64, 16,
            pg_collection=ProcessGroupCollection.single(),
        )  # fmt: skip

    multiplied, plain = model(0.25), model(1.0)
    plain.load_state_dict(multiplied.state_dict())
    tokens = torch.arange(32).view(2, 16)
    inputs = tokens, torch.arange(16).expand(2, 16), None
    assert (multiplied(*inputs) - plain(*inputs)).abs().max() > 1e-3
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if ".linear_fc2." in name:
                parameter.mul_(0.25)
    assert_close(multiplied(*inputs), plain(*inputs), FP32_REORDERED_SUM, "logits")


def optimizer() -> None:
    """The update is the published one, in fp64."""
    from megatron.core.optimizer.definition import ElementwiseOptimizer
    from megatron.core.optimizer.definitions import OPTIMIZERS
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    lr, decay, (beta1, beta2) = 0.01, 0.1, (0.9, 0.99)
    config = OptimizerConfig(optimizer="adopt", adam_beta1=beta1, adam_beta2=beta2)
    torch.manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(7, 5))
    weight = parameter.detach().double()
    rule = ElementwiseOptimizer(
        [parameter], OPTIMIZERS["adopt"].elementwise(config), lr=lr, weight_decay=decay
    )
    mean = square = torch.zeros_like(weight)
    for step in range(6):
        gradient = torch.randn(7, 5)
        parameter.grad = gradient.clone()
        rule.step()
        wide = gradient.double()
        if step == 0:
            square = wide**2
            continue
        normalised = wide / square.sqrt().clamp(min=1e-6)
        mean = beta1 * mean + (1 - beta1) * normalised.clamp(-(step**0.25), step**0.25)
        weight = weight - lr * (decay * weight + mean)
        square = beta2 * square + (1 - beta2) * wide**2
        assert_close(parameter.detach(), weight, FP32_ROUNDED_ONCE, "weight")


def make_model(directory: str) -> None:
    """Write a small random Helium."""
    import transformers

    torch.manual_seed(1)
    config = transformers.HeliumConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        head_dim=8, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    transformers.HeliumForCausalLM(config).save_pretrained(directory)


def family(read: str, written: str) -> None:
    """The logits are those of Transformers, and the way out gives the same tensors."""
    import transformers
    from safetensors.torch import load_file

    from tests.unit.hugging_face.models import our_model

    tokens = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(1))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(read)
    ours, _ = our_model(Path(read))
    logits = theirs(tokens).logits
    assert_close(ours(tokens, None, None)[..., :96], logits, FP32_REORDERED_SUM, "logits")
    before, after = (load_file(f"{path}/model.safetensors") for path in (read, written))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    again = transformers.AutoModelForCausalLM.from_pretrained(written)
    assert torch.equal(again(tokens).logits, logits)


def checkpoint_format(native: str, exported: str) -> None:
    """Both hold the same state, to the bit."""
    from megatron.core.dist_checkpointing import load_plain_tensors
    from tools.checkpoint.opening import opened

    one, other = opened(Path(native)), opened(Path(exported))
    assert one.common == other.common
    assert one.objects == other.objects
    tensors, same = load_plain_tensors(one.directory), load_plain_tensors(other.directory)
    assert tensors.keys() == same.keys()
    assert any(key.startswith("optimizer.") for key in tensors)
    assert all(torch.equal(tensor, same[key]) for key, tensor in tensors.items())


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
