"""A plain module, and its training by a loop without an engine."""

import torch
import torch.nn.functional as F
from torch import nn

STEPS, REPLICAS, MICRO, ACCUMULATION = 3, 2, 2, 2
WIDTH, VOCABULARY = 24, 37
LEARNING_RATE, EPSILON, CLIP = 1e-2, 1e-5, 0.5


class Model(nn.Module):
    """A table, layers in a list and in a row, and a head with the table's weights."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.middle = nn.Sequential(nn.Linear(WIDTH, 31), nn.Tanh(), nn.Linear(31, WIDTH))
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        self.unused = nn.Linear(3, 3)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, ids):
        hidden = self.table(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden + self.middle(hidden))


def loss_of(model, ids):
    return F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())


def micro_batch(step, number, rank):
    """Return ids [MICRO, 7] of a micro batch of a replica."""
    seed = 1000 * step + 10 * number + rank
    return torch.randint(VOCABULARY, (MICRO, 7), generator=torch.Generator().manual_seed(seed))


def train_serially(optimizer_of=None, replicas=REPLICAS):
    """Return (losses of the first replica, norms, weights after the last step)."""
    model = Model()
    make = optimizer_of or (
        lambda p: torch.optim.AdamW(p, lr=LEARNING_RATE, eps=EPSILON, weight_decay=0.1)
    )
    optimizer = make(model.parameters())
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(ACCUMULATION):
            for rank in range(replicas):
                loss = loss_of(model, micro_batch(step, number, rank))
                (loss / (ACCUMULATION * replicas)).backward()
                losses += [loss.item()] if rank == 0 else []
        for parameter in model.parameters():
            if parameter.grad is None:  # decay continues without a gradient
                parameter.grad = torch.zeros_like(parameter)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def settings(stage, **more):
    """Return the configuration of the same training."""
    return {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "eps": EPSILON, "weight_decay": 0.1},
        },
        "zero_optimization": {"stage": stage, "overlap_comm": True},
        **more,
    }


def train(engine, rank, steps=range(STEPS)):
    """Train with the engine; return (losses of this replica, norms)."""
    losses, norms = [], []
    for step in steps:
        for number in range(ACCUMULATION):
            loss = loss_of(engine, micro_batch(step, number, rank))
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        norms.append(engine.get_global_grad_norm())
    return losses, norms
