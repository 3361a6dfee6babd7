"""Write docs/flags.md: `python -m megatron.training.cli.flags_document > docs/flags.md`."""

from __future__ import annotations

from megatron.core.settings.flags import FlagSpec
from megatron.training.config.run import GROUP_CLASSES, all_flags, plain
from megatron.training.rules.support import Support, support_of

HEAD = """# Flags of pretrain_gpt.py

`python -m megatron.training.cli.flags_document > docs/flags.md` generates this page from the config
dataclasses; a test keeps it current.

Flags must be spelled in full. Type `on` is a switch that is off by default. `off-switch` switches a
default off; both prefixes, `--no-` and `--disable-`, are accepted. `x3` takes three values, `x+`
one or more, `x*` any number. The keys of a `--yaml-cfg` file have the same names, with `_` or `-`.

Support: a flag with an empty last column has its effect. *refused*: the mechanism does not exist
here, and any value but the default is an error that names an alternative. *no effect*: the flag is
accepted because it changes no result, and the log contains a note. *on a GPU*: the flag has an
effect on GPUs and is accepted elsewhere. *of --x*: the flag tunes the mechanism of --x.

The last table contains the other flags of Megatron-LM, so that its launch scripts work. It is
generated from `megatron/core/settings/inert_flags.tsv`.
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
    # A flag that tunes another flag has the same support, which the other flag's row shows.
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
