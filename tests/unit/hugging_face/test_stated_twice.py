"""Where config and weights, or two files, contradict each other, a model is that of Transformers,
with a line that says so, or is refused."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from megatron.core.foundation.errors import CheckpointError
from megatron.hugging_face import open_model, read_model_directory
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.hugging_face.models import LENGTH, VOCAB, our_model, saved

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"


def change_weights(model, change):
    tensors = load_file(model / WEIGHTS)
    change(tensors)
    save_file(tensors, model / WEIGHTS, {"format": "pt"})


def change_config(model, **fields):
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def is_as_in_transformers(model):
    ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager")
    ours, _ = our_model(model)
    with torch.no_grad():
        found, expected = ours(ids, None, None)[..., :VOCAB], theirs.eval()(ids).logits
    assert_close(found, expected, FP32_REORDERED_SUM, "logits")


@pytest.mark.parametrize(
    ("case", "head"),
    [("llama", "lm_head.weight"), ("gpt2, untied, another width", "lm_head.weight"),
     ("gpt_neox", "embed_out.weight"), ("mamba2", "lm_head.weight")],
)  # fmt: skip
def test_a_stored_head_of_other_values_counts_more_than_a_flag_that_ties_it(case, head, tmp_path):
    saved(case, tmp_path)
    if head not in load_file(tmp_path / WEIGHTS):
        change_weights(tmp_path, lambda t: t.update({head: torch.randn(VOCAB, 64)}))
    change_config(tmp_path, tie_word_embeddings=True)
    is_as_in_transformers(tmp_path)
    assert any("the head is read untied" in note for note in open_model(tmp_path).notes)


def test_a_stored_head_that_repeats_the_embedding_stays_tied(tmp_path):
    saved("llama", tmp_path)
    change_weights(tmp_path, lambda t: t.update({"lm_head.weight": t[EMBEDDING].clone()}))
    change_config(tmp_path, tie_word_embeddings=True)
    is_as_in_transformers(tmp_path)
    assert not read_model_directory(tmp_path).settings.untie_embeddings_and_output_weights
    assert not open_model(tmp_path).notes


def test_a_head_of_its_own_that_transformers_writes_for_t5_is_read(tmp_path):
    config = transformers.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    change_weights(tmp_path, lambda t: t.update({"lm_head.weight": torch.randn(VOCAB, 32)}))
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    is_tied = torch.equal(again.lm_head.weight, again.shared.weight)
    settings = read_model_directory(tmp_path).settings
    assert not is_tied
    assert settings.untie_embeddings_and_output_weights
    assert settings.scale_t5_logits == again.config.scale_decoder_outputs


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (transformers.T5Config(vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=2,
                               num_heads=4), "encoder.embed_tokens.weight"),
        (transformers.BertConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2,
                                 num_attention_heads=4, intermediate_size=48),
         "cls.predictions.decoder.weight"),
    ],
)  # fmt: skip
def test_a_copy_of_another_tensor_that_differs_from_it_is_refused(config, name, tmp_path):
    kind = {"t5": transformers.T5ForConditionalGeneration, "bert": transformers.BertForPreTraining}
    kind[config.model_type](config).save_pretrained(tmp_path)
    open_model(tmp_path)
    change_weights(tmp_path, lambda t: t.update({name: torch.randn(VOCAB, 32)}))
    with pytest.raises(CheckpointError, match=f"{name}.*repeats"):
        open_model(tmp_path)


def test_of_a_single_file_and_an_index_the_single_file_is_read(tmp_path):
    theirs = saved("llama", tmp_path / "former")
    theirs.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert (tmp_path / "model" / INDEX).is_file()
    change_weights(
        tmp_path / "former", lambda t: t.update({"lm_head.weight": -t["lm_head.weight"]})
    )
    (tmp_path / "former" / WEIGHTS).rename(tmp_path / "model" / WEIGHTS)
    is_as_in_transformers(tmp_path / "model")
    assert any(f"{INDEX} beside it is not" in note for note in open_model(tmp_path / "model").notes)


def test_a_tensor_in_two_files_of_an_index_is_refused(tmp_path):
    theirs = saved("llama", tmp_path)
    (tmp_path / WEIGHTS).unlink()
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    index = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    other = next(name for name in index.values() if name != index[EMBEDDING])
    tensors = load_file(tmp_path / other) | {EMBEDDING: torch.zeros(VOCAB, 64)}
    save_file(tensors, tmp_path / other, {"format": "pt"})
    with pytest.raises(CheckpointError, match=f"{EMBEDDING}' is in another file"):
        open_model(tmp_path)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("llama", {"vocab_size": VOCAB + 3}),
        ("llama", {"vocab_size": VOCAB - 3}),
        ("gpt2", {"vocab_size": VOCAB + 3}),
        ("gpt2", {"n_positions": 48}),
        ("gpt2", {"n_positions": 80}),
        ("mixtral", {"num_local_experts": 3}),
        ("mixtral", {"num_local_experts": 5}),
        ("gpt_oss", {"num_local_experts": 3}),
        ("llama", {"num_hidden_layers": 3}),
        ("llama", {"head_dim": 8}),
        ("llama", {"num_key_value_heads": 4}),
        ("granite 4", {"mamba_n_heads": 4}),
    ],
)
def test_a_config_whose_sizes_are_not_those_of_the_weights_is_refused(case, change, tmp_path):
    saved(case, tmp_path)
    change_config(tmp_path, **change)
    with pytest.raises(CheckpointError):
        our_model(tmp_path)
