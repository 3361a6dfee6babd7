"""A model that was trained from scratch works in Transformers once it is exported."""

import json

import pytest

from tests.harness.distributed import run_distributed
from tests.parity.training_run import train_with_flags
from tests.unit.hugging_face.models import flags_for, saved

FLAGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --mock-data"
    " --max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu"
    " --disable-bias-linear --untie-embeddings-and-output-weights --transformer-impl local"
    " --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --lr 1e-3 --num-workers 0"
)


def exported(tmp_path, *words):
    save = ["--save", str(tmp_path / "save"), "--save-hf", str(tmp_path / "out")]
    (printed,) = run_distributed(train_with_flags, 1, [*words, *save], timeout_s=240.0)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    return printed, config


def test_auto_tokenizer_and_generate_read_an_export(tmp_path):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    printed, config = exported(tmp_path, *FLAGS.split(), "--tokenizer-type", "ByteTokenizer")
    assert f"to {tmp_path / 'out'}\n" in printed
    ids = {name: config[f"{name}_token_id"] for name in ("bos", "eos", "pad")}
    assert ids == {"bos": None, "eos": 256, "pad": 257}
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 258)
    assert tokenizer("To be").input_ids == [*b"To be"]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():  # the end is likelier than all else after anything
        model.lm_head.weight.zero_()
        hidden = model.model(torch.tensor([[*b"To be"]])).last_hidden_state[0, -1]
        model.lm_head.weight[256] = hidden
    found = model.generate(**tokenizer("To be", return_tensors="pt"), max_new_tokens=9)
    assert found[0].tolist() == [*b"To be", 256]


def test_a_run_on_ids_names_its_end_and_says_that_it_has_no_tokenizer(tmp_path):
    words = [*FLAGS.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "90"]
    printed, config = exported(tmp_path, *words)
    assert config["eos_token_id"] == 89
    assert "; no tokenizer is written: Transformers has no NullTokenizer" in printed
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_the_tokenizer_of_a_run_replaces_the_one_of_the_model_it_began_with(tmp_path):
    saved("llama", tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 5}')
    flags = flags_for(tmp_path / "model")
    _, config = exported(tmp_path / "ids", *flags)
    assert json.loads((tmp_path / "ids/out/generation_config.json").read_text()) == {
        "eos_token_id": 5
    }
    assert (tmp_path / "ids/out/tokenizer.json").read_text() == "{}"
    assert config["eos_token_id"] != 89
    at = flags.index("NullTokenizer")
    flags[at] = "ByteTokenizer"
    exported(tmp_path / "bytes", *flags)
    assert "BPE" in (tmp_path / "bytes/out/tokenizer.json").read_text()
