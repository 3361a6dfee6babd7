"""Megatron's search for slow GPUs, which does not exist here: the object, switched off.

Times of every part of a step, with the slowest rank of each, are printed by --timing-log-level 2.
"""

from __future__ import annotations

from types import TracebackType

from megatron.core.foundation.errors import ConfigError


class StragglerDetector:
    """A context around parts of a step that measures nothing; one object for all callers."""

    _one: StragglerDetector | None = None

    def __new__(cls) -> StragglerDetector:
        if cls._one is None:
            cls._one = super().__new__(cls)
        return cls._one

    enabled = False

    def configure(self, *args: object, **kwargs: object) -> None:
        """Refuse to be switched on.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "slow ranks are not searched for.",
            rule="StragglerDetector is here so that scripts which use it run; it measures nothing",
            flags=["--log-straggler", "--timing-log-level"],
            fix="leave --log-straggler out; --timing-log-level 2 --timing-log-option minmax prints"
            " the fastest and the slowest rank's time of every part of a step",
        )

    def __call__(self, bdata: bool = False) -> StragglerDetector:
        """Return the context; `bdata` says that it is around the reading of data."""
        return self

    def __enter__(self) -> StragglerDetector:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None

    def report(self, total_flops: float = 0.0, log_interval: int = 0) -> bool:
        """Return False: there is nothing to report."""
        return False

    def start(self) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""
