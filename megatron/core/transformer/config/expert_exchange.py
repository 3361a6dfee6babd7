"""Exchange of tokens between the ranks that hold experts: dispatchers and their libraries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.core.foundation.errors import ConfigError, MegatronError
from megatron.core.settings.flags import flag

DISPATCHERS = ("allgather", "alltoall", "flex")


@dataclass
class ExpertExchangeConfig:
    """Dispatcher of tokens, and the library that it may use. Names and defaults are Megatron's."""

    moe_token_dispatcher_type: str = flag(
        "allgather", choices=("allgather", "alltoall", "flex"), part_of="num_experts"
    )
    """How tokens are sent to experts on other ranks. flex uses the library that
    `moe_flex_dispatcher_backend` names; if the library cannot be used, it works like alltoall."""
    moe_flex_dispatcher_backend: str = flag(
        "deepep",
        choices=("deepep", "hybridep", "ncclep"),
        part_of="moe_token_dispatcher_type",
        note_values={"ncclep": "tokens are sent by all-to-all"},
    )
    """Library of the flex dispatcher: deepep or hybridep (both in the package deep_ep). The log
    names the library in use, and the reason if it is another one."""
    moe_enable_deepep: bool = flag(False, part_of="moe_token_dispatcher_type")
    """Megatron's earlier name of moe-flex-dispatcher-backend deepep; for the flex dispatcher."""
    moe_flex_dispatcher_num_sms: int | None = flag(None, part_of="moe_token_dispatcher_type")
    """Multiprocessors that the library of the flex dispatcher may occupy; None is its default."""
    moe_deepep_num_sms: int | None = flag(None, part_of="moe_token_dispatcher_type")
    """The same for deepep alone."""
    moe_hybridep_num_sms: int | None = flag(None, part_of="moe_token_dispatcher_type")
    """The same for hybridep alone."""

    @property
    def exchange_library(self) -> str:
        """The library chosen for the flex dispatcher."""
        return "deepep" if self.moe_enable_deepep else self.moe_flex_dispatcher_backend

    @property
    def exchange_num_sms(self) -> int | None:
        """Number of multiprocessors that the library may occupy; None is its default."""
        of_library = {"deepep": self.moe_deepep_num_sms, "hybridep": self.moe_hybridep_num_sms}
        own = of_library.get(self.exchange_library)
        return self.moe_flex_dispatcher_num_sms if own is None else own


def exchange_problems(config: ExpertExchangeConfig) -> Iterator[MegatronError]:
    """Yield the problems of these settings."""
    sms = config.exchange_num_sms
    if sms is not None and (sms < 2 or sms % 2):
        yield ConfigError(
            f"{sms} multiprocessors for the exchange of tokens.",
            rule="half of the multiprocessors send and half receive",
            flags=["--moe-flex-dispatcher-num-sms", "--moe-deepep-num-sms",
                   "--moe-hybridep-num-sms"],
            fix="give an even number, for example 20",
        )  # fmt: skip
