"""Conversations about images: the file, patches, and rows that are packed from them."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from megatron.core.datasets.images.image_texts import JsonLines, MockImageTexts
from megatron.core.datasets.images.patches import PatchShape
from megatron.core.datasets.images.vision_text_dataset import VisionTextConfig, VisionTextDataset
from megatron.core.datasets.preprocessing.chat_template import ChatTemplate
from megatron.core.foundation.errors import DataError
from megatron.core.tokenizers.megatron_tokenizer import make_tokenizer

IMAGE, BEFORE, AFTER = 258, 259, 260
SHAPE = PatchShape(
    patch_size=4, merge_size=2, temporal_size=2, min_pixels=64, max_pixels=1024,
    mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4),
)  # fmt: skip
TOKENIZER = make_tokenizer("ByteTokenizer")


def config(length=64, **changes):
    fields = {
        "sequence_length": length, "random_seed": 3, "shape": SHAPE, "image_token": IMAGE,
        "before_image": BEFORE, "after_image": AFTER, "vocab_size": 261,
    }  # fmt: skip
    return VisionTextConfig(**{**fields, **changes})


def write(folder, *documents):
    for number, size in enumerate([(8, 8), (16, 24)]):
        pixels = np.arange(size[0] * size[1] * 3, dtype=np.uint8).reshape(*size, 3)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    path = folder / "texts.jsonl"
    lines = [d if isinstance(d, str) else json.dumps(d) for d in documents]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def chat(*contents, images=()):
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(contents)]
    return {"images": list(images), "messages": messages}


def row_of(path, template=None, length=64):
    texts = JsonLines([path], TOKENIZER, template)
    return VisionTextDataset(texts, range(len(texts)), None, config(length), "train")


def test_a_conversation_is_tokens_with_images_in_their_places(tmp_path):
    sample = row_of(write(tmp_path, chat("a<image>b", "yes", images=["0.png"])))[0]
    ids = [97, BEFORE, IMAGE, AFTER, 98, *b"yes", TOKENIZER.eod]
    assert sample["tokens"][: len(ids)].tolist() == ids
    learned = sample["labels"][sample["loss_mask"] > 0].tolist()
    assert learned == [*b"yes", TOKENIZER.eod]
    assert sample["image_grid_thw"].tolist() == [[1, 2, 2]]
    assert sample["patches"].shape == (4, 3 * 2 * 16)


@pytest.mark.parametrize(
    "document",
    [
        chat("ab", "c", images=["1.png"]),
        {"image": "1.png", "conversations": [
            {"from": "human", "value": "<image>ab"}, {"from": "gpt", "value": "c"}]},
        {"images": ["1.png"], "messages": [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "ab"}]},
            {"role": "assistant", "content": "c"}]},
    ],
)  # fmt: skip
def test_spellings_of_one_conversation_are_equal(document, tmp_path):
    expected = row_of(write(tmp_path, chat("<image>ab", "c", images=["1.png"])))[0]
    found = row_of(write(tmp_path, document))[0]
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_template_writes_the_messages(tmp_path):
    source = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    path = write(tmp_path, chat("<image>ab", "yes", images=["0.png"]))
    sample = row_of(path, ChatTemplate(source, {}))[0]
    learned = sample["labels"][sample["loss_mask"] > 0].tolist()
    assert bytes(learned) == b"yes;"


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        ("{", "line 2: not JSON"),
        (chat("<image><image>x", "y", images=["0.png"]), "line 2: 2 times <image>, and 1 images"),
        (chat("<image>x", "y", images=["none.png"]), "line 2: .*none.png cannot be read"),
        ({"images": ["0.png"]}, "line 2: no key 'conversations'"),
        (chat("x" * 100, "y"), "line 2: a conversation of 102 tokens"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(bad, found, tmp_path):
    with pytest.raises(DataError, match=found):
        row_of(write(tmp_path, chat("a", "b"), bad))[0]


def test_a_file_that_is_no_image_is_named_when_its_row_is_read(tmp_path):
    path = write(tmp_path, chat("<image>x", "y", images=["0.png"]))
    rows = row_of(path)
    whole = (tmp_path / "0.png").read_bytes()
    (tmp_path / "0.png").write_bytes(whole[:-30])
    with pytest.raises(DataError, match="line 1: image 1"):
        rows[0]


def test_every_conversation_is_in_one_row_of_each_epoch():
    texts = MockImageTexts(90, 8)
    rows = VisionTextDataset(texts, range(40, 140), 1000, config(48), "train")
    per_epoch = int(rows.samples_per_epoch)
    first = sorted(n for i in range(per_epoch) for n in rows.conversations(i))
    assert first == list(range(40, 140))
    tokens = sum(int((rows[i]["document_starts"] >= 0).sum()) for i in range(per_epoch))
    assert rows.lengths.sum() / tokens > 0.85
    assert rows.conversations(0) != rows.conversations(per_epoch)


def test_a_row_follows_from_its_number_alone():
    texts = MockImageTexts(90, 8)
    one = VisionTextDataset(texts, range(100), 500, config(48), "train")
    [one[i] for i in range(30)]
    other = VisionTextDataset(texts, range(100), 500, config(48), "train")
    assert all(torch.equal(one[71][name], other[71][name]) for name in one[71])


def test_a_conversation_sees_itself_alone_and_counts_from_zero():
    sample = VisionTextDataset(MockImageTexts(90, 8), range(100), 500, config(64), "train")[3]
    starts = sample["document_starts"]
    assert len(starts.unique()) > 2
    for start in starts.unique():
        assert sample["position_ids"][:, starts == start][:, 0].tolist() == [0, 0, 0]
        last = torch.nonzero(starts == start).max()
        assert sample["loss_mask"][last] == 0


def test_a_batch_joins_what_samples_have_different_numbers_of():
    rows = VisionTextDataset(MockImageTexts(90, 8), range(100), 500, config(48), "train")
    batch = rows.collate([rows[0], rows[1]])
    assert batch["tokens"].shape == (2, 48) and batch["position_ids"].shape == (2, 3, 48)
    assert len(batch["image_grid_thw"]) == sum(len(rows[i]["image_grid_thw"]) for i in (0, 1))
    assert len(batch["patches"]) == int(batch["image_grid_thw"].prod(1).sum())


def test_a_stage_that_reads_no_images_decodes_none():
    rows = VisionTextDataset(
        MockImageTexts(90, 8), range(100), 500, config(48, has_patches=False), "train"
    )
    assert len(rows[1]["patches"]) == 0 and len(rows[1]["image_grid_thw"]) > 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [((8, 8), (8, 8)), ((5, 9), (8, 8)), ((100, 50), (40, 16)), ((3, 400), (8, 368))],
)
def test_images_keep_their_proportions_within_bounds(size, expected):
    assert SHAPE.resized(*size) == expected
    with pytest.raises(ValueError, match="sides of 1 and 300"):
        SHAPE.resized(1, 300)


@pytest.mark.parametrize("size", [(64, 48), (37, 90), (9, 5)])
def test_patches_are_those_of_transformers(size):
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2, image_mean=list(SHAPE.mean),
        image_std=list(SHAPE.std), size={"shortest_edge": 64, "longest_edge": 1024},
    )  # fmt: skip
    theirs = processor(images=[Image.fromarray(pixels)], return_tensors="pt")
    mine = SHAPE.patches(Image.fromarray(pixels))
    assert [list(SHAPE.grid(*size))] == theirs["image_grid_thw"].tolist()
    torch.testing.assert_close(torch.from_numpy(mine), theirs["pixel_values"])
