"""Megatron's object that measures for its search for slow GPUs, switched off.

--log-straggler searches here without it: ranks are compared by the time that they wait for nobody.
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
            "StragglerDetector measures nothing.",
            rule="scripts which use it run; what is measured, the training loop measures by itself",
            flags=["--log-straggler"],
            fix="leave out the call of configure; --log-straggler names slow ranks without it",
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
