"""Compare what a `config.json` means here and in Transformers, field by field:
`python -m tests.parity.stated_fields`.

Each config of every family, in the spelling of Transformers and in the older one, loses one field,
states null for it, or states another value; and it loses all fields at once that may be absent.
The settings here are compared with the settings of the config that Transformers' own class makes
of such a file, in which every field is stated. `--logits` also loads the weights of each model
with the configs that lack a field in both programs. Here, a config may be refused instead. Exits
with status 1 if a model would differ.
"""

import copy
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron.core.foundation.errors import MegatronError
from megatron.core.settings.command_line import read_command_line
from megatron.hugging_face import FAMILIES, Family, family_of_config
from megatron.hugging_face.config_fields import is_without_effect
from megatron.hugging_face.model_description import ModelDescription, differences
from tests.harness.tolerances import FP32_REORDERED_SUM, assert_close
from tests.unit.hugging_face.models import CASES, LENGTH, VOCAB, our_model, saved

_TEXT = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_TEXT_3_5 = {
    **_TEXT, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2],
                        "partial_rotary_factor": 0.5},
}  # fmt: skip
_BERT = {name: value for name, value in _TEXT.items() if name != "num_key_value_heads"}
_IMAGES = {"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48,
           "out_hidden_size": 64}  # fmt: skip
FURTHER_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", _BERT),
    "megatron-bert": ("MegatronBertConfig", _BERT),
    "t5": ("T5Config", {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96,
                        "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}),
    "t5 1.1": ("T5Config", {"vocab_size": VOCAB, "d_model": 64, "d_kv": 16, "d_ff": 96,
                            "num_layers": 2, "num_heads": 4, "feed_forward_proj": "gated-gelu",
                            "tie_word_embeddings": False}),
    "qwen2.5 with images": (
        "Qwen2_5_VLConfig",
        {"text_config": {**_TEXT, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [4, 2, 2]}},
         "vision_config": {**_IMAGES, "fullatt_block_indexes": [1]}},
    ),
    "qwen3 with images": (
        "Qwen3VLConfig",
        {"text_config": {**_TEXT, "head_dim": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 5000.0, "mrope_section": [8, 4, 4]}},
         "vision_config": {**_IMAGES, "deepstack_visual_indexes": [0]}},
    ),
    "qwen3.5 with images": (
        "Qwen3_5Config", {"text_config": _TEXT_3_5, "vision_config": _IMAGES},
    ),
    "qwen3.5 with images and experts": (
        "Qwen3_5MoeConfig",
        {"text_config": {**_TEXT_3_5, "num_experts": 4, "moe_intermediate_size": 32,
                         "shared_expert_intermediate_size": 32},
         "vision_config": _IMAGES},
    ),
}  # fmt: skip
"""Of models that are no `CASES`: name -> config class of Transformers and its arguments."""
ALL_CASES = CASES | FURTHER_CASES
_BY_TYPE: dict[str, Family] = {family.model_type: family for family in FAMILIES}
_NESTED = ("rope_parameters", "rope_scaling", "text_config", "vision_config", "full_attention",
           "sliding_attention")  # fmt: skip
_DROPOUT = ("hidden_dropout", "attention_dropout")

Fields = dict[str, Any]


@dataclass(frozen=True)
class Change:
    """A config that says less or something else than the one it was made of."""

    what: str
    fields: Fields


def spellings(case: str) -> dict[str, Fields]:
    """Return the config of a case as Transformers writes it, and in older names of fields.

    "more heads" has another number of heads: a default that is equal to ours by chance with one
    number differs with the other. The factors of LongRoPE fit one width of heads only.
    """
    kind, arguments = ALL_CASES[case]
    found = {"newer": _written(kind, arguments)}
    is_long = "long_factor" in arguments.get("rope_parameters", {})
    if "num_attention_heads" in arguments and not is_long:
        heads = arguments["num_attention_heads"]
        more = {name: 2 * heads for name in ("num_attention_heads", "num_key_value_heads")
                if arguments.get(name) == heads}  # fmt: skip
        found["more heads"] = _written(kind, {**arguments, **more})
    model_type = found["newer"]["model_type"]
    family = _BY_TYPE[model_type]
    older = json.loads(json.dumps(family.exported(ours(found["newer"]))))
    if family.around:
        text = {**older, "model_type": f"{model_type}_text", "pad_token_id": None}
        older = {**family.around, "text_config": text}
    return found | {"older": {**older, "model_type": model_type}}


def _written(kind: str, arguments: Fields) -> Fields:
    config = getattr(transformers, kind)(**copy.deepcopy(arguments))
    return dict(json.loads(config.to_json_string(use_diff=False)))


def ours(fields: Fields) -> ModelDescription:
    """Return the settings of a config here.

    Raises:
        ConfigError: it is refused.
    """
    family, fields = family_of_config(copy.deepcopy(fields), "config.json", reads_images=True)
    return family.read(fields, "config.json")


def stated_by_transformers(fields: Fields) -> Fields:
    """Return the config that Transformers makes of `fields`, with every field stated."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(fields, file)
        file.flush()
        # From a file: infinity is an object in it, which from_dict() does not read.
        config = CONFIG_MAPPING[fields["model_type"]].from_json_file(file.name)
    return dict(json.loads(config.to_json_string(use_diff=False)))


def fields_of_all() -> dict[str, list[Any]]:
    """Return the fields of all cases, with up to two values of each."""
    found: dict[str, list[Any]] = {}
    for case in ALL_CASES:
        for fields in spellings(case).values():
            for name, value in fields.items():
                known = found.setdefault(name, [])
                if value is not None and value not in known and len(known) < 2:
                    known.append(value)
    return {n: values for n, values in found.items() if not is_without_effect(n, values)}


def changes(fields: Fields, besides: dict[str, list[Any]]) -> Iterator[Change]:
    """Yield the configs to compare.

    Args:
        besides: fields to add, one at a time.
    """
    optional = copy.deepcopy(fields)
    for path in _paths(fields):
        name = ".".join(path)
        absent = _changed(fields, path)
        yield Change(f"{name} absent", absent)
        value = _value(fields, path)
        if value is not None:
            yield Change(f"{name} null", _changed(fields, path, None))
        for other in _others(value):
            yield Change(f"{name} = {other!r}", _changed(fields, path, other))
        if not _is_refused(absent):
            optional = _changed(optional, path)
    yield Change("all absent that may be", optional)
    for name, values in besides.items():
        if name not in fields:
            for value in values:
                yield Change(f"{name} = {value!r} besides", {**fields, name: value})


def compare_settings(change: Change) -> str:
    """Return "equal", "refused" here or "refused there", or in words how models would differ."""
    try:
        full = stated_by_transformers(change.fields)
    except Exception:
        return "refused there"
    if _has_null_positions(full):
        return "refused there"
    try:
        found = ours(change.fields)
    except MegatronError:
        return "refused"
    except Exception as error:
        return f"fails without a message: {error!r}"
    try:
        expected = ours(full)
    except MegatronError as error:
        return f"is accepted, but as Transformers states it: {str(error)[:300]}"
    wrong = differences(expected, found)
    if expected.architecture == "t5":
        # Transformers' config always ties; its model has a head of its own if the weights hold one.
        wrong = [what for what in wrong if not what.startswith("untie_")]
    wrong += [name for name in _DROPOUT if getattr(found, name) != getattr(expected, name)]
    return ", ".join(wrong) or "equal"


def _has_null_positions(fields: Fields) -> bool:
    """Return whether Transformers cannot build a model: a number of its rotations is null."""
    for name, value in fields.items():
        if name in ("rope_theta", "partial_rotary_factor") and value is None:
            return True
        if name in _NESTED and isinstance(value, dict) and _has_null_positions(value):
            return True
    return False


def _is_refused(fields: Fields) -> bool:
    try:
        ours(fields)
    except Exception:
        return True
    return False


def _paths(fields: Fields) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        if is_without_effect(name, value):
            continue
        yield (name,)
        if name in _NESTED and isinstance(value, dict):
            yield from ((name, *path) for path in _paths(value))


def _value(fields: Fields, path: tuple[str, ...]) -> Any:
    for name in path:
        fields = fields[name]
    return fields


def _changed(fields: Fields, path: tuple[str, ...], *value: Any) -> Fields:
    """Return `fields` without the one at `path`, or with another value there."""
    changed = copy.deepcopy(fields)
    parent = changed
    for name in path[:-1]:
        parent = parent.get(name) or {}
    parent.pop(path[-1], None)
    if value:
        parent[path[-1]] = value[0]
    return changed


def _others(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, value * 2]
    if isinstance(value, float):
        return [value * 0.5, value + 1.0]
    if isinstance(value, list) and len(value) > 1:
        return [value[::-1], value[:-1]]
    return []


def compare_logits(change: Change, directory: Path) -> str:
    """Return the same of the logits of both programs with the weights in `directory`."""
    (directory / "config.json").write_text(json.dumps(change.fields))
    try:
        theirs, told = transformers.AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", output_loading_info=True
        )
        if any(told[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys")):
            return "refused there"
        ids = torch.randint(VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            expected = theirs.eval()(ids).logits
    except Exception:
        return "refused there"
    try:
        model, _ = our_model(directory)
    except MegatronError:
        return "refused"
    with torch.no_grad():
        found = model(ids, None, None)[..., : expected.shape[-1]]
    try:
        assert_close(found, expected, FP32_REORDERED_SUM, "logits")
    except AssertionError:
        return f"logits differ by {float((found - expected).abs().max()):.1e}"
    return "equal"


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    cases: str = ""
    """Only cases whose name begins so."""
    logits: bool = False
    """Compare logits too, where a field is absent: the models are built."""


def main() -> int:
    """Print how many configs are equal, refused and different."""
    options = read_command_line(Flags, description=__doc__.splitlines()[0])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    failures: list[str] = []
    besides = fields_of_all()
    for case in ALL_CASES:
        if not case.startswith(options.cases):
            continue
        with tempfile.TemporaryDirectory() as folder:
            has_weights = options.logits and case in CASES
            if has_weights:
                saved(case, Path(folder))
            of_case: Counter[str] = Counter()
            for spelling, fields in spellings(case).items():
                for change in changes(fields, besides):
                    results = [compare_settings(change)]
                    is_loaded = has_weights and "absent" in change.what
                    if is_loaded and spelling != "more heads" and results == ["equal"]:
                        results.append(compare_logits(change, Path(folder)))
                    for result in results:
                        kind = (
                            result
                            if result in ("equal", "refused", "refused there")
                            else "DIFFERENT"
                        )
                        of_case[kind] += 1
                        if kind == "DIFFERENT":
                            failures.append(f"{case}, {spelling} spelling, {change.what}: {result}")
        counts += of_case
        print(f"{case:<40}{dict(of_case)}", flush=True)
    print("\n".join(failures))
    print(f"{len(ALL_CASES)} configs of {len(FAMILIES)} families: {dict(counts)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
