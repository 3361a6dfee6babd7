"""Read a `config.json` field by field, so that no field is ignored by mistake."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together, shown
from megatron.hugging_face.quantized import unsupported

WITHOUT_EFFECT = frozenset({
    # Origin of the file.
    "architectures", "model_type", "auto_map", "license", "task_specific_params", "id2label",
    "label2id", "name_or_path", "model_name", "base_model", "author", "authors", "description",
    "language", "languages", "tags", "datasets", "library_name", "pipeline_tag", "thumbnail",
    "unsloth_fixed", "is_llama_config", "transformers.js_config",
    # Storage and initialization of weights.
    "torch_dtype", "dtype", "initializer_range", "quantization", "loss_type",
    # Generation and its caches.
    "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id",
    "unk_token_id", "bos_token", "eos_token", "pad_token", "suppress_tokens", "bad_words_ids",
    "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "temperature", "top_k",
    "top_p", "typical_p", "repetition_penalty", "length_penalty", "num_beams", "num_beam_groups",
    "diversity_penalty", "early_stopping", "no_repeat_ngram_size", "num_return_sequences",
    "encoder_no_repeat_ngram_size", "output_scores", "return_dict_in_generate",
    "remove_invalid_values", "exponential_decay_length_penalty", "keys_to_ignore_at_inference",
    "decoder_start_token_id", "cache_implementation", "max_length", "min_length", "do_sample",
    # How Transformers executes the model, and tasks other than language modelling.
    "pretraining_tp", "attn_implementation", "gradient_checkpointing",
    "output_attentions", "output_hidden_states", "output_past", "return_dict", "torchscript",
    "use_return_dict", "chunk_size_feed_forward", "problem_type", "is_encoder_decoder",
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder",
    "finetuning_task", "prefix", "pruned_heads", "tf_legacy_loss", "tokenizer_class",
    "use_bfloat16",
})  # fmt: skip
"""Fields that do not affect logits and may stay unread. See `is_without_effect`."""

_REQUIRED = object()


def is_without_effect(name: str, value: object) -> bool:
    """Return whether a field may stay unread.

    In addition to `WITHOUT_EFFECT`, these are notes of programs: versions, and strings or booleans
    whose name begins with an underscore. A number with such a name could affect the model.
    """
    if name in WITHOUT_EFFECT:
        return True
    if name.startswith("_"):
        return isinstance(value, (str, bool))
    return name.endswith("_version") and isinstance(value, str)


class ConfigFields:
    """The fields of a config; `finish` refuses the fields that were neither taken nor checked."""

    def __init__(
        self, fields: Mapping[str, object], source: str, absent: Mapping[str, object] | None = None
    ) -> None:
        """
        Args:
            absent: field -> its value if the file does not contain the field.
        """
        self.source = source
        self.absent: dict[str, Any] = dict(absent or {})
        self._fields = dict(fields)
        self._own_names: dict[str, str] = {}
        self._unread = {n for n, value in fields.items() if not is_without_effect(n, value)}
        self._problems: list[MegatronError] = []

    def take(self, name: str, default: object = _REQUIRED) -> Any:
        """Return a field, or its value in `absent`.

        Args:
            default: returned if the field is null, or is in neither the file nor `absent`.
        Raises:
            ConfigError: in this case, if there is no default.
        """
        self._unread.discard(name)
        value = self._fields.get(name, self.absent.get(name))
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(
                f"{self.source} has no {self._own_names.get(name, name)!r}.",
                rule="the config of a model contains its sizes",
                flags=["--load-hf"],
                fix="use the directory that save_pretrained() wrote",
            )
        return default

    def take_all(self, names: Mapping[str, str], **defaults: object) -> dict[str, Any]:
        """Return the values of fields by the names of their settings.

        Args:
            names: field -> setting.
            defaults: field -> its default; other fields are required.
        """
        return {
            setting: self.take(name, defaults.get(name, _REQUIRED))
            for name, setting in names.items()
        }

    def only(self, name: str, *allowed: object) -> Any:
        """Refuse a field that is neither absent nor one of the `allowed` values."""
        value = self.take(name, None)
        if value is not None and value not in allowed:
            values = " or ".join(repr(v) for v in allowed) if allowed else "absent"
            self._refuse(name, value, f"only {name} = {values} is supported")
        return value

    def check_quantization(self) -> None:
        """Refuse a format of weights in 8 or 4 bits that is not known."""
        for name in ("quantization_config", "compression_config"):
            value = self.stated(name)
            rule = None if value is None else unsupported(value)
            if rule is not None:
                fix = "convert the model to bf16 with Transformers, or use its release in bf16"
                self._refuse(name, shown(value, 120), rule, fix)

    def stated(self, name: str) -> Any:
        """Return a field of the file; None if it is null or absent."""
        self._unread.discard(name)
        return self._fields.get(name)

    def is_null(self, name: str) -> bool:
        """Return whether the file states null for a field."""
        return name in self._fields and self._fields[name] is None

    def one_of(self, *statements: str | tuple[str, object]) -> Any:
        """Return the value of the first present field; refuse a different value in the others.

        Args:
            statements: fields with the same meaning: names, or (name, value) of nested fields.
        """
        named = [(s, self.stated(s)) if isinstance(s, str) else s for s in statements]
        made = [(name, value) for name, value in named if value not in (None, {})]
        for name, value in made[1:]:
            if value != made[0][1]:
                rule = f"{made[0][0]} = {made[0][1]!r} describes the same thing"
                self._refuse(name, value, rule, f"delete the wrong one of {made[0][0]} and {name}")
        return made[0][1] if made else None

    def without(self, name: str) -> ConfigFields:
        """Return this config without a field that was taken, for another family's reader."""
        view = self._with({n: value for n, value in self._fields.items() if n != name})
        view.absent = {n: value for n, value in self.absent.items() if n != name}
        return view

    def renamed(self, names: Mapping[str, str]) -> ConfigFields:
        """Return this config with other names of fields, for another family's reader.

        Args:
            names: field of this config -> its name for the reader, which replaces a field of that
                name.
        """
        found = {usual: self.take(name, None) for name, usual in names.items()}
        others = {name: value for name, value in self._fields.items() if name not in found}
        view = self._with(others | {name: v for name, v in found.items() if v is not None})
        view._own_names = self._own_names | {usual: name for name, usual in names.items()}
        return view

    def with_fields(self, fields: Mapping[str, object]) -> ConfigFields:
        """Return this config with replaced fields, for another family's reader."""
        return self._with({**self._fields, **fields})

    def _with(self, fields: dict[str, object]) -> ConfigFields:
        view = copy.copy(self)  # it shares the unread fields and the problems of this config
        view._fields = fields
        return view

    def finish(self) -> None:
        """Refuse unread fields, because an unknown field could change the model.

        Raises:
            ConfigError: with all problems of this config.
        """
        for name in sorted(self._unread):
            value = self._fields[name]
            if value is not None and value is not False:
                fix = (
                    f"if {name!r} does not affect the model's output, delete its line; otherwise "
                    "use another model"
                )
                self._refuse(name, value, "an unknown field of a config is refused", fix)
        raise_together(self._problems, summary=self.source)

    def _refuse(
        self, name: str, value: Any, rule: str, fix: str = "use a model without it"
    ) -> None:
        self._problems.append(
            ConfigError(
                f"{self.source}: {name} = {value!r} is not supported.",
                rule=rule,
                flags=["--load-hf"],
                fix=fix,
            )
        )
