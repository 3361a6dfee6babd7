"""A small model on two ranks against the same on one: the layout must not show."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.foundation import device
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.doctor.findings import Finding, State

TIMEOUT_S = 180
TOLERANCE = 1e-4
"""Relative: sums of a few hundred fp32 products in another order, through two layers."""
_VOCABULARY, _LENGTH = 64, 16


def self_test(command: Sequence[str]) -> Finding:
    """Run two ranks as processes of their own and report.

    Args:
        command: runs `run_rank` in the launcher's environment.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [_start(command, rank, port) for rank in range(2)]
    try:
        outputs = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        text = f"two ranks did not finish in {TIMEOUT_S} s: they cannot reach each other"
        return Finding("self-test", "two ranks", text, State.PROBLEM)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.communicate()
    failed = [number for number, rank in enumerate(ranks) if rank.returncode]
    lines = outputs[failed[0] if failed else 0].strip().splitlines() or ["no output"]
    if failed:
        text = f"rank {failed[0]} failed: {lines[-1]}"
        return Finding("self-test", "two ranks", text, State.PROBLEM)
    return Finding("self-test", "two ranks", lines[-1])


def _start(command: Sequence[str], rank: int, port: int) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    if device.device_type() != "cpu" and torch.accelerator.device_count() < 2:
        environment["LATTICE_DEVICE"] = "cpu"  # two ranks cannot share a device under NCCL
    return subprocess.Popen(
        list(command),
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def run_rank() -> int:
    """Compute a loss and its gradients alone and with the other rank; return the exit status."""
    rank = int(os.environ["RANK"])
    where = device.set_local_device(rank)
    backend = device.communication_backend()
    dist.init_process_group(backend, rank=rank, world_size=2)
    ones = torch.ones(4, device=where)
    dist.all_reduce(ones)
    if ones.tolist() != [2.0] * 4:
        print(f"{backend} summed two ones to {ones.tolist()}")
        return 1
    alone = _loss_and_gradient(ProcessGroupCollection.single())
    pair = ProcessGroupCollection.single().with_groups(tp=dist.group.WORLD)
    together = _loss_and_gradient(pair)
    errors = [_relative(a, b) for a, b in zip(together, alone, strict=True)]
    dist.destroy_process_group()
    text = (
        f"tensor parallel 2 over {backend} on {where.type}: loss {float(alone[0]):.6f}, "
        f"largest relative difference from one rank {max(errors):.1e}"
    )
    print(text, flush=True)
    return int(not max(errors) < TOLERANCE)


def time_all_reduce(num_bytes: int, repeats: int = 5) -> float:
    """Sum ones over all ranks; return the bytes a second of each rank, or 0 if the sum is wrong.

    Communication:
        `repeats` + 2 all-reduces over all ranks; all leave the last one, of a number, together.
    """
    ones = torch.ones(max(1, num_bytes // 4), device=device.current_device())
    dist.all_reduce(ones)
    is_right = bool((ones == dist.get_world_size()).all())
    device.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        dist.all_reduce(ones.fill_(1.0))
    device.synchronize()
    elapsed = time.perf_counter() - begin
    is_right = is_right and bool((ones == dist.get_world_size()).all())
    dist.all_reduce(ones[:1])
    device.synchronize()
    return repeats * ones.numel() * ones.element_size() / elapsed if is_right else 0.0


def _loss_and_gradient(groups: ProcessGroupCollection) -> list[torch.Tensor]:
    """Return the loss, and a gradient of a split and of a whole weight, gathered."""
    rng_state().set_seed(7)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=groups.tp.size(),
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model: Any = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=_VOCABULARY,
        max_sequence_length=_LENGTH,
        pg_collection=groups,
    )
    model.to(device.current_device())
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(_VOCABULARY, (2, _LENGTH + 1), generator=generator)
    text = text.to(device.current_device())
    loss = model(text[:, :-1], None, None, labels=text[:, 1:].contiguous()).mean()
    loss.backward()
    layer = model.decoder.layers[0]
    split = layer.self_attention.linear_proj.weight.grad  # [h, h/tp]
    full = gather_from_tensor_model_parallel_region(split, groups.tp)
    return [loss.detach(), full, model.decoder.final_layernorm.weight.grad]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def python_of(script: str, *arguments: str) -> list[str]:
    """Return the command line that runs a script with this interpreter."""
    return [sys.executable, script, *arguments]
