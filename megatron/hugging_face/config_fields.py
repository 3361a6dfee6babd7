"""Read a `config.json` field by field, so that none is dropped unseen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.foundation.errors import ConfigError, MegatronError, raise_together

WITHOUT_EFFECT = frozenset({
    # Where the file comes from.
    "architectures", "model_type", "auto_map", "license", "task_specific_params", "id2label",
    "label2id", "name_or_path", "model_name", "base_model", "author", "authors", "description",
    "language", "languages", "tags", "datasets", "library_name", "pipeline_tag", "thumbnail",
    "unsloth_fixed", "is_llama_config", "transformers.js_config",
    # How the weights are stored, and with which values training would begin.
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
"""Fields that change no logit of the model: they may stay unread. See `is_without_effect`."""

YARN: dict[str, Any] = {
    "rotary_scaling_factor": 1.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "yarn_correction_range_round_to_int": True,
    "mscale": 1.0,
    "mscale_all_dim": 0.0,
}
"""Settings of YaRN with their defaults."""

_REQUIRED = object()


def is_without_effect(name: str, value: object) -> bool:
    """Return whether a field that nobody read may stay unread.

    Besides those of the list, what a program notes for itself: versions of programs, and names or
    marks under a leading underscore. A number under such a name could be one of the model's.
    """
    if name in WITHOUT_EFFECT:
        return True
    if name.startswith("_"):
        return isinstance(value, (str, bool))
    return name.endswith("_version") and isinstance(value, str)


class ConfigFields:
    """The fields of a config, each to be taken or checked once; `finish` refuses the rest."""

    def __init__(self, fields: Mapping[str, object], source: str) -> None:
        self.source = source
        self._fields = dict(fields)
        self._unread = {n for n, value in fields.items() if not is_without_effect(n, value)}
        self._problems: list[MegatronError] = []

    def take(self, name: str, default: object = _REQUIRED) -> Any:
        """Return a field; null counts as absent.

        Raises:
            ConfigError: it is absent and there is no default.
        """
        self._unread.discard(name)
        value = self._fields.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise ConfigError(
                f"{self.source} has no {name!r}.",
                rule="the config of a model states its sizes",
                flags=["--load-hf"],
                fix="give the directory that save_pretrained() wrote",
            )
        return default

    def only(self, name: str, *allowed: object) -> Any:
        """Check a field that may be absent and otherwise must have one of the `allowed` values."""
        value = self.take(name, None)
        if value is not None and value not in allowed:
            values = " or ".join(repr(v) for v in allowed) if allowed else "absent"
            self._refuse(name, value, f"the model here is built for {name} = {values}")
        return value

    def finish(self) -> None:
        """Refuse what nobody took: a field that is not understood could change the model.

        Raises:
            ConfigError: with all problems of this config.
        """
        for name in sorted(self._unread):
            value = self._fields[name]
            if value is not None and value is not False:
                fix = (
                    f"if {name!r} only tells where the model comes from, delete its line there; "
                    "if it changes the model, use another model"
                )
                self._refuse(name, value, "every field of a config acts, or is refused", fix)
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


def rope_settings(
    config: ConfigFields,
    *,
    default_base: float = 10000.0,
    base_name: str = "rope_theta",
    percent_name: str = "partial_rotary_factor",
    default_percent: float = 1.0,
) -> dict[str, Any]:
    """Return the rotary settings, from older fields of the config or from `rope_parameters`.

    Args:
        base_name, percent_name: what older configs of the family call base and rotated share;
            the scaling is `rope_scaling` there.
        default_base, default_percent: what absence means.
    """
    both = dict(config.take("rope_parameters", {}))
    both.update(config.take("rope_scaling", None) or {})
    for name, older, default in (
        ("rope_theta", base_name, default_base),
        ("partial_rotary_factor", percent_name, default_percent),
    ):
        value = config.take(older, None)
        both[name] = both.get(name, default) if value is None else value
    return rope_parameters(both, f"rope_scaling in {config.source}")


def rope_parameters(fields: Mapping[str, object], source: str) -> dict[str, Any]:
    """Return the rotary settings of one `rope_parameters`.

    Raises:
        ConfigError: they ask for a scaling that does not exist here.
    """
    scaling = ConfigFields(fields, source)
    base = scaling.take("rope_theta")
    kind = scaling.take("rope_type", None) or scaling.take("type", "default")
    scaling.take("type", None)
    settings: dict[str, Any] = {
        "position_embedding_type": "rope",
        "rotary_base": int(base) if float(base).is_integer() else base,
    }
    percent = scaling.take("partial_rotary_factor", 1.0)
    if percent != 1.0:
        settings["rotary_percent"] = percent
    if kind == "llama3":
        settings["use_rope_scaling"] = True
        settings["rope_scaling_factor"] = float(scaling.take("factor"))
        scaling.only("low_freq_factor", 1.0)
        scaling.only("high_freq_factor", 4.0)
        scaling.only("original_max_position_embeddings", 8192)
    elif kind == "linear":
        settings["rotary_seq_len_interpolation_factor"] = scaling.take("factor")
    elif kind == "yarn":
        settings |= _yarn_settings(scaling)
    else:
        scaling.only("rope_type", "default")
        scaling.only("type", "default")
    scaling.finish()
    return settings


def _yarn_settings(scaling: ConfigFields) -> dict[str, Any]:
    """Return the settings of YaRN, with its temperature as Transformers reads it."""
    scaling.only("attention_factor")
    # The temperature follows from both strengths, or from the factor alone.
    mscale, of_all = scaling.take("mscale", 0.0), scaling.take("mscale_all_dim", 0.0)
    if of_all and not mscale:
        scaling.only("mscale_all_dim")
    return {
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": float(scaling.take("factor")),
        "original_max_position_embeddings": scaling.take("original_max_position_embeddings"),
        "beta_fast": float(scaling.take("beta_fast", 32)),
        "beta_slow": float(scaling.take("beta_slow", 1)),
        "yarn_correction_range_round_to_int": bool(scaling.take("truncate", True)),
        "mscale": float(mscale) if of_all else 1.0,
        "mscale_all_dim": float(of_all),
    }


def _yarn_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: settings.get(name, usual) for name, usual in YARN.items()}
    fields = {
        "rope_type": "yarn",
        "factor": float(values["rotary_scaling_factor"]),
        "original_max_position_embeddings": values["original_max_position_embeddings"],
        "beta_fast": float(values["beta_fast"]),
        "beta_slow": float(values["beta_slow"]),
        "truncate": values["yarn_correction_range_round_to_int"],
    }
    if values["mscale_all_dim"]:
        fields |= {name: float(values[name]) for name in ("mscale", "mscale_all_dim")}
    return fields


def rope_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config fields of rotary settings, in the older, widely read spelling."""
    fields: dict[str, Any] = {"rope_theta": float(settings["rotary_base"]), "rope_scaling": None}
    if settings.get("use_rope_scaling"):
        fields["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": settings["rope_scaling_factor"],
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
    elif settings.get("position_embedding_type") == "yarn" or (
        settings.get("multi_latent_attention") and settings.get("rotary_scaling_factor", 1.0) != 1.0
    ):
        fields["rope_scaling"] = _yarn_fields(settings)
    elif settings.get("rotary_seq_len_interpolation_factor"):
        factor = float(settings["rotary_seq_len_interpolation_factor"])
        fields["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return fields
