"""Refuse ids that are not in the vocabulary, with the same words in every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.core.foundation.device import check
from megatron.core.foundation.errors import DataError


def check_token_ids(
    ids: Tensor, num_valid: int, *, what: str = "token id", ignored: int | None = None
) -> None:
    """Raise if any of `ids` is outside [0, num_valid).

    Splitting a vocabulary masks the ids of other ranks, and would turn such an id into zeros. All
    ranks of a tensor-parallel group see the same ids, so they raise together.

    Args:
        ids: integers of any shape.
        num_valid: number of real ids, without padding of the vocabulary.
        what: named in the message.
        ignored: a value outside the vocabulary that is allowed all the same.
    Raises:
        DataError: on the CPU at once. On an accelerator the host does not wait for the check; a
            bad id makes the device fail at its next synchronisation, with this rule in the text.
    """
    if ids.numel() == 0:
        return
    rule = f"ids are in [0, {num_valid}): the vocabulary has {num_valid} entries"
    is_good = (ids >= 0) & (ids < num_valid)
    if ignored is not None:
        is_good |= ids == ignored
    if check(is_good.all(), f"bad {what}: {rule}"):
        return
    low, high = (int(extreme) for extreme in torch.aminmax(ids[~is_good]))
    raise DataError(
        f"{what} {low if low < 0 else high} is outside the vocabulary of {num_valid} entries.",
        rule=rule,
        flags=["--vocab-size", "--tokenizer-type", "--tokenizer-model", "--data-path"],
        fix="train with the tokenizer (and vocabulary size) that the data was preprocessed with",
    )
