"""The other side of `tests.parity.interop_deepspeed`: run by a Python that has DeepSpeed.

    python interop_deepspeed_peer.py DIRECTORY --stage 0..3 --ranks N --state FILE

Trains a small model for three steps with bf16 and ZeRO, saves a checkpoint with DeepSpeed, and
writes what DeepSpeed itself says the full fp32 weights and moments are.
"""

import argparse
import os
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import torch


def work(rank: int, arguments: argparse.Namespace) -> None:
    """Run one rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.port),
    }  # fmt: skip
    torch.set_num_threads(1)
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3, bias=False))
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": arguments.stage},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    for _ in range(3):
        loss = engine(torch.randn(2, 6).bfloat16()).float().square().mean()
        engine.backward(loss)
        engine.step()
    state = {}
    for name, parameter in model.named_parameters():  # collective: on every rank
        state[f"optimizer.state.fp32_param.{name}"] = safe_get_full_fp32_param(parameter)
        for kind in ("exp_avg", "exp_avg_sq"):
            found = safe_get_full_optimizer_state(parameter, kind)
            state[f"optimizer.state.{kind}.{name}"] = found
    engine.save_checkpoint(arguments.directory, client_state={"iteration": 3})
    if rank == 0:
        torch.save({name: tensor.clone() for name, tensor in state.items()}, arguments.state)


def main() -> int:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--stage", type=int, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--state", required=True)
    parser.add_argument("--port", type=int, default=29856)
    arguments = parser.parse_args()
    torch.multiprocessing.spawn(work, (arguments,), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
