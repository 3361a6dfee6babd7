"""Special ids in the files of a model, read like Transformers. No torch import."""

from __future__ import annotations

import os
from collections.abc import Mapping

from megatron.core.foundation.errors import DataError, shown
from megatron.core.foundation.json_text import read_json

GENERATION_NAME = "generation_config.json"


def ends_of_generation(folder: str) -> frozenset[int] | None:
    """Return the ids that end a text in `generate()` of Transformers.

    They are the `eos_token_id` of generation_config.json, one id or a list. Without that file
    they are the ids of config.json, or of its `text_config`.

    Returns:
        None if neither file names an end.
    Raises:
        DataError: a file holds no JSON object, or its value is not an id or a list of ids.
    """
    for name in (GENERATION_NAME, "config.json"):
        path = os.path.join(folder, name)
        if not os.path.isfile(path):
            continue
        fields = read_json(path, dict, "--tokenizer-model", "--load-hf")
        found = fields.get("eos_token_id")
        if found is None and isinstance(fields.get("text_config"), Mapping):
            found = fields["text_config"].get("eos_token_id")
        ids = found if isinstance(found, list) else [] if found is None else [found]
        if any(type(number) is not int for number in ids):
            raise DataError(
                f"{path}: eos_token_id = {shown(found)}.",
                rule="an id or a list of ids ends a text",
                flags=["--tokenizer-model", "--load-hf"],
                fix="correct the file, or copy it again",
            )
        return frozenset(ids) or None
    return None
