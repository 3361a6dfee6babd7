"""Write a small Transformers model with a tokenizer and a chat template, and conversations.

    python examples/fine_tuning/make_inputs.py FOLDER

Replace FOLDER/base by a published model, and FOLDER/talks.jsonl by your data set.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def conversations() -> list[list[dict[str, str]]]:
    """Return a question and its answer for every country."""
    return [
        [
            {"role": "user", "content": f"What is the capital of {country}?"},
            {"role": "assistant", "content": f"It is {capital}."},
        ]
        for country, capital in CAPITALS.items()
    ]


def tokenizer_of(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Train a byte-level tokenizer with the special tokens of the template."""
    marks = ["<|end|>", "<|user|>", "<|assistant|>"]
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=384, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(texts, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Output folder."""

    folder: Path = positional(metavar="FOLDER")


def main(folder: Path) -> None:
    """Write the model and the conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    talks = conversations()
    with (folder / "talks.jsonl").open("w") as file:
        file.writelines(json.dumps({"messages": talk}) + "\n" for talk in talks)
    tokenizer = tokenizer_of([message["content"] for talk in talks for message in talk])
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")


if __name__ == "__main__":
    main(read_command_line(Flags, description=__doc__).folder)
