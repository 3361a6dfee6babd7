"""Trains one GPT by the classes that megatron-core and this project share by name.

Started with the Python of either; `python -P` keeps the folder of this file out of the search. It
imports nothing else, so that both run the same lines. Prints JSON: seconds of the steps, and peak
bytes.

    python -P one_model_peer.py local|transformer_engine '{"layers": 2, "hidden": 64, ...}'
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings

import torch
import torch.distributed as dist

warnings.simplefilter("ignore")


def main() -> None:
    """Build the model, take the steps, print."""
    with tempfile.TemporaryDirectory() as folder:
        train(os.path.join(folder, "store"))


def train(store: str) -> None:
    """Do so, meeting by the file `store`."""
    implementation, sizes = sys.argv[1], json.loads(sys.argv[2])
    is_cpu = os.environ.get("LATTICE_DEVICE") == "cpu" or not torch.accelerator.is_available()
    where = torch.device("cpu") if is_cpu else torch.accelerator.current_accelerator()
    assert where is not None
    backend = "nccl" if where.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    parallel_state.initialize_model_parallel()
    if not is_cpu:  # of a CPU megatron-core knows no generator
        model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=sizes["layers"],
        hidden_size=sizes["hidden"],
        num_attention_heads=sizes["heads"],
        num_query_groups=sizes["kv_heads"],
        ffn_hidden_size=sizes["ffn"],
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        use_cpu_initialization=is_cpu,
    )
    spec = (
        gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec()
        if implementation == "transformer_engine"
        else gpt_layer_specs.get_gpt_layer_local_spec(normalization="RMSNorm")
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=sizes["vocabulary"],
        max_sequence_length=sizes["sequence"],
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    model = model.bfloat16().to(where)
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(config=config, ddp_config=ddp_config, module=model)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-4, bf16=True, params_dtype=torch.bfloat16),
        [chunk],
    )
    shape = (sizes["batch"], sizes["sequence"])
    tokens = torch.randint(sizes["vocabulary"], shape, device=where)
    positions = torch.arange(shape[1], device=where).unsqueeze(0).expand(shape)
    mask = torch.ones(1, 1, shape[1], shape[1], device=where).tril() < 0.5
    seconds = []
    for _ in range(sizes["steps"]):
        begin = time.perf_counter()
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        # Transformer Engine's attention makes the causal mask itself.
        given = None if implementation == "transformer_engine" else mask
        loss = chunk(tokens, positions, given, labels=tokens).float().mean()
        loss.backward()
        finalize_model_grads([chunk])
        optimizer.step()
        if not is_cpu:
            torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - begin)
    peak = 0 if is_cpu else torch.get_device_module(where.type).max_memory_allocated()
    print(json.dumps({"seconds": seconds, "peak": peak, "loss": float(loss)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
