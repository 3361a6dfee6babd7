"""One request's side of a connection: its body, within limits, and the answer to it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from megatron.inference.server.limits import Limits
from megatron.inference.server.protocol import BadRequest

Receive = Callable[[], Coroutine[Any, Any, dict[str, Any]]]
Send = Callable[[dict[str, Any]], Coroutine[Any, Any, None]]


class ClientGone(Exception):
    """The client has closed the connection, or was too slow."""


class Client:
    """One request's side of the connection.

    Waiting for a client to read has its limit below, in `connections`.
    """

    def __init__(
        self, receive: Receive, send: Send, limits: Limits, headers: Mapping[bytes, bytes]
    ) -> None:
        self._receive, self._send, self._limits = receive, send, limits
        self.headers = headers
        self.status: int | None = None
        """What was answered; None: nothing yet."""
        self.used = "0 + 0 tokens"
        """What a log says of the work."""
        is_empty = headers.get(b"content-length", b"0") == b"0"
        self._has_sent_all = is_empty and b"transfer-encoding" not in headers

    async def body(self) -> bytes:
        """Read the body.

        Raises:
            BadRequest: it is too large or too slow.
            ClientGone: it ended early.
        """
        most = self._limits.body_bytes
        declared = self.headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared[:20]) > most:
            raise _too_large(most)
        deadline = time.monotonic() + self._limits.receive_timeout_s
        parts: list[bytes] = []
        size = 0
        async for part in self._parts(deadline):
            size += len(part)
            if size > most:
                raise _too_large(most)
            parts.append(part)
        if not self._has_sent_all:
            raise BadRequest("the body took too long", status=408)
        return b"".join(parts)

    async def _parts(self, deadline: float) -> AsyncIterator[bytes]:
        """Yield what comes of the body until its end, or the deadline.

        Raises:
            ClientGone: the connection ended before.
        """
        while True:
            try:
                message = await asyncio.wait_for(
                    self._receive(), max(deadline - time.monotonic(), 0.0)
                )
            except TimeoutError:
                return
            if message["type"] == "http.disconnect":
                raise ClientGone
            if not message.get("more_body", False):
                self._has_sent_all = True
            yield message.get("body", b"")
            if self._has_sent_all or time.monotonic() > deadline:
                return

    async def gone(self) -> None:
        """Return when the client has closed the connection."""
        while True:
            if (await self._receive())["type"] == "http.disconnect":
                return

    async def respond(self, status: int, content: Mapping[str, object]) -> None:
        """Send a JSON object.

        A client that is still sending does not see an answer if the connection ends with bytes of
        its own unread. What is left of its body is thrown away first, for as long as a body may
        take; then the connection ends.
        """
        await self._respond(status, b"application/json", json.dumps(content).encode())

    async def respond_text(self, text: str) -> None:
        """Send plain text."""
        await self._respond(200, b"text/plain; version=0.0.4; charset=utf-8", text.encode())

    async def _respond(self, status: int, kind: bytes, body: bytes) -> None:
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        sends_on = not self._has_sent_all
        if sends_on:
            headers.append((b"connection", b"close"))
        if status == 429:
            headers.append((b"retry-after", b"1"))
        if status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": sends_on})
        if sends_on:
            if status != 408:  # it had its time
                deadline = time.monotonic() + self._limits.receive_timeout_s
                with suppress(ClientGone):
                    async for _ in self._parts(deadline):
                        pass
            await self._send({"type": "http.response.body", "body": b""})

    async def respond_if_possible(self, status: int, content: Mapping[str, object]) -> None:
        """Send a JSON object, unless another answer has begun."""
        if self.status is None:
            await self.respond(status, content)

    async def begin_stream(self) -> None:
        """Send the head of a stream of events."""
        self.status = 200
        headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(self, data: str) -> None:
        """Send one event."""
        body = f"data: {data}\n\n".encode()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    async def end_stream(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b""})


def _too_large(most: int) -> BadRequest:
    return BadRequest(f"the body is larger than {most} bytes", status=413, code="body_too_large")
