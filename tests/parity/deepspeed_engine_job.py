"""What `tests.parity.deepspeed_engine` runs in both programs: the same loop, the same cases.

    python deepspeed_engine_job.py --out FILE --checkpoints DIRECTORY [--port PORT]

Trains a small model with every case of `CASES` on two processes, with `deepspeed` where it is
installed and `megatron_lattice.deepspeed` elsewhere, and writes losses and gradient norms as JSON.
"""

import argparse
import contextlib
import io
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_BUILD_OPS", "0")

import torch
from torch import nn

try:
    import deepspeed
except ImportError:
    import megatron_lattice.deepspeed as deepspeed

RANKS, STEPS, MICRO, WIDTH = 2, 6, 2, 32
CASES = {
    f"stage {stage}, {dtype}, accumulation {accumulation}": (stage, dtype, accumulation)
    for dtype in ("fp32", "bf16", "fp16")
    for stage in range(4)
    for accumulation in (1, 4)
} | {f"resumed, stage {stage}, bf16": (stage, "bf16", 1) for stage in (1, 2, 3)}


class Model(nn.Module):
    """Layers in a list between two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(16, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)
        )
        self.exit = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [b, 4]."""
        hidden = self.entry(x)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.exit(hidden)


def settings(stage: int, dtype: str, accumulation: int) -> dict:
    """Return the configuration of a case."""
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.3,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 1e-2, "eps": 1e-5, "weight_decay": 0.1, "torch_adam": True},
        },
        "scheduler": {
            "type": "WarmupLR",
            "params": {"warmup_num_steps": 4, "warmup_type": "linear", "warmup_max_lr": 1e-2},
        },
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 8},
        "zero_optimization": {"stage": stage},
    }
    if stage > 0:  # where deepspeed takes it
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def start(case: tuple[int, str, int]):
    """Return the engine of a case."""
    torch.manual_seed(0)
    model = Model()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings(*case)
    )
    return engine


def train(engine, case: tuple[int, str, int], seed: int) -> dict[str, list[float]]:
    """Return the losses of this rank and the norms of some steps."""
    _, dtype, accumulation = case
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {"losses": [], "norms": []}
    for _ in range(STEPS * accumulation):
        x = torch.randn(MICRO, 16, generator=generator)
        y = torch.randint(4, (MICRO,), generator=generator)
        loss = nn.functional.cross_entropy(engine(x.to(kind)).float(), y)
        engine.backward(loss)
        engine.step()
        found["losses"].append(loss.item())
        if engine.micro_steps % accumulation == 0:
            norm = engine.get_global_grad_norm()  # deepspeed has none at stage 0
            found["norms"] += [] if norm is None else [float(norm)]
    return found


def run_case(name: str, rank: int, checkpoints: Path) -> dict[str, list[float]]:
    """Train a case; one that resumes continues from where deepspeed has saved it."""
    case = CASES[name]
    engine = start(case)
    if not name.startswith("resumed"):
        return train(engine, case, 10 + rank)
    directory = str(checkpoints / name.replace(" ", "_").replace(",", ""))
    if deepspeed.__name__ == "deepspeed":
        train(engine, case, 10 + rank)
        engine.save_checkpoint(directory)
    else:
        engine.load_checkpoint(directory)
    return train(engine, case, 20 + rank)


def work(rank: int, arguments: argparse.Namespace) -> None:
    """Run one rank."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments.port),
    }  # fmt: skip
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    results: dict[str, object] = {}
    for name in CASES:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                results[name] = run_case(name, rank, Path(arguments.checkpoints))
        except Exception as error:
            results[name] = {"refused": f"{type(error).__name__}: {error}"[:300]}
    if rank == 0:
        Path(arguments.out).write_text(json.dumps(results))


def main() -> int:
    """Parse the command line and start the ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--checkpoints", required=True, help="where deepspeed's are")
    parser.add_argument("--port", type=int, default=29861)
    arguments = parser.parse_args()
    torch.multiprocessing.spawn(work, (arguments,), nprocs=RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
