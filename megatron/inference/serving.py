"""One engine on all ranks, fed by the rank that serves clients.

Before each step the serving rank broadcasts new and cancelled sequences; then all ranks take the
step. The serving rank hands out the tokens of its own engine.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron.core.foundation.errors import MegatronError
from megatron.core.settings.flags import flag
from megatron.core.transport.object_collectives import ControlGroup
from megatron.inference.engine import Engine, Request, Token

HEARTBEAT_S = 5.0
"""Longest time between two broadcasts, so that the other ranks' collectives do not time out."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on everything that costs memory or time."""

    body_bytes: int = flag(1 << 20, name="max_body_bytes")
    """Size of a request."""
    queued: int = flag(64, name="max_queue")
    """Sequences that wait for a place in the batch; more are refused with status 429."""
    connections: int = flag(256, name="max_connections")
    """Clients at the same time; more are refused with status 503."""
    receive_timeout_s: float = 10.0
    """For the headers, and again for the body."""
    request_timeout_s: float = 300.0
    """From the body to the last token."""


@dataclass
class BatchUpdate:
    """What changes before the next step; the same on all ranks."""

    add: list[Request] = field(default_factory=list)
    cancel: list[int] = field(default_factory=list)
    ends: bool = False


class ServiceError(MegatronError):
    """The engine no longer runs."""


Deliver = Callable[["Token | ServiceError"], None]


class Service:
    """The engine of the serving rank. `submit` and `cancel` may be called from any thread.

    Args:
        engine: this rank's engine. Only the service adds sequences to it.
        peers: all ranks of the run; rank 0 serves.
    """

    def __init__(self, engine: Engine, peers: ControlGroup) -> None:
        self.engine, self.peers = engine, peers
        self.failure: ServiceError | None = None
        """Set when the engine has ended."""
        self._inbox: queue.SimpleQueue[Request | int | None] = queue.SimpleQueue()
        """New sequences, numbers of cancelled sequences, and None for the end."""
        self._deliver: dict[int, Deliver] = {}
        self._count = 0
        self._lock = threading.Lock()

    @property
    def num_unfinished(self) -> int:
        """Sequences that were submitted and have not ended."""
        return len(self._deliver)

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Queue a sequence that `engine.check` accepts; return its number.

        Args:
            deliver: called in the engine's thread for each token, or once with the failure.
        Raises:
            ServiceError: the engine has ended.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure
            self._count += 1  # as the engine counts: the inbox keeps this order
            self._deliver[self._count] = deliver
            self._inbox.put(request)
            return self._count

    def cancel(self, number: int) -> None:
        """Cancel a sequence; nothing happens if it has ended."""
        self._inbox.put(number)

    def stop(self) -> None:
        """End the engine on all ranks."""
        self._inbox.put(None)

    def run(self) -> None:
        """Serve until `stop`: the serving rank's engine thread.

        Communication:
            one broadcast of a small Python object for each step, and those of the model.
        Raises:
            whatever ended the engine, after every waiting client got a `ServiceError`.
        """
        why = "the server is stopping"
        try:
            while self._step(self._next_update()):
                pass
        except Exception as error:
            why = f"the engine ended: {error}"
            raise
        finally:
            with self._lock:
                self.failure = ServiceError(why, fix="start the server again")
            for deliver in self._deliver.values():
                deliver(self.failure)
            self._deliver.clear()

    def follow(self) -> None:
        """Take part until the serving rank stops: every other rank's main thread."""
        while self._step(None):
            pass

    def _step(self, update: BatchUpdate | None) -> bool:
        update = self.peers.broadcast(update)
        for request in update.add:
            self.engine.add(request)
        for number in update.cancel:
            self.engine.cancel(number)
        if update.ends:
            return False
        for token in self.engine.step():
            deliver = self._deliver.get(token.request)
            if deliver is not None:
                if token.finish_reason is not None:
                    del self._deliver[token.request]
                deliver(token)
        return True

    def _next_update(self) -> BatchUpdate:
        """Collect new messages; wait for one if the engine is idle."""
        update = BatchUpdate()
        timeout = HEARTBEAT_S if self.engine.is_idle else 0.0
        try:
            while not update.ends:
                message = self._inbox.get(block=timeout > 0, timeout=timeout)
                timeout = 0.0
                if message is None:
                    update.ends = True
                elif isinstance(message, Request):
                    update.add.append(message)
                elif self._deliver.pop(message, None) is not None:
                    update.cancel.append(message)
        except queue.Empty:
            pass
        return update
