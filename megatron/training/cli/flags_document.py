"""Write docs/flags.md: `python -m megatron.training.cli.flags_document > docs/flags.md`."""

from __future__ import annotations

from megatron.core.settings.flags import FlagSpec
from megatron.training.config.run import GROUP_CLASSES, all_flags, plain
from megatron.training.rules.support import Support, support_of

HEAD = """# Flags of pretrain_gpt.py

Made from the dataclasses that use the settings by
`python -m megatron.training.cli.flags_document > docs/flags.md`; a test keeps it current.

A flag is spelled in full. `on` is a switch that is off by default; `off-switch` turns a default
off, and is also spelled with the other of the prefixes `--no-` and `--disable-`. `x3` takes three
values, `x+` one or more, `x*` any number. The same names, with `_` or `-`, are the keys of a
`--yaml-cfg` file.

Support: a flag with an empty last column acts. *refused*: the mechanism does not exist here, and
any value but the default stops the run with what to use instead. *no effect*: accepted because it
changes no result, and a line in the log says so. *on a GPU*: acts where there is one, and
is accepted elsewhere. *of --x*: tunes the mechanism of that flag.

The last table has the other flags of Megatron-LM's parser, so that its launch lines can be read. It
is made from `megatron/core/settings/inert_flags.tsv`.
"""


def flags_document() -> str:
    """Return the Markdown text."""
    parts = [HEAD]
    for group, group_class in GROUP_CLASSES.items():
        title = (group_class.__doc__ or "").strip().splitlines()[0].rstrip(".")
        parts.append(f"\n## {title}\n")
        parts.append("| Flag | Type | Default | Meaning | Support |\n|---|---|---|---|---|")
        parts += [_row(spec) for spec in all_flags().values() if spec.group == group]
    return "\n".join(parts) + "\n"


def _row(spec: FlagSpec) -> str:
    kind, _, choices = spec.type_text().partition(": ")
    meaning = "" if spec.group == "inert" else spec.help
    meaning += f" One of {choices.replace('/', ', ')}." if choices else ""
    cells = [f"`{spec.flag}`", kind, _default(spec), meaning, _support(spec)]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _default(spec: FlagSpec) -> str:
    if spec.is_switch:
        return "off" if spec.default is False else "enabled"
    value = plain(spec.default)
    if value is None or value == []:
        return ""
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _support(spec: FlagSpec) -> str:
    metadata, (support, line) = spec.metadata, support_of(spec)
    parts = []
    if metadata.part_of:
        parts.append(f"of {' or '.join(all_flags()[name].flag for name in metadata.part_of)}")
    # A flag that only follows its owner says no more than the row of the owner does.
    if not metadata.part_of or metadata.refuse or metadata.note or metadata.only_on_gpu:
        word = "on a GPU" if support is Support.ONLY_ON_GPU else support.value
        parts += [f"{word}: {line}"] if line else []
    if metadata.refuse_values:
        parts.append(f"refused: {', '.join(map(str, metadata.refuse_values))}")
    if metadata.note_values:
        parts.append(f"no effect: {', '.join(map(str, metadata.note_values))}")
    return "; ".join(parts)


if __name__ == "__main__":
    print(flags_document(), end="")
