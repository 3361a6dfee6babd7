"""Count the right answers of a trained model to the conversations of a file.

    python examples/vision_language/accuracy.py --load CHECKPOINT --conversations valid.jsonl

A checkpoint of any layout loads in any other. An answer is the most likely tokens up to the end of
the document. It is right if it equals the file's answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

import pretrain_vlm
from megatron.core.datasets.images.grid import num_image_tokens
from megatron.core.datasets.images.image_texts import JsonLines
from megatron.inference.generate import generate
from megatron.inference.session import open_session
from megatron.training.datasets.image_texts import patch_shape
from megatron.training.launch.printing import print_rank_0

ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line in addition to the training flags."""

    conversations: Path
    """File of JSON lines with one question and one answer each."""


def main() -> None:
    """Print the number of right answers."""
    session = open_session(pretrain_vlm.model_provider, Flags, architecture="vlm")
    vision, tokenizer = session.run.vision, session.tokenizer
    shape = patch_shape(vision)
    texts = JsonLines([str(session.options.conversations)], tokenizer)
    prompts, images, answers = [], [], []
    for number in range(len(texts)):
        prompt: list[int] = []
        seen, answer = [], []
        for part in texts.parts(number):
            if part.image is not None:
                grid = shape.grid(*texts.size(number, part.image))
                count = num_image_tokens(grid, shape.merge_size)
                around = (vision.vision_start_token_id,), (vision.vision_end_token_id,)
                tokens = (*around[0], *[vision.image_token_id] * count, *around[1])
                prompt += [token for token in tokens if token is not None]
                patches = torch.from_numpy(texts.patches(number, part.image, shape))
                seen.append((patches, grid))
            elif part.is_learned:
                answer += part.tokens
            else:
                prompt += part.tokens
        prompts.append(prompt)
        images.append(seen)
        answers.append([token for token in answer if token not in session.ends])
    right = 0
    for begin in range(0, len(prompts), ROWS):
        rows = slice(begin, begin + ROWS)
        written = generate(
            session.model,
            prompts[rows],
            images=images[rows],
            max_new_tokens=max(map(len, answers)) + 1,
            vocab_size=session.vocab_size,
            max_sequence_length=session.max_sequence_length,
            eod=session.ends,
            pg_collection=session.groups,
        )
        for prompt, row, answer in zip(prompts[rows], written, answers[rows], strict=True):
            right += row[len(prompt) :] == answer
    share = 100 * right / len(answers)
    print_rank_0(f"{right} of {len(answers)} answers are right: {share:.1f} %")


if __name__ == "__main__":
    main()
