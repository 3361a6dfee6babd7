"""Read a DeepSpeed configuration strictly: report all problems, each with the path of its key."""

from __future__ import annotations

import base64
import binascii
import difflib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together, shown
from megatron_lattice.deepspeed.components import (
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    REQUIRED,
    SCHEDULERS,
)
from megatron_lattice.deepspeed.schema import AUTO, RENAMED, SCHEMA, Key, Schema

_SHOWN = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
}
ConfigSource = Mapping[str, Any] | str | os.PathLike[str]


@dataclass
class ReadSettings:
    """Settings of a configuration file."""

    given: dict[str, Any] = field(default_factory=dict)
    """Dotted path of a key -> value, for keys with an effect and a value other than "auto"."""
    auto: list[str] = field(default_factory=list)
    """Paths whose value is "auto"."""
    without_effect: dict[str, str] = field(default_factory=dict)
    """Path -> reason why the key has no effect here."""
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    """"optimizer" and "scheduler" -> {"type": name, "params": checked params}, if given."""

    def __getitem__(self, path: str) -> Any:
        """Return the value of a key, or its default."""
        return self.given[path] if path in self.given else key_at(path).default


def key_at(path: str) -> Key:
    """Return the key of a dotted path."""
    node: Any = SCHEMA
    for name in path.split("."):
        node = node[name]
    assert isinstance(node, Key), f"{path} is a section"
    return node


def load_document(source: ConfigSource) -> dict[str, Any]:
    """Return the mapping in a file, in base64 text, or in a mapping itself.

    Raises:
        ConfigError: there is no such file, it is not a JSON object, or an object in it repeats a
            key.
    """
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source)
    if path.is_file():
        text, where = path.read_text(), str(path)
    else:
        try:
            text, where = base64.urlsafe_b64decode(str(source)).decode(), "the base64 text"
        except (binascii.Error, ValueError) as error:
            raise ConfigError(
                f"the DeepSpeed configuration {str(source)!r} is no file.",
                rule="it is a mapping, the path of a JSON file, or its text in base64",
                flags=["--deepspeed_config"],
                fix="check the path",
            ) from error
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except json.JSONDecodeError as error:
        line = text.splitlines()[error.lineno - 1].strip() if text.strip() else ""
        raise ConfigError(
            f"{where}, line {error.lineno}, column {error.colno}: {line[:80]!r} cannot be read:"
            f" {error.msg}.",
            rule="the file is JSON: no comments, no comma after the last entry",
            flags=["--deepspeed_config"],
            fix="correct that line",
        ) from error
    except (RecursionError, ValueError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(
            f"{where} cannot be read: {why}.",
            rule="a configuration is a JSON object",
            flags=["--deepspeed_config"],
        ) from None
    if not isinstance(document, dict):
        raise ConfigError(
            f"{where} holds a {type(document).__name__}.",
            rule="a configuration is a JSON object",
            flags=["--deepspeed_config"],
            fix='write {"train_micro_batch_size_per_gpu": 1, ...}',
        )
    return document


def _without_duplicates(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        raise ConfigError(
            f"the key {shown(twice)} appears twice in one object of the DeepSpeed configuration.",
            rule="a key has one value",
            flags=["--deepspeed_config"],
            fix="remove one of the two",
        )
    return found


def read_settings(source: ConfigSource) -> ReadSettings:
    """Read and check a configuration, without deriving values.

    Raises:
        ConfigError: with all problems, each with the dotted path of its key.
    """
    found, problems = collect(source, resolves_auto=True)
    raise_together(problems, summary="the DeepSpeed configuration")
    return found


def collect(
    source: ConfigSource, *, resolves_auto: bool = False
) -> tuple[ReadSettings, list[MegatronError]]:
    """Read and check as `read_settings` does, but return the problems.

    Args:
        resolves_auto: the caller provides a value for every key that is "auto".
    """
    document = load_document(source)
    found, problems = ReadSettings(), list[MegatronError]()
    _walk(document, SCHEMA, "", found, problems)
    for part in ("optimizer", "scheduler"):
        _read_type(part, document, found, problems, resolves_auto)
    problems += _contradictions(found)
    return found, problems


def _walk(
    section: Mapping[str, Any],
    schema: Schema,
    prefix: str,
    found: ReadSettings,
    problems: list[MegatronError],
) -> None:
    for name, value in section.items():
        if name.startswith("_"):
            continue  # a comment, as files without a syntax for them have it
        known = schema.get(RENAMED.get(name, name))
        path = prefix + RENAMED.get(name, name)
        if known is None:
            problems.append(_unknown(prefix + name, name, schema))
        elif isinstance(known, Key):
            _take(path, value, known, found, problems)
        elif isinstance(value, Mapping):
            _walk(value, known, path + ".", found, problems)
        elif value is not None:
            problems.append(_wrong(path, value, "a section: an object with keys"))


def _take(
    path: str, value: Any, key: Key, found: ReadSettings, problems: list[MegatronError]
) -> None:
    if value == AUTO:
        found.auto.append(path)
        return
    value, wrong = _converted(value, key)
    if wrong:
        problems.append(_wrong(path, value, wrong))
    elif (
        (fix := key.refused_values.get(value, key.refused) if key.refused_values else key.refused)
        and value != key.default
        and not _is_off(value)
    ):
        problems.append(
            ConfigError(
                f"{path}: {json.dumps(value, default=str)} is not supported.",
                rule="a key that is not supported here must have its default value",
                flags=[path],
                fix=fix,
            )
        )
    elif key.no_effect:
        found.without_effect[path] = key.no_effect
    elif not key.refused:
        found.given[path] = value


def _is_off(value: Any) -> bool:
    """Return whether the section of a mechanism is empty or disabled."""
    return value in (None, {}) or (isinstance(value, Mapping) and value.get("enabled") is False)


def _converted(value: Any, key: Key) -> tuple[Any, str]:
    """Return the value in the type of its key, and the expected type if the value does not fit."""
    if value is None or object in key.kind:
        return value, ""
    if key.is_unbounded and value == math.inf:
        return None, ""
    (kind,) = key.kind
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)  # 5e8
    if kind is float and is_number:
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        return value, _SHOWN[kind]
    if key.choices and value not in key.choices:
        return value, "one of " + ", ".join(json.dumps(choice) for choice in key.choices)
    checked: Any = value
    if key.length is not None and not (
        len(checked) == key.length and all(isinstance(each, (int, float)) for each in checked)
    ):
        return value, f"a list of {key.length} numbers"
    if key.minimum is not None and kind in (int, float) and not checked >= key.minimum:
        return value, f"at least {key.minimum:g}"
    return value, ""


def _wrong(path: str, value: Any, wanted: str) -> ConfigError:
    return ConfigError(
        f"{path}: {json.dumps(value, default=str)}.",
        rule=f"{path} is {wanted}",
        flags=[path],
        fix="correct the value, or remove the key to use its default",
    )


def _unknown(path: str, name: str, schema: Schema) -> ConfigError:
    near = difflib.get_close_matches(name, schema, n=1, cutoff=0.7)
    fix = f"did you mean {near[0]}?" if near else ""
    if not near:
        elsewhere = sorted(other for other in _all_paths(SCHEMA) if other.endswith("." + name))
        elsewhere += [name] if name in SCHEMA and path != name else []
        known = ", ".join(list(schema)[:12])
        fix = f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {known}, ..."
    return ConfigError(
        f"unknown key {path}.",
        rule="an unknown key would be silently ignored",
        flags=[path],
        fix=fix,
    )


def _all_paths(schema: Schema, prefix: str = "") -> Iterator[str]:
    for name, known in schema.items():
        if isinstance(known, Key):
            yield prefix + name
        else:
            yield from _all_paths(known, f"{prefix}{name}.")


def _read_type(
    section: str,
    document: Mapping[str, Any],
    found: ReadSettings,
    problems: list[MegatronError],
    resolves_auto: bool,
) -> None:
    """Check "type" and "params" of the optimizer or the scheduler."""
    name = found.given.pop(f"{section}.type", None)
    params = found.given.pop(f"{section}.params", None) or {}
    if name is None:
        if document.get(section):
            problems.append(
                ConfigError(
                    f"{section} has no type.",
                    rule=f"{section}.type selects it",
                    flags=[f"{section}.type"],
                    fix=f'write "type": "{"AdamW" if section == "optimizer" else "WarmupLR"}"',
                )
            )
        return
    if not isinstance(params, Mapping):
        problems.append(_wrong(f"{section}.params", params, "a section: an object with keys"))
        return
    schema = _optimizer_schema(name) if section == "optimizer" else SCHEDULERS.get(name)
    if schema is None:
        problems.append(_unknown_type(section, name))
        return
    inner = ReadSettings()
    if schema:
        _walk(params, schema, f"{section}.params.", inner, problems)
    else:  # a class of torch.optim, which checks its arguments itself
        inner.given = {f"{section}.params.{n}": v for n, v in params.items()}
    found.auto += inner.auto
    found.without_effect |= inner.without_effect
    values = {path.rpartition(".")[2]: value for path, value in inner.given.items()}
    found.sections[section] = {"type": name, "params": values}
    resolved = set(params) if resolves_auto else set()
    missing = [n for n in REQUIRED.get(name, ()) if values.get(n) is None and n not in resolved]
    problems += [
        ConfigError(
            f"scheduler.params.{n} is missing" + (' ("auto").' if n in params else "."),
            rule=f"{name} requires {', '.join(REQUIRED[name])}",
            flags=[f"scheduler.params.{n}"],
            fix=f"write a number for {n}",
        )
        for n in missing
    ]


def _optimizer_schema(name: str) -> Schema | None:
    """Return the keys of an optimizer; {} if its class checks them, None if the type is unknown."""
    known = OPTIMIZERS.get(name.lower())
    if known is not None:
        return known
    return {} if isinstance(getattr(torch.optim, name, None), type) else None


def _unknown_type(section: str, name: str) -> ConfigError:
    known = [*SCHEDULERS]
    fix = ""
    if section == "optimizer":
        known = ["Adam", "AdamW", "Lion", "Muon", "SGD", "Adagrad", "RMSprop"]
        fix = REFUSED_OPTIMIZERS.get(name.lower(), "")
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if not fix:
        fix = f"did you mean {near[0]}?" if near else f"use {known[0]}"
    return ConfigError(
        f"{section}.type: {name!r} is not " + ("supported." if fix else "known."),
        rule=f"{section}.type is one of {', '.join(known)}"
        + (", or another class of torch.optim" if section == "optimizer" else ""),
        flags=[f"{section}.type"],
        fix=fix,
    )


def _contradictions(found: ReadSettings) -> list[MegatronError]:
    problems: list[MegatronError] = []

    def require(holds: bool, what: str, rule: str, flags: list[str], fix: str) -> None:
        if not holds:
            problems.append(ConfigError(what, rule=rule, flags=flags, fix=fix))

    stage = found["zero_optimization.stage"]
    require(
        not (found["fp16.enabled"] and found["bf16.enabled"]),
        "fp16.enabled and bf16.enabled are both true.",
        "a model computes in one half precision",
        ["fp16.enabled", "bf16.enabled"],
        "keep bf16",
    )
    require(
        not (found["torch_autocast.enabled"] and (found["fp16.enabled"] or found["bf16.enabled"])),
        "torch_autocast.enabled with fp16 or bf16.",
        "autocast computes in half precision from fp32 weights; fp16 and bf16 convert the weights",
        ["torch_autocast.enabled", "fp16.enabled", "bf16.enabled"],
        "keep bf16",
    )
    for section in ("zero_optimization.offload_optimizer", "zero_optimization.offload_param"):
        in_file, path = found[f"{section}.device"] == "nvme", found[f"{section}.nvme_path"]
        require(
            not in_file or bool(path),
            f'{section}.device: "nvme" without nvme_path.',
            "the state is stored in a file in that directory",
            [f"{section}.nvme_path"],
            'write "nvme_path": "/local_nvme"',
        )
        require(
            not in_file or not path or Path(path).is_dir(),
            f"{section}.nvme_path: there is no directory {path!r}.",
            "the state is stored in a file in that directory",
            [f"{section}.nvme_path"],
            "create it on a local disk, or name another one",
        )
    require(
        found["zero_optimization.offload_param.device"] in (None, "none") or stage == 3,
        f"zero_optimization.offload_param at stage {stage}.",
        "only stage 3 shards parameters, and only shards can be offloaded",
        ["zero_optimization.offload_param.device", "zero_optimization.stage"],
        'use "stage": 3, or drop offload_param',
    )
    require(
        found["zero_optimization.mics_shard_size"] <= 0 or stage >= 1,
        f"zero_optimization.mics_shard_size: {found['zero_optimization.mics_shard_size']} at stage"
        " 0.",
        "ranks of a shard group share sharded state",
        ["zero_optimization.mics_shard_size", "zero_optimization.stage"],
        "use stage 3, or drop mics_shard_size",
    )
    accumulates_in = found["data_types.grad_accum_dtype"]
    model_in = "fp16" if found["fp16.enabled"] else "bf16" if found["bf16.enabled"] else "fp32"
    require(
        accumulates_in in (None, "fp32", model_in) or bool(found.auto),
        f"data_types.grad_accum_dtype: {accumulates_in!r} with weights in {model_in}.",
        "gradients are added in fp32 or in the dtype of the weights",
        ["data_types.grad_accum_dtype"],
        f"use fp32 or {model_in}",
    )
    wire = found["communication_data_type"]
    require(
        wire in (None, "fp32", "bf16", accumulates_in),
        f"communication_data_type: {wire!r} with gradients in {accumulates_in or 'fp32'}.",
        "gradients are sent in their own dtype or in bf16",
        ["communication_data_type"],
        "use bf16",
    )
    return problems
