"""Special ids of ten kinds of tokenizers are the ones that Transformers reads in their files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.foundation.errors import DataError
from megatron.core.tokenizers import MegatronTokenizer, make_tokenizer
from megatron.core.tokenizers.hugging_face import ends_of_generation
from tools import preprocess_data

TEXTS = ["Shall I compare thee", "", " a", "<s>text <|im_end|> more", "two\nlines 漢字"]
SPECIALS = ["<unk>", "<s>", "</s>", "<|im_end|>", "[CLS]", "[SEP]"]


def byte_level(text):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIALS, show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    inner.train_from_iterator([text], trainer)
    return inner


def metaspace(text):
    from tokenizers import Tokenizer, decoders, models, normalizers, trainers

    inner = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=600, show_progress=False,
        special_tokens=[*SPECIALS, *(f"<0x{n:02X}>" for n in range(256))],
    )  # fmt: skip
    inner.train_from_iterator([text], trainer)
    return inner


def unigram(text):
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    inner = Tokenizer(models.Unigram())
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=SPECIALS, unk_token="<unk>", show_progress=False
    )
    inner.train_from_iterator([text], trainer)
    return inner


def template(single, *names):
    from tokenizers.processors import TemplateProcessing

    numbered = [(name, SPECIALS.index(name)) for name in names]
    return TemplateProcessing(single=single, special_tokens=numbered)


def llama_3(text):
    from tokenizers.processors import ByteLevel, Sequence

    inner = byte_level(text)
    inner.post_processor = Sequence([ByteLevel(trim_offsets=False), template("<s> $A", "<s>")])
    return inner


def with_template(make, single, *names):
    def made(text):
        inner = make(text)
        inner.post_processor = template(single, *names)
        return inner

    return made


def roberta(text):
    from tokenizers.processors import RobertaProcessing

    inner = byte_level(text)
    inner.post_processor = RobertaProcessing(("[SEP]", 5), ("[CLS]", 4))
    return inner


BOTH = {"bos_token": "<s>", "eos_token": "</s>"}
KINDS = {
    "llama 3": (llama_3, BOTH),
    "mistral": (with_template(metaspace, "<s> $A", "<s>"), {**BOTH, "add_bos_token": True}),
    "gemma": (with_template(metaspace, "<s> $A", "<s>"), {**BOTH, "unk_token": "<unk>"}),
    "gpt-2": (byte_level, {"bos_token": "</s>", "eos_token": "</s>"}),
    "qwen": (byte_level, {"eos_token": "<|im_end|>", "bos_token": None, "add_bos_token": False}),
    "t5": (with_template(unigram, "$A </s>", "</s>"), {"eos_token": "</s>"}),
    "bert": (
        with_template(byte_level, "[CLS] $A [SEP]", "[CLS]", "[SEP]"),
        {"cls_token": "[CLS]", "sep_token": "[SEP]"},
    ),
    "roberta": (roberta, {**BOTH, "cls_token": "[CLS]", "sep_token": "[SEP]"}),
    "both ends": (with_template(unigram, "<s> $A </s>", "<s>", "</s>"), BOTH),
    "a flag that its template does not follow": (byte_level, {**BOTH, "add_bos_token": True}),
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory, sonnets):
    pytest.importorskip("tokenizers")
    found = {}
    for name, (make, config) in KINDS.items():
        folder = found[name] = tmp_path_factory.mktemp("kind")
        make(sonnets[:20000]).save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_has_the_ids_of_auto_tokenizer(folders, kind):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folders[kind])
    ours = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folders[kind]))
    bare = make_tokenizer(
        "HuggingFaceTokenizer", tokenizer_model=str(folders[kind]),
        tokenizer_hf_no_include_special_tokens=True,
    )  # fmt: skip
    for text in TEXTS:
        without = reference(text, add_special_tokens=False).input_ids
        assert ours.tokenize(text) == reference(text).input_ids
        assert ours.tokenize_part(text) == bare.tokenize(text) == without
    flat, counts = ours.encode_flat(TEXTS)
    assert np.split(flat, np.cumsum(counts)[:-1])[3].tolist() == bare.tokenize(TEXTS[3])
    around = ours.around_a_text != ((), ())
    assert (ours.unique_description != bare.unique_description) == around
    for name in ("bos", "eos", "pad", "unk", "cls", "sep"):
        theirs = getattr(reference, f"{name}_token_id")
        # Where no file names an end, ours is the first usual one.
        assert getattr(ours, name) == theirs or (name, theirs) == ("eos", None)


def test_llama_2_begins_a_text_and_no_part_of_one(piece_model):
    tokenizer = make_tokenizer("Llama2Tokenizer", tokenizer_model=piece_model)
    assert tokenizer.around_a_text == ((1,), ())
    assert [1, *tokenizer.tokenize_part("a b")] == tokenizer.tokenize("a b")


# --- preprocessing ------------------------------------------------------------------------------


def written(folder, tmp_path, lines, *flags, key="text"):
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--input", str(source), "--output-prefix", str(tmp_path / "out"), "--workers", "0",
             "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder),
             "--restart", *flags]  # fmt: skip
    assert preprocess_data.main(words) == 0
    corpus = IndexedDataset(str(tmp_path / f"out_{key}_document"))
    return [one.tolist() for one in corpus[:]]


@pytest.mark.parametrize("backend", ["library", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_document_has_the_ids_of_auto_tokenizer(folders, tmp_path, kind, backend):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(folders[kind])
    texts = [text for text in TEXTS if text]
    lines, flags = [{"text": text} for text in TEXTS], ["--tokenizer-backend", backend]
    theirs = [reference(text).input_ids for text in texts]
    assert written(folders[kind], tmp_path, lines, *flags) == theirs
    bare = [reference(text, add_special_tokens=False).input_ids for text in texts]
    off = "--tokenizer-hf-no-include-special-tokens"
    assert written(folders[kind], tmp_path, lines, *flags, off) == bare
    end = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folders[kind])).eod
    if end is not None:
        ended = [ids if ids[-1] == end else [*ids, end] for ids in theirs]
        assert written(folders[kind], tmp_path, lines, *flags, "--append-eod") == ended


def test_sequences_of_a_document_begin_each_and_the_document_ends_once(folders, tmp_path):
    lines = [{"text": ["one", "", "two"]}, {"text": ["", ""]}, {"text": "three"}]
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(folders["llama 3"]))
    one, two, three = map(tokenizer.tokenize, ("one", "two", "three"))
    found = written(folders["llama 3"], tmp_path, lines, "--append-eod")
    assert found == [one, [*two, tokenizer.eod], [*three, tokenizer.eod]]


CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + ']' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_a_template_that_begins_a_conversation_begins_it_once(folders, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = shutil.copytree(folders["llama 3"], tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": CHAT}))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "No"}]
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = reference.apply_chat_template(messages, return_dict=False)
    assert theirs[:2].count(reference.bos_token_id) == 1
    lines = [{"messages": messages}]
    (found,) = written(folder, tmp_path, lines, "--sft", key="messages")
    assert reference.decode(found) == reference.decode(theirs)
    assert found.count(reference.bos_token_id) == 1
    assert found[-1] == reference.eos_token_id


# --- ends ---------------------------------------------------------------------------------------

FILES = {
    "one id": ({"eos_token_id": 2}, None),
    "a list": ({"eos_token_id": 2}, {"eos_token_id": [2, 3]}),
    "generation differs": ({"eos_token_id": 2}, {"eos_token_id": 3}),
    "no generation file, a list": ({"eos_token_id": [3, 4]}, None),
    "neither": ({"eos_token_id": None}, {"eos_token_id": None}),
    "a generation file without an end": ({"eos_token_id": 2}, {"do_sample": False}),
}


@pytest.mark.parametrize("name", FILES)
def test_ends_are_those_of_generate(folders, tmp_path, name):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config, generation = FILES[name]
    torch.manual_seed(0)
    sizes = {"vocab_size": 8, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
             "num_attention_heads": 2, "max_position_embeddings": 32}  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, **config}))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ends = loaded.generation_config.eos_token_id
    ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
    assert ends_of_generation(str(tmp_path)) == (ends or None)
    for file in Path(folders["llama 3"]).iterdir():
        shutil.copy(file, tmp_path)
    tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    assert tokenizer.ends == (ends or {tokenizer.eos})


def test_an_end_that_is_no_id_is_refused(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    with pytest.raises(DataError, match="generation_config.json: eos_token_id = "):
        ends_of_generation(str(tmp_path))


def test_a_tokenizer_of_a_name_reads_no_file_of_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    monkeypatch.chdir(tmp_path)
    assert MegatronTokenizer.from_pretrained(None, {"library": "byte-level"}).ends == {256}
