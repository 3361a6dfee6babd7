"""What was derived from the settings of a command line, in order."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

from megatron.core.settings.flags import arg_name
from megatron.training.config.resolved import Derivation

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

GroupT = TypeVar("GroupT", bound="DataclassInstance")


class DerivationLog:
    """What was derived so far, and whether it is of training."""

    def __init__(self) -> None:
        self.derivations: list[Derivation] = []
        self.is_of_training = False

    def note(self, name: str, value: Any, formula: str) -> None:
        """Record a value of which nothing was known before."""
        self.derivations.append(Derivation(name, value, formula, self.is_of_training))

    def derived(self, before: GroupT, after: GroupT, formula: str) -> GroupT:
        """Record the fields in which two states of a group differ; return the later one."""
        for each in dataclasses.fields(before):
            value = getattr(after, each.name)
            if getattr(before, each.name) != value:
                self.note(arg_name(each), value, formula)
        return after
