"""Run one engine on all ranks for the clients of the serving rank.

Before each step the serving rank broadcasts new and cancelled sequences; then all ranks take the
step. The serving rank delivers the tokens of its own engine to the clients.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from megatron.core.foundation.errors import MegatronError
from megatron.core.settings.flags import flag
from megatron.core.transport.object_collectives import ControlGroup
from megatron.inference.engine import Engine, Request, Token

HEARTBEAT_S = 5.0
"""Longest time between two broadcasts, so that the other ranks' collectives do not time out."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of memory and time."""

    body_bytes: int = flag(1 << 20, name="max_body_bytes")
    """Largest size of a request, in bytes."""
    queued: int = flag(64, name="max_queue")
    """Most sequences that wait for a place in the batch; further requests get status 429."""
    connections: int = flag(256, name="max_connections")
    """Most connections at the same time; further ones get status 503."""
    receive_timeout_s: float = 10.0
    """Longest time to receive the headers, and again to receive the body."""
    request_timeout_s: float = 300.0
    """Longest time from the body to the last token."""


Message = Request | int | None
"""A new sequence, the number of a cancelled sequence, or the end of the engine."""


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
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._deliver: dict[int, Deliver] = {}
        self._count = 0
        self._lock = threading.Lock()

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that were submitted and have not ended."""
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
            self._count += 1  # the engine's number of the sequence: the inbox keeps the order
            self._deliver[self._count] = deliver
            self._inbox.put(request)
            return self._count

    def cancel(self, number: int) -> None:
        """Cancel a sequence, unless it has ended."""
        self._inbox.put(number)

    def stop(self) -> None:
        """End the engine on all ranks."""
        self._inbox.put(None)

    def run(self) -> None:
        """Run the engine until `stop`, in the engine thread of the serving rank.

        Communication:
            for each step one broadcast of a small Python object, and the model's communication.
        Raises:
            Exception: the error that ended the engine, after all waiting clients have received a
                `ServiceError`.
        """
        why = "the server is stopping"
        try:
            while self._step(self._next_messages()):
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
        """Take the serving rank's steps until it stops, in the main thread of another rank."""
        while self._step(None):
            pass

    def _step(self, messages: list[Message] | None) -> bool:
        """Take a step after the serving rank's messages; return False at the end."""
        for message in self.peers.broadcast(messages):
            if message is None:
                return False
            if isinstance(message, Request):
                self.engine.add(message)
            else:
                self._deliver.pop(message, None)
                self.engine.cancel(message)
        for token in self.engine.step():
            deliver = self._deliver.get(token.request)
            if deliver is not None:
                if token.finish_reason is not None:
                    del self._deliver[token.request]
                deliver(token)
        return True

    def _next_messages(self) -> list[Message]:
        """Collect new messages; wait for one if the engine is idle."""
        messages: list[Message] = []
        with contextlib.suppress(queue.Empty):
            if self.engine.is_idle:
                messages.append(self._inbox.get(timeout=HEARTBEAT_S))
            while not messages or messages[-1] is not None:
                messages.append(self._inbox.get_nowait())
        return messages
