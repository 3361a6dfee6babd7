"""Write the handwritten digits of scikit-learn as PNG files, and conversations about them.

    python examples/vision_language/make_digits.py DIRECTORY

1,797 images of 8 x 8 pixels (E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits",
UCI Machine Learning Repository). Every fifth image is held out, in valid.jsonl.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

from megatron.core.settings.command_line import read_command_line
from megatron.core.settings.flags import positional

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
QUESTION = "<image>digit: "


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of the command line."""

    directory: Path = positional()
    """Directory to write to."""
    count: int = 1797
    """Number of images, from the start of the set."""


def main() -> None:
    """Write the files."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    target = options.directory
    (target / "images").mkdir(parents=True, exist_ok=True)
    digits = load_digits()
    lines: dict[str, list[str]] = {"train": [], "valid": []}
    pairs = zip(digits.images, digits.target, strict=True)
    for number, (pixels, label) in enumerate(islice(pairs, options.count)):
        name = f"images/{number:04d}.png"
        Image.fromarray((pixels * 255 / 16).round().astype("uint8")).save(target / name)
        messages = [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": NAMES[label]},
        ]
        line = json.dumps({"images": [name], "messages": messages})
        lines["valid" if number % 5 == 0 else "train"].append(line)
    for split, texts in lines.items():
        (target / f"{split}.jsonl").write_text("\n".join(texts) + "\n")
        print(f"{split}.jsonl: {len(texts)} conversations")


if __name__ == "__main__":
    main()
