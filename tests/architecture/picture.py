"""The picture of docs/architecture.md, made from the code: layers, and what is in them.

    python -m tests.architecture.picture    # writes docs/architecture.svg

The layers are those of the import-linter contracts in pyproject.toml, so that an import goes from
a box to boxes below it and nowhere else. What a box says is the first line of the module's
docstring.
"""

import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from tests.architecture.source import ROOT, modules

TARGET = ROOT / "docs/architecture.svg"
WIDTH, GAP, LINE = 1200, 8, 15
_PER_ROW = 5
_CHARACTER = 6.3
"""Width of a small letter in pixels."""


@dataclass(frozen=True)
class Layer:
    """Siblings that do not import each other, or only some of them do."""

    container: str
    names: tuple[str, ...]


def layers() -> list[Layer]:
    """Return all layers from the top to the bottom."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = []
    inner = {}
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers":
            (container,) = contract["containers"]
            inner[container] = [Layer(container, _names(line)) for line in contract["layers"]]
    for layer in (*inner["megatron_lattice"], *inner["megatron"]):
        found += inner["megatron.core"] if layer.names == ("core",) else [layer]
    return found


def _names(line: str) -> tuple[str, ...]:
    words = line.replace("|", " ").replace(":", " ").split()
    return tuple(word.strip("()") for word in words)


def picture(rows: Sequence[Layer]) -> str:
    """Return the SVG."""
    known = modules()
    top = GAP
    parts: list[str] = []
    for layer in rows:
        names = [name for name in layer.names if f"{layer.container}.{name}" in known]
        for start in range(0, len(names), _PER_ROW):
            part = names[start : start + _PER_ROW]
            width = (WIDTH - GAP * (len(part) + 1)) / len(part)
            texts = [_said(f"{layer.container}.{name}", width) for name in part]
            height = LINE * (max(map(len, texts)) + 1) + 2 * GAP
            for place, (name, text) in enumerate(zip(part, texts, strict=True)):
                left = GAP + place * (width + GAP)
                parts += _box(left, top, width, height, f"{layer.container}.{name}", text)
            top += height + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" '
        f'font-family="sans-serif" font-size="12">'
    )
    return "\n".join(
        [head, f'<rect width="{WIDTH}" height="{top}" fill="white"/>', *parts, "</svg>\n"]
    )


def _said(name: str, width: float) -> list[str]:
    module = modules()[name]
    body = module.tree.body
    doc = ""
    if body and getattr(getattr(body[0], "value", None), "value", None):
        doc = str(body[0].value.value).strip().partition("\n")[0]  # type: ignore[attr-defined]
    return textwrap.wrap(doc, int((width - 2 * GAP) / _CHARACTER)) or [""]


def _box(
    left: float, top: float, width: float, height: float, name: str, text: Sequence[str]
) -> list[str]:
    fill = "#eef3fb" if name.startswith("megatron.core.") else "#fdf3e4"
    lines = [
        f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{height:.0f}" rx="4" '
        f'fill="{fill}" stroke="#8899aa"/>',
        f'<text x="{left + GAP:.0f}" y="{top + LINE + 2:.0f}" font-weight="bold">'
        f"{escape(name.removeprefix('megatron.'))}</text>",
    ]
    for number, line in enumerate(text):
        lines.append(
            f'<text x="{left + GAP:.0f}" y="{top + LINE * (number + 2) + 4:.0f}" font-size="11" '
            f'fill="#445566">{escape(line)}</text>'
        )
    return lines


def main(target: Path = TARGET) -> None:
    """Write the picture."""
    target.write_text(picture(layers()))


if __name__ == "__main__":
    main()
