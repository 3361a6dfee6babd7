"""The losses and counts of routers of experts."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.load_balancing import TokenGroups
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit.values.comparison import Values
from tests.unit.values.draws import LENGTH, SAMPLES, Draw, train_step

EXPERTS = 6
TOPK = 2
COEFFICIENT = 0.7


class Routed(nn.Module):
    """A router whose weights of experts change no output: its losses alone have a gradient."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=2, num_moe_experts=EXPERTS,
            moe_router_topk=TOPK, add_bias_linear=False, init_method_std=0.8, **options,
        )  # fmt: skip
        self.router = TopKRouter(self.config, ProcessGroupCollection.single())
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            self.router.weight.normal_(0, 0.8, generator=generator)

    def set_input_tensor(self, _: object) -> None:
        """Take nothing: it is the first stage."""

    def forward(self, x: Tensor, padding: Tensor, sequences: Tensor | None) -> Tensor:
        """Return zeros [b, s]; `sequences` numbers the documents of tokens [b, s]."""
        packed = None
        if sequences is not None:
            packed = TokenGroups(sequences.t(), int(sequences.max()) + 1)
        probs, _ = self.router(x.transpose(0, 1), padding.t(), packed)
        return probs.sum() * 0 + torch.zeros(x.shape[:2])


def inputs(drawn: Draw, m: int) -> Tensor:
    return drawn.normal(f"x {m}", SAMPLES, LENGTH, 8)


def sequences(drawn: Draw, m: int) -> Tensor | None:
    """Return the number of each token's document in the micro batch [b, s]; None without."""
    if drawn.documents is None:
        return None
    ids = drawn.documents[m] + LENGTH * torch.arange(SAMPLES)[:, None]
    return ids.unique(return_inverse=True)[1]


def routed_step(options: dict[str, Any], drawn: Draw) -> Values:
    model = Routed(**options)
    found: Values = {}
    for step in range(2):  # the second step reads what the first has counted

        def forward_step(m, model, step=step):
            output = model(inputs(drawn, m + 10 * step), drawn.padding[m], sequences(drawn, m))
            mask = drawn.masks[m]
            return output, lambda out: (
                (out * mask).sum(),
                mask.sum().int(),
                {"lm loss": out.sum()},
            )

        gradients, _ = train_step(drawn, model, forward_step)
        load = model.router.load
        found |= {f"step {step} {name}": grad.clone() for name, grad in gradients.items()}
        found[f"step {step} tokens"] = load.step_assignments.clone()
        for name, value in load.step_losses.items():
            found[f"step {step} {name}"] = torch.tensor(value, dtype=torch.float64)
        if model.router.expert_bias is not None:
            found[f"step {step} bias"] = model.router.expert_bias.clone()
    return found


def routed_formula(name: str, options: dict[str, Any], drawn: Draw) -> Values:
    """Losses and loads of two steps over the tokens that are no padding.

    aux_loss: "Switch Transformers", equations 4 to 6, arXiv 2101.03961, with k experts per token:
    e * sum of (share of the assignments) * (mean score); per micro batch, per sequence (mean over
    documents that hold tokens), or with the shares of the step before. z_loss: "ST-MoE", equation
    5, arXiv 2202.08906.
    The bias: arXiv 2408.15664, algorithm 1.
    """
    weight = Routed(**options).router.weight.detach().double().requires_grad_()
    shares = torch.full((EXPERTS,), 1 / EXPERTS, dtype=torch.float64)
    bias = torch.zeros(EXPERTS, dtype=torch.float64)
    found: Values = {}
    for step in range(2):
        losses, total = [], torch.zeros(EXPERTS, dtype=torch.float64)
        for m, padding in enumerate(drawn.padding):
            logits = inputs(drawn, m + 10 * step).double() @ weight.T
            is_token = (~padding).double()[..., None]
            scores = logits.softmax(-1) if name != "bias" else logits.sigmoid()
            ranked = scores.detach() + bias
            chosen = F.one_hot(ranked.topk(TOPK).indices, EXPERTS).sum(-2) * is_token
            total += chosen.sum((0, 1))
            numbers = sequences(drawn, m)
            if numbers is None:
                numbers = torch.arange(SAMPLES)[:, None].expand(-1, LENGTH)
            of_sequences = []
            for number in numbers[~padding].unique():
                own = (numbers == number) & ~padding
                share = chosen[own].sum(0) / chosen[own].sum()
                of_sequences.append((share * scores[own].mean(0)).sum())
            mean = (scores * is_token).sum((0, 1)) / is_token.sum()
            losses.append({
                "aux_loss": EXPERTS * (chosen.sum((0, 1)) / chosen.sum() * mean).sum(),
                "seq_aux_loss": EXPERTS * torch.stack(of_sequences).mean(),
                "global_aux_loss": EXPERTS * (shares * mean).sum(),
                "z_loss": (logits.logsumexp(-1, keepdim=True) ** 2 * is_token).sum()
                / is_token.sum(),
                "bias": weight.sum() * 0,
            }[name])  # fmt: skip
        loss = sum(losses) / len(losses)
        (found[f"step {step} router.weight"],) = torch.autograd.grad(COEFFICIENT * loss, [weight])
        found[f"step {step} tokens"] = total
        if name == "bias":
            bias += 0.01 * torch.sign(total.mean() - total)
            found[f"step {step} bias"] = bias.clone()
        else:
            found[f"step {step} {name}"] = loss.detach()
        shares = total / total.sum()
    return found


ROUTED: dict[str, dict[str, Any]] = {
    name: {"moe_router_load_balancing_type": name, "moe_aux_loss_coeff": COEFFICIENT}
    for name in ("aux_loss", "seq_aux_loss", "global_aux_loss")
} | {
    "z_loss": {"moe_router_load_balancing_type": "none", "moe_z_loss_coeff": COEFFICIENT},
    "bias": {
        "moe_router_load_balancing_type": "none",
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
        "moe_router_bias_update_rate": 0.01,
    },
}


def plant_in_router(patch):
    right = TopKRouter.forward
    patch.setattr(
        TopKRouter, "forward", lambda self, x, mask, *rest: right(self, x, mask.roll(-1, 0), *rest)
    )
