"""Every flag of Megatron is known here, with its type and default."""

import json
import re
from pathlib import Path

import pytest

from megatron.core.foundation.errors import ConfigError
from megatron.core.settings.flags import flag_specs
from megatron.core.settings.inert_flags import INERT_FLAGS, inert_flags
from megatron.training.checkpointing.stored_settings import MODEL_SHAPE_ARGS
from megatron.training.cli.flags_document import flags_document
from megatron.training.cli.parser import parse_command_line
from megatron.training.config.run import (
    GROUP_CLASSES,
    all_flags,
    flags_by_spelling,
    opposites_by_spelling,
    plain,
)
from megatron.training.rules.support import Support, support_of

FIXTURE = Path(__file__).parents[2] / "fixtures" / "compatibility" / "megatron_flags.tsv"
MEGATRON = [line.split("\t") for line in FIXTURE.read_text().splitlines()[1:]]
"""Spellings, type, nargs, default and choices of every flag of Megatron-LM's parser."""

OTHER_FORMS = {
    # An expression, a pair or a signal has its own type; a bool with a value is a word.
    "--linear-attention-freq": "int or list expr",
    "--moe-layer-freq": "int or list expr",
    "--no-rope-freq": "int or list expr",
    "--window-attn-skip-freq": "int or list expr",
    "--window-size": "int,int",
    "--exit-signal": "str",
    "--attention-backend": "enum",
    "--no-persist-layer-norm": "off-switch",
}
OTHER_DEFAULTS = {
    # Megatron's default acts only with --use-megatron-fsdp; here the flag acts by itself.
    "--data-parallel-sharding-strategy",
    # Scripts ask whether a scope is in it.
    "--cuda-graph-scope",
}


def spec_of(spelling):
    """Return the flag with this spelling, as the parser reads it: `_` and `-` are one."""
    table = {s.replace("_", "-"): f for s, f in flags_by_spelling().items()}
    table |= {s.replace("_", "-"): f for s, f in opposites_by_spelling().items()}
    return table.get(spelling.replace("_", "-"))


def test_every_flag_of_megatron_is_known_by_all_its_spellings():
    unknown = [s for row in MEGATRON for s in row[0].split() if spec_of(s) is None]
    assert unknown == []
    assert len(MEGATRON) == 840


def test_every_flag_of_megatron_has_one_class_and_a_line_where_it_does_not_act():
    for row in MEGATRON:
        support, line = support_of(spec_of(row[0].split()[0]))
        assert bool(line) == (support is not Support.ACTS), row[0]


def test_a_flag_of_megatron_takes_the_same_words():
    wrong = []
    for spellings, kind, nargs, _, choices in MEGATRON:
        flag = spellings.split()[0]
        spec = spec_of(flag)
        if flag in opposites_by_spelling():
            assert spec.is_switch, flag
            continue
        expected = OTHER_FORMS.get(flag, {"bool": "str"}.get(kind, kind))
        expected += f" x{nargs}" if nargs else ""
        found = spec.type_text().partition(": ")[0].removesuffix(" x?")
        if found not in (expected, expected.replace("x+", "x*")) or not set(choices.split()) <= set(
            map(str, spec.choices)
        ):
            wrong.append((flag, found, expected, choices))
    assert wrong == []


def test_a_flag_of_megatron_has_the_same_default():
    wrong = []
    for spellings, kind, _, default, _ in MEGATRON:
        flag = spellings.split()[0]
        spec = spec_of(flag)
        if kind in ("on", "off-switch") or flag in OTHER_DEFAULTS or flag != spec.flag:
            continue
        found = plain(spec.default)
        found = " ".join(map(str, found)) or "[]" if isinstance(found, list) else found
        same = str(found) == default
        if kind in ("int", "float") and found not in (None, "[]") and default:
            same = float(found) == float(default)
        if not same and not (found is None and default == ""):
            wrong.append((flag, found, default))
    assert wrong == []


def test_every_field_is_documented():
    undocumented = [spec.name for spec in all_flags().values() if not spec.help]
    assert not undocumented


def test_the_command_line_is_frozen():
    """A flag that changes or goes breaks launch scripts: this list is changed on purpose only."""
    frozen = json.loads((Path(__file__).parent / "frozen_flags.json").read_text())
    current = {
        spec.flag: {
            "name": spec.name,
            "type": spec.type_text(),
            "default": plain(spec.default),
            "spellings": list(spec.spellings),
        }
        for spec in all_flags().values()
    }
    assert current == frozen


def test_every_line_of_the_file_of_inert_flags_names_its_effect_and_what_to_use_instead():
    header, *lines = INERT_FLAGS.read_text().splitlines()
    for row in (dict(zip(header.split("\t"), line.split("\t"), strict=True)) for line in lines):
        assert row["effect"] in ("no effect", "refused", "tunes"), row
        assert row["instead"] and (row["flag"] or row["field"]), row
        assert set(row["configs"].split()) <= {"parallel", "transformer", "optimizer", "ddp"}, row
        assert row["configs"] or row["flag"], row
    names = [row.name for row in inert_flags()]
    assert len(names) == len(set(names))
    with_flag = [line for line in lines if line.startswith("--")]
    assert with_flag == sorted(with_flag) and lines[: len(with_flag)] == with_flag


def test_values_that_are_refused_are_choices():
    for spec in all_flags().values():
        assert set(spec.metadata.refuse_values) <= set(spec.choices), spec.name


@pytest.mark.parametrize("group", GROUP_CLASSES)
def test_defaults_build_a_group(group):
    built = GROUP_CLASSES[group]()
    for spec in flag_specs(GROUP_CLASSES[group], group):
        assert getattr(built, spec.field) == spec.to_field(spec.default)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("--disable-bias-linear", "add_bias_linear"),
        ("--no-bias-linear", "add_bias_linear"),
        ("--no-add-bias-linear", "add_bias_linear"),
        ("--no-rope-fusion", "apply_rope_fusion"),
        ("--disable-rope-fusion", "apply_rope_fusion"),
        ("--no-mmap-bin-files", "mmap_bin_files"),
    ],
)
def test_an_off_switch_has_two_prefixes(spelling, name):
    config = parse_command_line([spelling]).config
    assert config.value_of(name) is False


def test_flags_are_not_abbreviated():
    with pytest.raises(ConfigError, match="unknown flag --hidden-siz.\n"):
        parse_command_line(["--hidden-siz", "64"])


def test_the_document_of_flags_is_current():
    written = (Path(__file__).parents[3] / "docs" / "flags.md").read_text()
    assert written == flags_document(), "python -m megatron.training.cli.flags_document"


def test_every_flag_that_acts_is_read_somewhere():
    """A flag that is declared and never read would be ignored without a word."""
    root = Path(__file__).parents[3]
    sources = [root / "pretrain_gpt.py", *(root / "megatron").rglob("*.py")]
    config = root / "megatron" / "training" / "config"
    declarations = {
        config / f"{group.__module__.rpartition('.')[2]}.py" for group in GROUP_CLASSES.values()
    }
    declarations |= {config / "run.py", config / "resolved.py"}
    text = "\n".join(source.read_text() for source in sources if source not in declarations)
    # The declaration of a field and its place in a list of names read nothing.
    text = re.sub(r"^    \w+: [^=]+ = [^(]+$", "", text, flags=re.MULTILINE)
    text = text.replace(str(MODEL_SHAPE_ARGS), "")
    read = {"".join(groups) for groups in re.findall(r"\.(\w+)\b|[\"'](\w+)[\"']|\b(\w+)=", text)}
    table = all_flags()
    ignored = []
    for spec in table.values():
        owner = table[spec.metadata.part_of[0]] if spec.metadata.part_of else spec
        told_values = {*spec.metadata.refuse_values, *spec.metadata.note_values}
        left = [choice for choice in spec.choices if choice not in told_values]
        told = any((f.refuse or f.note) for f in (spec.metadata, owner.metadata))
        told = told or left == [spec.default] or "cuda_graph_impl" in spec.metadata.part_of
        if not told and not {spec.name, spec.field} & read:
            ignored.append(spec.flag)
    assert ignored == []
