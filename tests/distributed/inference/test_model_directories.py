"""Tools do with a model's directory what Transformers does: special ids, ends, classes."""

import json

import pytest
import torch

from tests.harness.started import run_python
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close

PROMPTS = ["alpha beta", "theta", ""]
NEW = 12


@pytest.fixture(scope="module")
def inner():
    tokenizers = pytest.importorskip("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator(["alpha beta gamma delta epsilon zeta eta theta"] * 9, trainer)
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return inner


def saved(folder, classes, tokenizer=None):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=classes, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
            num_attention_heads=4, max_position_embeddings=64, initializer_range=0.3,
            bos_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def begun(tmp_path_factory, inner):
    """A model whose tokenizer begins texts, with an end that generation_config.json alone names."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("begun")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>"
    )
    model = saved(folder, len(tokenizer), tokenizer)
    ids = tokenizer(PROMPTS[0], return_tensors="pt").input_ids
    free = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    assert len(free) == NEW
    stated = {"bos_token_id": 0, "eos_token_id": [1, free[4]]}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    return folder


def printed_by(tool, *words, status=0):
    return run_python(f"tools/{tool}.py", *words, status=status)


def test_generation_begins_and_ends_as_that_of_transformers(begun):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(begun)
    model = transformers.AutoModelForCausalLM.from_pretrained(begun)
    ends = set(model.generation_config.eos_token_id)
    flags = [word for prompt in PROMPTS for word in (f"--prompt={prompt}",)]
    printed = printed_by(
        "generate", "--load-hf", begun, *flags, "--max-new-tokens", NEW, "--json"
    ).splitlines()[-len(PROMPTS) :]
    reasons = []
    for prompt, line in zip(PROMPTS, map(json.loads, printed), strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
        reasons.append("stop" if new[-1] in ends else "length")
        assert line["tokens"] == (new[:-1] if reasons[-1] == "stop" else new)
        assert line["finish_reason"] == reasons[-1]
    assert reasons[0] == "stop"


def test_perplexity_is_over_the_ids_of_auto_tokenizer(begun, tmp_path):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(begun)
    model = transformers.AutoModelForCausalLM.from_pretrained(begun)
    (tmp_path / "text").write_text("gamma delta eta")
    ids = tokenizer("gamma delta eta", return_tensors="pt").input_ids
    expected = float(model(ids, labels=ids).loss.detach())
    printed = printed_by("evaluate_perplexity", "--load-hf", begun, "--text", tmp_path / "text")
    report = json.loads(printed.splitlines()[-1])
    assert report["tokens"] == ids.shape[1] - 1
    assert_close(torch.tensor(report["loss"]), torch.tensor(expected), FP32_REORDERED_SUM, "loss")


@pytest.mark.parametrize("classes", [320, 250])
def test_the_classes_are_those_of_the_model_whatever_the_tokenizer_has(tmp_path, classes):
    text = "To be, or not to be"
    model = saved(tmp_path / "model", classes)
    ids = torch.tensor([list(text.encode())])
    expected = float(model(ids, labels=ids).loss.detach())
    (tmp_path / "text").write_text(text)
    given = ["--load-hf", tmp_path / "model", "--tokenizer-type", "ByteTokenizer"]
    printed = printed_by("evaluate_perplexity", *given, "--text", tmp_path / "text")
    report = json.loads(printed.splitlines()[-1])
    assert_close(torch.tensor(report["loss"]), torch.tensor(expected), FP32_REORDERED_SUM, "loss")
    printed = printed_by(
        "generate", *given, "--prompt", "To be", "--max-new-tokens", 40, "--temperature", "3",
        "--log-probs", classes, "--json",
    )  # fmt: skip
    (line,) = map(json.loads, printed.splitlines()[-1:])
    assert len(line["top_log_probs"][0]) == classes
    assert max(line["tokens"]) < classes
    assert (max(line["tokens"]) >= 258) == (classes > 258), "some draws are beyond the tokenizer"


def test_a_text_with_an_id_that_the_model_lacks_is_refused(tmp_path):
    saved(tmp_path / "model", 120)
    (tmp_path / "text").write_text("plain, and then ~")
    printed = printed_by(
        "evaluate_perplexity", "--load-hf", tmp_path / "model", "--text", tmp_path / "text",
        "--tokenizer-type", "ByteTokenizer", status=10,
    )  # fmt: skip
    assert "token id 126 is outside the vocabulary of 120" in printed
