"""The table of all losses."""

from functools import partial

import pretrain_gpt
import pretrain_vlm
from examples.encoders import pretrain_bert, pretrain_t5
from megatron.post_training import loss_functions
from tests.unit.values.after_pretraining import (
    GRPO_OPTIONS,
    NO_DOCUMENTS,
    answers,
    bert_formula,
    bert_step,
    contrastive_formula,
    counted,
    distillation_formula,
    distillation_step,
    dpo_formula,
    dpo_options,
    grpo_formula,
    labelled,
    last_tokens,
    masked_sum_formula,
    post_training_case,
    reward_formula,
    t5_step,
    vlm_step,
)
from tests.unit.values.comparison import Case, plant_in_batch, plant_in_script
from tests.unit.values.draws import LENGTH, VOCABULARY
from tests.unit.values.language_models import DEPTHS, model_case, plant_in_depths
from tests.unit.values.routers import (
    ROUTED,
    plant_in_router,
    routed_formula,
    routed_step,
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
    )
    for name, options in ROUTED.items()
}
