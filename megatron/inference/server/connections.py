"""The HTTP server below the application: uvicorn, with limits on what comes before a request."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from megatron.core.foundation.optional_imports import require
from megatron.inference.server.limits import Limits

_PURPOSE = "tools/run_text_generation_server.py"


def http_server(app: object, *, limits: Limits) -> Any:
    """Return a `uvicorn.Server` for an ASGI application; its `run` serves until `should_exit`.

    Raises:
        MissingExtraError: uvicorn is not installed.
    """
    uvicorn = require("uvicorn", purpose=_PURPOSE)
    config = uvicorn.Config(
        app,
        http=_protocol(limits),
        ws="none",
        lifespan="off",
        log_level="critical",  # clients that go or say nonsense are no news
        access_log=False,
        server_header=False,
        limit_concurrency=limits.connections,
        timeout_keep_alive=int(limits.receive_timeout_s),
        timeout_graceful_shutdown=5,
        h11_max_incomplete_event_size=16384,
    )
    server = uvicorn.Server(config)
    # The caller decides what a signal does: other ranks must be told before the process ends.
    server.capture_signals = nullcontext
    return server


def origin_of(peer: Sequence[object] | None) -> str:
    """Return what counts as one client address of a socket's peer; "" if it has none.

    Who has an IPv6 address usually has the 2^64 of its network.
    """
    if not peer:
        return ""
    address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.IPv6Network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


def _protocol(limits: Limits) -> type:
    """Return uvicorn's HTTP/1.1 protocol with a time limit for headers and a bound on sockets."""
    base: Any = require("uvicorn.protocols.http.h11_impl", purpose=_PURPOSE).H11Protocol
    h11 = require("h11", purpose=_PURPOSE)

    class Protocol(base):  # type: ignore[misc]
        """A connection that has only so long to say what it wants, and to take what it gets."""

        origin: str = ""
        _deadline: asyncio.TimerHandle | None = None
        _send_deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.origin = origin_of(transport.get_extra_info("peername"))
            of_origin = sum(one.origin == self.origin for one in self.connections)
            # Twice: those beyond `limit_concurrency` are told so, those beyond that are dropped.
            is_beyond = len(self.connections) > 2 * limits.connections
            if is_beyond or of_origin > limits.connections_per_address:
                transport.abort()
            else:
                # Whatever the kernel does not take counts as waiting, so a timer runs meanwhile.
                transport.set_write_buffer_limits(high=0)
                self._wait_for_headers()

        def pause_writing(self) -> None:
            self._send_deadline = self.loop.call_later(
                limits.send_timeout_s, lambda: self.transport.abort()
            )
            super().pause_writing()

        def resume_writing(self) -> None:
            self._client_reads()
            super().resume_writing()

        def data_received(self, data: bytes) -> None:
            if self._deadline is None and self.conn.their_state is h11.IDLE:
                self._wait_for_headers()
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._headers_are_there()

        def connection_lost(self, exc: Exception | None) -> None:
            self._headers_are_there()
            self._client_reads()
            super().connection_lost(exc)

        def _wait_for_headers(self) -> None:
            self._deadline = self.loop.call_later(
                limits.receive_timeout_s, lambda: self.transport.abort()
            )

        def _headers_are_there(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _client_reads(self) -> None:
            if self._send_deadline is not None:
                self._send_deadline.cancel()
                self._send_deadline = None

    return Protocol
