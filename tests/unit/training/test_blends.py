"""Blends from the command line and from files."""

import json

import pytest

from megatron.core.foundation.errors import DataError
from megatron.training.config.data import DataSettings
from megatron.training.datasets.blends import blends_of


def blends(**given):
    return blends_of(DataSettings(**given))


@pytest.mark.parametrize(
    ("text", "blend"),
    [
        ("a b\nc", (["a", "b", "c"], None)),
        ("0.3 a\n0.7 b\n", (["a", "b"], [0.3, 0.7])),
        ('["a", "b"]', (["a", "b"], None)),
        ('[0.3, "a", "0.7", "b"]', (["a", "b"], [0.3, 0.7])),
        (' {"a": 3, "b": 0.5}', (["a", "b"], [3.0, 0.5])),
    ],
)
def test_a_blend_is_read_from_words_or_json(tmp_path, text, blend):
    path = tmp_path / "blend"
    path.write_text(text)
    assert blends(data_args_path=str(path), split="1") == {"blend": blend, "split": "1"}
    if text.strip()[0] in "[{":
        path.write_text(f'{{"train": {text}, "test": null}}')
        expected = {"blend_per_split": [blend, None, None]}
        assert blends(per_split_data_args_path=str(path)) == expected


@pytest.mark.parametrize(
    ("flag", "text", "said"),
    [
        ("data_args_path", "", "names no corpus"),
        ("data_args_path", "{", "is not valid JSON"),
        ("data_args_path", "[]", "[] is not a blend"),
        ("data_args_path", '{"a": "much"}', "is not a blend"),
        ("data_args_path", '[["a", 1]]', "is not a blend"),
        ("per_split_data_args_path", '{"train": ["a"], "dev": ["b"]}', "'dev'"),
        ("per_split_data_args_path", "[1]", "contains no object"),
        ("per_split_data_args_path", '{"train": "a"}', "is not a blend"),
        ("per_split_data_args_path", json.dumps({"train": None}), "the keys 'train'"),
    ],
)
def test_a_file_that_is_no_blend_is_refused(tmp_path, flag, text, said):
    path = tmp_path / "blend"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        blends(**{flag: str(path)})
    assert said in str(caught.value)
    assert f"--{flag.replace('_', '-')}" in str(caught.value)
