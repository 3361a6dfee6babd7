"""A script written for DeepSpeed, with one changed line: the import.

    torchrun --nproc-per-node 2 examples/deepspeed/train.py --deepspeed \
        --deepspeed_config examples/deepspeed/ds_config.json
"""

import argparse

import torch
from torch import nn

import megatron_lattice.deepspeed as deepspeed  # was: import deepspeed


class Classifier(nn.Module):
    """Classifies three noisy shapes of a signal."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.entry = nn.Linear(32, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU()) for _ in range(4)
        )
        self.exit = nn.Linear(width, 3)

    def forward(self, signal: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(signal)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.exit(hidden)


def signals(count: int = 512) -> list[tuple[torch.Tensor, int]]:
    """Return sines, sawteeth and squares with noise, and the class of each."""
    generator = torch.Generator().manual_seed(0)
    time = torch.linspace(0, 6.28, 32)
    shapes = [torch.sin(2 * time), (2 * time / 3.14) % 2 - 1, torch.sign(torch.sin(2 * time))]
    labels = torch.randint(3, (count,), generator=generator).tolist()
    return [(shapes[i] + 0.5 * torch.randn(32, generator=generator), i) for i in labels]


def main() -> None:
    """Train two epochs, with a checkpoint between them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--save", default=None, help="directory of checkpoints")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()

    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Classifier()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=signals()
    )
    if args.save:
        engine.load_checkpoint(args.save)
    for epoch in range(args.epochs):
        total = 0.0
        for signal, label in loader:
            dtype = next(engine.module.parameters()).dtype
            logits = engine(signal.to(engine.device, dtype))
            loss = nn.functional.cross_entropy(logits.float(), label.to(engine.device))
            engine.backward(loss)
            engine.step()
            total += loss.item()
        if deepspeed.comm.get_rank() == 0:
            print(
                f"epoch {epoch}: loss {total / len(loader):.4f} after {engine.global_steps} steps"
            )
        if args.save:
            engine.save_checkpoint(args.save, client_state={"epoch": epoch})
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    main()
