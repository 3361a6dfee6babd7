"""Losses after pretraining, of masked words, and of images and text."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import pretrain_vlm
from examples.encoders import pretrain_bert, pretrain_t5
from megatron.core.tensor_parallel.vocab_parallel_softmax import IGNORED_LABEL
from megatron.post_training import loss_functions
from tests.unit.values.comparison import (
    Case,
    Given,
    Values,
    by_autograd,
    given,
    mean_of,
    plant_in_batch,
    token_losses,
    values,
)
from tests.unit.values.draws import LENGTH, SAMPLES, VOCABULARY, Draw, objective, train_step

ONE_NORM = "the loss function returns means over sequences or pairs: per-token loss is refused"
NO_DOCUMENTS = "the loss function reads the mask alone"


def given_step(drawn: Draw, name: str, batch_of: Any, shape: tuple[int, ...], **options: Any):
    """Train outputs [b, s, ...] with a loss function of `loss_functions`."""
    model = given(drawn, *shape)

    def forward_step(m, model):
        return model.outputs[m], partial(
            getattr(loss_functions, name), batch_of(drawn, m), **options
        )

    return values(*train_step(drawn, model, forward_step))


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
