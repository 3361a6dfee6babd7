"""Later tokens are predicted as section 2.2 of the DeepSeek-V3 report says."""

import pytest
import torch

from megatron.core.context_parallel import shift_left
from megatron.core.foundation.errors import ConfigError
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel.stage import LossSettings, Stage, StepReport
from megatron.core.topology.group import SINGLE_RANK
from megatron.core.transformer.transformer_config import TransformerConfig
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

LENGTH, BATCH, VOCABULARY, WEIGHT = 12, 2, 40, 0.3


def make_model(depths=2, is_tied=False, **fields):
    config = TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=2, attention_dropout=0.0,
        mtp_num_layers=depths, mtp_loss_scaling_factor=WEIGHT, init_method_std=0.2,
        **{"hidden_dropout": 0.0} | fields,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec()
    return GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH,
        position_embedding_type="rope", share_embeddings_and_output_weights=is_tied,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, False),
    )  # fmt: skip


def by_hand(model, text, documents):
    """Return the summed loss of the next tokens; for each depth (sample, position) -> its loss."""
    tokens, labels = text[:, :LENGTH], text[:, 1:]
    packed = None if documents is None else PackedSeqParams(seq_idx=documents)
    angles = model.rotary_pos_emb(LENGTH)
    states = model.decoder(
        model.embedding(tokens, None), None, rotary_pos_emb=angles, packed_seq_params=packed
    )
    head = model.output_layer.weight
    head = model.shared_embedding_or_output_weight() if head is None else head

    def cross_entropy(hidden, targets):
        return torch.nn.functional.cross_entropy(
            (hidden @ head.T).flatten(0, 1), targets.t().flatten(), reduction="none"
        ).view(LENGTH, BATCH)

    main, later = cross_entropy(states, labels).sum(), []
    depths = model.config.mtp_num_layers
    for k in range(1, depths + 1):
        layer = model.mtp.layers[0 if model.config.mtp_use_repeated_layer else k - 1]
        ahead = torch.zeros_like(labels)
        ahead[:, : LENGTH - k] = labels[:, k:]
        inputs = torch.zeros_like(labels)
        inputs[:, : LENGTH - k + 1] = labels[:, k - 1 :]
        joined = torch.cat(
            (layer.enorm(model.embedding.word_embeddings(inputs.t())), layer.hnorm(states)), -1
        )
        states, _ = layer.transformer_layer(
            joined @ layer.eh_proj.weight.T, None, rotary_pos_emb=angles, packed_seq_params=packed
        )
        states = layer.final_layernorm(states)
        losses = cross_entropy(states, ahead)
        later.append({
            (sample, position): losses[position, sample]
            for sample in range(BATCH)
            for position in range(LENGTH - k)
            if documents is None or documents[sample, position] == documents[sample, position + k]
        })  # fmt: skip
    return main, later


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("repeats", [False, True])
def test_the_gradient_is_that_of_all_losses_and_the_loss_that_of_the_next_token(
    repeats, has_documents, is_tied, fused
):
    model = make_model(
        is_tied=is_tied, cross_entropy_loss_fusion=fused, mtp_use_repeated_layer=repeats
    )
    assert len(model.mtp.layers) == (1 if repeats else 2)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    documents = None
    if has_documents:
        documents = torch.tensor([[0] * 5 + [5] * 7, [0] * 9 + [9] * 3], dtype=torch.int32)
    main, later = by_hand(model, text, documents)
    extra = sum(sum(losses.values()) for losses in later) * WEIGHT / len(later)
    names = [name for name, _ in model.named_parameters()]
    expected = torch.autograd.grad(main + extra, list(model.parameters()))
    packed = None if documents is None else PackedSeqParams(seq_idx=documents)
    loss = model(text[:, :LENGTH], None, None, labels=text[:, 1:], packed_seq_params=packed)
    assert_close(loss.sum(), main, FP32_REORDERED_SUM, "loss")
    loss.sum().backward()
    for name, parameter, wanted in zip(names, model.parameters(), expected, strict=True):
        assert_close(parameter.grad, wanted, FP32_REORDERED_SUM, f"gradient of {name}")


def test_each_depths_loss_is_reported_as_the_mean_over_tokens_that_are_learned():
    model = make_model()
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    is_learned = torch.rand(BATCH, LENGTH) < 0.7
    labels, reported = text[:, 1:], StepReport()

    def forward_step(_, model):
        loss = model(text[:, :LENGTH], None, None, labels=labels)
        mask = is_learned.float()
        return loss, lambda out: ((out * mask).sum(), is_learned.sum(), {"lm loss": out.detach()})

    settings = LossSettings(num_microbatches=4, cp_group=SINGLE_RANK, scale=lambda loss: 8 * loss)
    stage = Stage(model, forward_step, None, is_last=True, loss=settings, reported=reported)
    stage.forward(0, None)
    stage.backward(0, None)
    (entry,) = reported.entries
    assert list(entry) == ["lm loss", "mtp_1 loss", "mtp_2 loss"]
    _, later = by_hand(model, text, None)
    for depth, losses in enumerate(later, 1):
        learned = [loss for (b, i), loss in losses.items() if is_learned[b, i + depth]]
        total, count = entry[f"mtp_{depth} loss"]
        assert count == len(learned)
        assert_close(total, sum(learned), FP32_REORDERED_SUM, f"depth {depth}")


def test_a_layer_for_all_depths_drops_other_values_in_each():
    model = make_model(mtp_use_repeated_layer=True, hidden_dropout=0.5)
    masks = []
    model.mtp.layers[0].transformer_layer.register_forward_hook(
        # What both branches dropped is the input again.
        lambda _layer, inputs, output: masks.append(output[0] == inputs[0])
    )
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    model(text[:, :LENGTH], None, None, labels=text[:, 1:])
    assert len(masks) == 2 and not masks[0].equal(masks[1])


def test_evaluation_predicts_the_next_token_only():
    model = make_model().eval()
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    model.mtp.predictions = None  # would fail if called
    with torch.no_grad():
        loss = model(text[:, :LENGTH], None, None, labels=text[:, 1:])
    assert loss.shape == (BATCH, LENGTH)


def test_later_positions_end_with_the_sequence():
    x = torch.arange(6).view(1, 6)
    assert shift_left(x, 2, SINGLE_RANK).tolist() == [[2, 3, 4, 5, 0, 0]]
    assert shift_left(x, 9, SINGLE_RANK).tolist() == [[0] * 6]


def test_a_layout_that_predicts_in_several_stages_is_refused():
    with pytest.raises(ConfigError, match="in several stages"):
        make_model(2, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ettm|mL")


def test_a_stage_that_predicts_needs_labels():
    model = make_model(1, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ettm|L")
    model.post_process = False
    text = torch.randint(VOCABULARY, (BATCH, LENGTH))
    with pytest.raises(ConfigError, match="got no labels"):
        model(text, None, None)
    assert model(text, None, None, labels=text).shape == (2 * LENGTH, BATCH, 16)
    with torch.no_grad():
        assert model(text, None, None).shape == (LENGTH, BATCH, 16)
    assert model.eval()(text, None, None).shape == (2 * LENGTH, BATCH, 16)


@pytest.mark.parametrize("schedule", ["zb-v", "dualpipe-v"])
def test_a_layout_in_a_v_predicts_where_its_last_stage_is(schedule):
    model = make_model(
        1,
        pipeline_model_parallel_size=2,
        pipeline_schedule=schedule,
        pipeline_model_parallel_layout="E|t|t|mL",
    )
    assert model.mtp is not None
