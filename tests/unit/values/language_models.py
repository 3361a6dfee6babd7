"""The losses of the next token and of later tokens."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.unit.values.comparison import Case, Values, by_autograd, mean_of, token_losses, values
from tests.unit.values.draws import LENGTH, VOCABULARY, Draw, objective, train_step

DEPTHS = 2
WEIGHT = 0.3


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


def plant_in_depths(patch):
    right = multi_token_prediction.shift_left
    patch.setattr(
        multi_token_prediction,
        "shift_left",
        lambda x, k, cp: right(x, k - 1 if x.is_floating_point() else k, cp),
    )


def model_case(script: Any, plant: Any, **options: Any) -> Case:
    depths, fused = options.get("depths"), options.get("fused", False)
    return Case(
        lambda drawn: gpt_step(script, gpt(depths, fused), drawn, passes_mask=fused),
        lambda drawn: gpt_formula(gpt(depths), drawn, depths or 0),
        plant,
    )
