"""Every loss twice: by the product, through a schedule, and as a formula in fp64.

A case returns the gradients of a step and what the step reports. `plant` shifts the mask by one
token at the place where the product reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pretrain_bert
import pretrain_gpt
import pretrain_t5
import pretrain_vlm
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.post_training import loss_functions
from tests.unit.values.draws import LENGTH, SAMPLES, VOCABULARY, Draw, objective, train_step

Values = dict[str, Tensor]
"""Names of parameters -> gradients, and names of reports -> means []."""
DEPTHS, WEIGHT, EXPERTS, TOPK, COEFFICIENT = 2, 0.3, 6, 2, 0.7
ONE_NORM = "the loss function returns means over sequences or pairs: per-token loss is refused"
NO_DOCUMENTS = "the loss function reads the mask alone"
ROUTER_NORM = "a router's loss is weighted by the tokens that it routes"
UNMENDED_PER_TOKEN = {"aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss"}


@dataclass(frozen=True)
class Case:
    """One loss.

    Attributes:
        product, formula: the values of a step.
        plant: shifts the mask in the product.
        without: feature of the draws that the loss is not tested with -> the reason.
    """

    product: Callable[[Draw], Values]
    formula: Callable[[Draw], Values]
    plant: Callable[[pytest.MonkeyPatch], None]
    without: Mapping[str, str] = field(default_factory=dict)

    def takes(self, drawn: Draw) -> bool:
        """Return whether a draw has none of the features that the loss is not tested with."""
        return not ("per token" in self.without and drawn.per_token)


def shifted(mask: Tensor) -> Tensor:
    """Return a mask [b, s] that belongs to the tokens before."""
    return mask.roll(-1, dims=1)


def values(gradients: Mapping[str, Tensor], reports: Mapping[str, float]) -> Values:
    """Join what a step gave."""
    return {**gradients, **{n: torch.tensor(v, dtype=torch.float64) for n, v in reports.items()}}


def by_autograd(model: nn.Module, loss: Tensor, reports: Mapping[str, Tensor]) -> Values:
    """Return the gradients of a formula's loss, and its reports."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    grads = {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}
    return {**grads, **{name: value.detach() for name, value in reports.items()}}


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return -log p of labels [b, s] under logits [b, s, v], in fp64."""
    return -logits.double().log_softmax(-1).gather(-1, labels[..., None])[..., 0]


# Language models ----------------------------------------------------------------------------------


def gpt(depths: int | None = None, fused: bool = False) -> GPTModel:
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12,
        hidden_dropout=0.0, attention_dropout=0.0, init_method_std=0.3,
        mtp_num_layers=depths, mtp_loss_scaling_factor=WEIGHT, cross_entropy_loss_fusion=fused,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config, spec, VOCABULARY, LENGTH, position_embedding_type="rope",
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False),
        pg_collection=ProcessGroupCollection.single(),
    )  # fmt: skip


def packed(drawn: Draw, m: int) -> PackedSeqParams | None:
    return None if drawn.documents is None else PackedSeqParams(seq_idx=drawn.documents[m])


def gpt_step(script: Any, model: GPTModel, drawn: Draw, *, passes_mask: bool = False) -> Values:
    """Train with the loss function of a script."""

    def forward_step(m, model):
        mask = drawn.masks[m]
        output = model(
            drawn.text[m][:, :-1], None, None, labels=drawn.text[m][:, 1:],
            packed_seq_params=packed(drawn, m), loss_mask=mask if passes_mask else None,
        )  # fmt: skip
        return output, partial(script.loss_func, mask)

    return values(*train_step(drawn, model, forward_step))


def gpt_formula(model: GPTModel, drawn: Draw, depths: int = 0) -> Values:
    sums, counts = [], []
    learned = [[] for _ in range(depths)]
    for m, (text, mask) in enumerate(zip(drawn.text, drawn.masks, strict=True)):
        labels, documents = text[:, 1:], packed(drawn, m)
        of_depths = dense_logits(model, text[:, :-1], labels, documents, depths)
        total = (token_losses(next(of_depths), labels) * mask).sum()
        for k, logits in enumerate(of_depths, 1):
            # At position i depth k predicts the label of position i + k, whose mask decides.
            later = token_losses(logits[:, :-k], labels[:, k:])
            weights = mask[:, k:].double()
            if documents is not None:
                ids = documents.seq_idx
                weights = weights * (ids[:, :-k] == ids[:, k:])
            total = total + WEIGHT / depths * (later * weights).sum()
            learned[k - 1].append(((later * weights).sum(), weights.sum()))
        sums.append(total)
        counts.append(mask.sum().double())
    reports = {"lm loss": mean_of(main_sums(model, drawn), counts)}
    for k, pairs in enumerate(learned, 1):
        reports[f"mtp_{k} loss"] = mean_of(*zip(*pairs, strict=True))
    return by_autograd(model, objective(drawn, sums, counts), reports)


def main_sums(model: GPTModel, drawn: Draw) -> list[Tensor]:
    found = []
    for m, (text, mask) in enumerate(zip(drawn.text, drawn.masks, strict=True)):
        logits = model(text[:, :-1], None, None, packed_seq_params=packed(drawn, m))
        found.append((token_losses(logits, text[:, 1:]) * mask).sum())
    return found


def mean_of(sums: Any, counts: Any) -> Tensor:
    return sum(sums) / sum(counts).clamp(min=1)


def dense_logits(model, tokens, labels, documents, depths):
    """Yield the logits [b, s, v] of the next token and of each depth, by the model's own layers.

    DeepSeek-AI, "DeepSeek-V3 Technical Report", equations 21 to 23, arXiv 2412.19437.
    """
    attention = {"rotary_pos_emb": model.rotary_pos_emb(LENGTH), "packed_seq_params": documents}
    states = model.decoder(model.embedding(tokens, None), None, **attention)
    head = model.output_layer.weight
    yield (states @ head.T).transpose(0, 1)
    for k in range(1, depths + 1):
        layer = model.mtp.layers[k - 1]
        inputs = F.pad(labels[:, k - 1 :], (0, k - 1))
        embedded = model.embedding.word_embeddings(inputs.t())
        joined = torch.cat((layer.enorm(embedded), layer.hnorm(states)), -1)
        states, _ = layer.transformer_layer(joined @ layer.eh_proj.weight.T, None, **attention)
        states = layer.final_layernorm(states)
        yield (states @ head.T).transpose(0, 1)


def plant_in_script(script: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch):
        right = script.loss_func
        patch.setattr(script, "loss_func", lambda mask, *rest: right(shifted(mask), *rest))

    return plant


def plant_in_batch(owner: Any, name: str, entry: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Return what lets a loss function read an entry of its batch that belongs to other tokens."""

    def plant(patch):
        right = getattr(owner, name)

        def wrong(batch, *rest, **options):
            changed = batch[entry]
            if entry != "labels":
                changed = shifted(changed)
            else:  # -100 takes a token out
                counts = shifted(changed != IGNORED_LABEL)
                changed = changed.clamp(min=0).where(counts, IGNORED_LABEL)
            return right({**batch, entry: changed}, *rest, **options)

        patch.setattr(owner, name, wrong)

    return plant


def plant_in_depths(patch):
    right = multi_token_prediction.shift_left
    patch.setattr(
        multi_token_prediction,
        "shift_left",
        lambda x, k, cp: right(x, k - 1 if x.is_floating_point() else k, cp),
    )


# Losses after pretraining -------------------------------------------------------------------------


class Given(nn.Module):
    """A model whose outputs are its parameters, one per micro batch."""

    def __init__(self, *outputs: Tensor) -> None:
        super().__init__()
        self.config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2)
        self.outputs = nn.ParameterList(outputs)

    def set_input_tensor(self, _: object) -> None:
        """Take nothing: it is the first stage."""


def given_step(drawn: Draw, name: str, batch_of: Any, shape: tuple[int, ...], **options: Any):
    """Train outputs [b, s, ...] with a loss function of `loss_functions`."""
    model = given(drawn, *shape)

    def forward_step(m, model):
        return model.outputs[m], partial(
            getattr(loss_functions, name), batch_of(drawn, m), **options
        )

    return values(*train_step(drawn, model, forward_step))


def given(drawn: Draw, *shape: int) -> Given:
    outputs = (drawn.normal(f"output {m}", SAMPLES, *shape) for m in range(drawn.num_microbatches))
    return Given(*outputs)


def labelled(drawn: Draw, m: int) -> dict[str, Tensor]:
    labels = drawn.text[m][:, 1:].masked_fill(drawn.masks[m] == 0, IGNORED_LABEL)
    shape = (SAMPLES, LENGTH)
    return {
        "labels": labels,
        "reference_log_probs": drawn.normal(f"reference {m}", *shape) * drawn.masks[m] - 0.5,
        "old_log_probs": drawn.normal(f"old {m}", *shape) - 2.5,
        "advantages": drawn.normal(f"advantage {m}", SAMPLES, 1).expand(shape),
    }


def answers(drawn: Draw, m: int) -> dict[str, Tensor]:
    """Return a batch as a preference loss takes it: a reference of 0 outside of answers."""
    batch = labelled(drawn, m)
    return {**batch, "reference_log_probs": batch["reference_log_probs"] * drawn.masks[m]}


def per_microbatch(drawn: Draw, shape: tuple[int, ...], loss_of: Any) -> Values:
    """Return the values of a formula (micro batch, outputs in fp64) -> (loss, reports)."""
    model = given(drawn, *shape)
    found = [loss_of(m, model.outputs[m].double()) for m in range(drawn.num_microbatches)]
    loss = sum(loss for loss, _ in found) / len(found)
    reports = {n: sum(r[n] for _, r in found) / len(found) for n in found[0][1]}
    return by_autograd(model, loss, reports)


DPO_OPTIONS = ({"beta": 0.4, "label_smoothing": 0.2}, {"kind": "hinge"}, {"kind": "ipo"})


def dpo_options(drawn: Draw) -> dict[str, Any]:
    return DPO_OPTIONS[drawn.seed // 2 % 3]


def dpo_formula(drawn: Draw) -> Values:
    options = {"beta": 0.1, "label_smoothing": 0.0, "kind": "sigmoid"} | dpo_options(drawn)

    def loss_of(m, logits):
        mask = drawn.masks[m].double()
        policy = -(token_losses(logits, drawn.text[m][:, 1:]) * mask).sum(1)
        reference = answers(drawn, m)["reference_log_probs"].double().sum(1)
        if options["kind"] == "ipo":
            lengths = mask.sum(1).clamp(min=1)
            policy, reference = policy / lengths, reference / lengths
        reward = options["beta"] * (policy - reference)
        margin = reward[::2] - reward[1::2]
        losses = {
            "sigmoid": (1 - options["label_smoothing"]) * F.softplus(-margin)
            + options["label_smoothing"] * F.softplus(margin),
            "hinge": (1 - margin).clamp(min=0),
            "ipo": (margin / options["beta"] - 1 / (2 * options["beta"])) ** 2,
        }[options["kind"]]
        loss = losses.mean()
        accuracy = (margin > 0).double().mean()
        names = ("dpo loss", "reward margin", "reward accuracy")
        return loss, dict(zip(names, (loss, margin.mean(), accuracy), strict=True))

    return per_microbatch(drawn, (LENGTH, VOCABULARY), loss_of)


GRPO_OPTIONS: dict[str, Any] = dict(
    temperature=1.5, entropy_coef=0.1, kl_coef=0.3, clip_ratio=0.2, clip_ratio_high=0.4
)


def grpo_formula(drawn: Draw) -> Values:
    def loss_of(m, logits):
        batch, mask = labelled(drawn, m), drawn.masks[m].double()
        log_p = (logits / 1.5).log_softmax(-1)
        chosen = log_p.gather(-1, drawn.text[m][:, 1:, None])[..., 0]
        ratio = (chosen - batch["old_log_probs"]).exp()
        free, bound = ratio * batch["advantages"], ratio.clamp(0.8, 1.4) * batch["advantages"]
        reference = batch["reference_log_probs"].double()
        kl = (reference - chosen).exp() - (reference - chosen) - 1
        entropy = -(log_p.exp() * log_p).sum(-1)
        losses = -torch.minimum(free, bound) + 0.3 * kl - 0.1 * entropy

        def mean(x):  # over the tokens of a sequence, then over sequences
            return ((x * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()

        loss = mean(losses)
        return loss, {
            "policy loss": loss,
            "entropy": mean(entropy),
            "clipped": mean((bound < free).double()),
        }

    return per_microbatch(drawn, (LENGTH, VOCABULARY), loss_of)


def distillation_step(drawn: Draw) -> Values:
    model = given(drawn, LENGTH, VOCABULARY)

    def forward_step(m, model):
        return model.outputs[m], partial(
            loss_functions.distillation_loss_func, labelled(drawn, m), teacher(drawn, m),
            temperature=2.0,
        )  # fmt: skip

    return values(*train_step(drawn, model, forward_step))


def teacher(drawn: Draw, m: int) -> Tensor:
    return drawn.normal(f"teacher {m}", SAMPLES, LENGTH, VOCABULARY)


def distillation_formula(drawn: Draw) -> Values:
    """G. Hinton et al., "Distilling the Knowledge in a Neural Network", section 2, 1503.02531."""
    model, sums, counts = given(drawn, LENGTH, VOCABULARY), [], []
    for m, mask in enumerate(drawn.masks):
        student = (model.outputs[m].double() / 2).log_softmax(-1)
        wanted = (teacher(drawn, m).double() / 2).log_softmax(-1)
        divergence = (wanted.exp() * (wanted - student)).sum(-1)
        sums.append(4 * (divergence * mask).sum())
        counts.append(mask.sum().double())
    return by_autograd(
        model, objective(drawn, sums, counts), {"distillation loss": mean_of(sums, counts)}
    )


def last_tokens(drawn: Draw, m: int) -> dict[str, Tensor]:
    """Return a batch that marks the last token before the padding, where the reward is."""
    last = (~drawn.padding[m]).sum(1, keepdim=True) - 1
    mask = torch.zeros(SAMPLES, LENGTH).scatter_(1, last, 1.0)
    return {"loss_mask": mask, "margins": torch.full((SAMPLES, LENGTH), 0.3)}


def reward_formula(drawn: Draw) -> Values:
    """L. Ouyang et al., section 3.5, arXiv 2203.02155; the margin: "Llama 2", section 3.2.2."""

    def loss_of(m, outputs):
        last = (~drawn.padding[m]).sum(1) - 1
        rewards = outputs[range(SAMPLES), last, 0]
        margin = rewards[::2] - rewards[1::2]
        loss = F.softplus(-(margin - 0.3)).mean()
        return loss, {"reward loss": loss, "reward accuracy": (margin > 0).double().mean()}

    return per_microbatch(drawn, (LENGTH, 1), loss_of)


def counted(drawn: Draw, m: int) -> dict[str, Tensor]:
    return {"loss_mask": drawn.masks[m]}


def contrastive_formula(drawn: Draw) -> Values:
    """T. Gao et al., "SimCSE", equation 1, arXiv 2104.08821."""

    def loss_of(m, vectors):
        mask = drawn.masks[m].double()[..., None]
        pooled = (vectors * mask).sum(1) / mask.sum(1).clamp(min=1)
        unit = pooled / pooled.norm(dim=-1, keepdim=True).clamp(min=1e-12)
        scores = unit[::2] @ unit[1::2].T / 0.5
        loss = -scores.log_softmax(-1).diagonal().mean()
        return loss, {"contrastive loss": loss}

    return per_microbatch(drawn, (LENGTH, 5), loss_of)


# Masked words -------------------------------------------------------------------------------------


def bert_step(drawn: Draw) -> Values:
    model = words_and_orders(drawn)

    def forward_step(m, model):
        batch = {
            "loss_mask": drawn.masks[m].long(),
            "is_random": order_labels(drawn, m),
            "total": drawn.masks[m].sum(),
        }
        words, orders = model.outputs[2 * m : 2 * m + 2]
        return (words, orders), partial(pretrain_bert.loss_func, batch)

    return values(*train_step(drawn, model, forward_step))


def words_and_orders(drawn: Draw) -> Given:
    outputs = []
    for m in range(drawn.num_microbatches):
        outputs += [drawn.normal(f"words {m}", SAMPLES, LENGTH).abs()]
        outputs += [drawn.normal(f"orders {m}", SAMPLES, 2)]
    return Given(*outputs)


def order_labels(drawn: Draw, m: int) -> Tensor:
    return torch.randint(2, (SAMPLES,), generator=drawn.generator(f"labels {m}"))


def bert_formula(drawn: Draw) -> Values:
    """J. Devlin et al., "BERT", section 3.1 and appendix A.2, arXiv 1810.04805: the sum of the mean
    loss of the hidden words and the mean loss of the order, which micro batches weigh alike."""
    model, sums, counts, orders = words_and_orders(drawn), [], [], []
    words = []
    for m, mask in enumerate(drawn.masks):
        losses, logits = (x.double() for x in model.outputs[2 * m : 2 * m + 2])
        labels = order_labels(drawn, m)[:, None]
        orders.append(-logits.log_softmax(-1).gather(1, labels).mean())
        words.append((losses * mask).sum())
        counts.append(mask.sum().double())
        sums.append(words[-1] + orders[-1] * counts[-1])
    reports = {"lm loss": mean_of(words, counts), "sop loss": sum(orders) / len(orders)}
    return by_autograd(model, objective(drawn, sums, counts), reports)


def t5_step(drawn: Draw) -> Values:
    model = given(drawn, LENGTH)

    def forward_step(m, model):
        return model.outputs[m], partial(pretrain_t5.loss_func, {"loss_mask": drawn.masks[m]})

    return values(*train_step(drawn, model, forward_step))


def masked_sum_formula(drawn: Draw) -> Values:
    model = given(drawn, LENGTH)
    pairs = list(zip(model.outputs, drawn.masks, strict=True))
    sums = [(losses.double() * mask).sum() for losses, mask in pairs]
    counts = [mask.sum().double() for mask in drawn.masks]
    return by_autograd(model, objective(drawn, sums, counts), {"lm loss": mean_of(sums, counts)})


def vlm_step(drawn: Draw) -> Values:
    model = given(drawn, LENGTH)

    def forward_step(m, model):
        return model.outputs[m], partial(pretrain_vlm.loss_func, drawn.masks[m])

    return values(*train_step(drawn, model, forward_step))


# Routers of experts -------------------------------------------------------------------------------


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

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return zeros [b, s]."""
        probs, _ = self.router(x.transpose(0, 1), padding.t())
        return probs.sum() * 0 + torch.zeros(x.shape[:2])


def inputs(drawn: Draw, m: int) -> Tensor:
    return drawn.normal(f"x {m}", SAMPLES, LENGTH, 8)


def routed_step(options: dict[str, Any], drawn: Draw) -> Values:
    model = Routed(**options)
    found: Values = {}
    for step in range(2):  # the second step reads what the first has counted

        def forward_step(m, model, step=step):
            output = model(inputs(drawn, m + 10 * step), drawn.padding[m])
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
    sequences), or with the shares of the step before. z_loss: "ST-MoE", equation 5, 2202.08906.
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
            of_sequence = chosen.sum(1) / chosen.sum((1, 2), keepdim=False)[:, None]
            means = (scores * is_token).sum(1) / is_token.sum(1)
            mean = (scores * is_token).sum((0, 1)) / is_token.sum()
            losses.append({
                "aux_loss": EXPERTS * (chosen.sum((0, 1)) / chosen.sum() * mean).sum(),
                "seq_aux_loss": EXPERTS * (of_sequence * means).sum(-1).mean(),
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


# The table ----------------------------------------------------------------------------------------


def model_case(script: Any, plant: Any, **options: Any) -> Case:
    depths, fused = options.get("depths"), options.get("fused", False)
    return Case(
        lambda drawn: gpt_step(script, gpt(depths, fused), drawn, passes_mask=fused),
        lambda drawn: gpt_formula(gpt(depths), drawn, depths or 0),
        plant,
    )


def post_training_case(name: str, batch_of: Any, shape: Any, formula: Any, entry: str,
                       options: Any = None) -> Case:  # fmt: skip
    return Case(
        lambda drawn: given_step(
            drawn, name, batch_of, shape, **(options(drawn) if options else {})
        ),
        formula,
        plant_in_batch(loss_functions, name, entry),
        {"per token": ONE_NORM, "several documents": NO_DOCUMENTS},
    )


_LOGITS = (LENGTH, VOCABULARY)
CASES: dict[str, Case] = {
    "next token": model_case(pretrain_gpt, plant_in_script(pretrain_gpt)),
    "next token, fused": model_case(pretrain_gpt, plant_in_script(pretrain_gpt), fused=True),
    "later tokens": model_case(pretrain_gpt, plant_in_depths, depths=DEPTHS),
    "preferences": post_training_case(
        "dpo_loss_func", answers, _LOGITS, dpo_formula, "labels", dpo_options
    ),
    "policy": post_training_case(
        "grpo_loss_func", labelled, _LOGITS, grpo_formula, "labels", lambda _: GRPO_OPTIONS
    ),
    "rewards": post_training_case(
        "reward_loss_func", last_tokens, (LENGTH, 1), reward_formula, "loss_mask"
    ),
    "embeddings": post_training_case(
        "contrastive_loss_func",
        counted,
        (LENGTH, 5),
        contrastive_formula,
        "loss_mask",
        lambda _: {"temperature": 0.5},
    ),  # fmt: skip
    "distillation": Case(
        distillation_step,
        distillation_formula,
        plant_in_batch(loss_functions, "distillation_loss_func", "labels"),
        {"several documents": NO_DOCUMENTS},
    ),
    "masked words": Case(
        bert_step,
        bert_formula,
        plant_in_batch(pretrain_bert, "loss_func", "loss_mask"),
        {"several documents": "a sample is one document"},
    ),
    "masked spans": Case(
        t5_step,
        masked_sum_formula,
        plant_in_batch(pretrain_t5, "loss_func", "loss_mask"),
        {"several documents": NO_DOCUMENTS},
    ),
    "images and text": Case(
        vlm_step,
        masked_sum_formula,
        plant_in_script(pretrain_vlm),
        {"several documents": NO_DOCUMENTS},
    ),
} | {
    f"router: {name}": Case(
        partial(routed_step, options),
        partial(routed_formula, name, options),
        plant_in_router,
        {"several documents": "the router takes the padding alone"}
        | ({"per token": ROUTER_NORM} if name in UNMENDED_PER_TOKEN else {}),
    )
    for name, options in ROUTED.items()
}
