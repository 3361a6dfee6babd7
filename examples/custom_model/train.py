"""Train a GPT with the changed MLP: torchrun --nproc-per-node 2 examples/custom_model/train.py"""

from pathlib import Path

import torch
import torch.distributed as dist
from swish_mlp import layer_spec

from megatron.core import distributed, parallel_state
from megatron.core.foundation import device
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import TransformerConfig

dist.init_process_group(device.communication_backend())
device.set_local_device(dist.get_node_local_rank())
tp = dist.get_world_size()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp)

config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=192,
    gated_linear_unit=True, add_bias_linear=False, normalization="RMSNorm",
    tensor_model_parallel_size=tp, sequence_parallel=tp > 1,
)  # fmt: skip
model = GPTModel(config, layer_spec(config), 256, 128, position_embedding_type="rope")
ddp_config = distributed.DistributedDataParallelConfig()
model = distributed.DistributedDataParallel(config, ddp_config, model)
optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3), [model])

sources = sorted(Path(__file__).parents[2].glob("megatron/core/**/*.py"))
text = torch.frombuffer(bytearray(b"".join(p.read_bytes() for p in sources)), dtype=torch.uint8)
for step in range(1, 61):
    begin = torch.randint(len(text) - 129, (8, 1), generator=torch.Generator().manual_seed(step))
    sample = text[begin + torch.arange(129)].long().to(device.current_device())
    model.zero_grad_buffer()
    loss = model(sample[:, :-1], None, None, labels=sample[:, 1:]).mean()
    loss.backward()
    distributed.finalize_model_grads([model])
    optimizer.step()
    if step % 20 == 0 and dist.get_rank() == 0:
        slope = model.module.decoder.layers[0].mlp.slope
        print(f"step {step}: loss {loss:.3f}, slopes {slope.min():.3f} ... {slope.max():.3f}")
dist.destroy_process_group()
