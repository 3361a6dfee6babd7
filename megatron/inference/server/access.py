"""Who is answered: pages of a browser on this machine are not, nor are clients without the key.

A page that any site shows can send requests to this machine. Without a content type of its own it
may send what a form sends, so bodies must say that they are JSON, which a browser asks permission
for; and a site whose name is pointed at this machine is known by that name in the Host header.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron.core.foundation.errors import ConfigError
from megatron.inference.server.protocol import BadRequest

OPEN_PATHS = frozenset({"/health"})
"""Answered without a key: what watches a server needs none."""


@dataclass(frozen=True, kw_only=True)
class Access:
    """Which requests are answered."""

    keys: tuple[str, ...] = ()
    """One of these comes with each request; empty: nobody is asked."""
    hosts: frozenset[str] | None = None
    """Names of this server in the Host header, besides those of this machine; None: any name."""

    def check(self, headers: Mapping[bytes, bytes], path: str) -> None:
        """Return if the request is to be answered.

        Raises:
            BadRequest: it is not.
        """
        host = host_name(headers.get(b"host", b"localhost").decode("latin-1"))
        if self.hosts is not None and not is_loopback(host) and host not in self.hosts:
            message = f"this server is not called {host[:80]!r}; --allowed-hosts names it"
            raise BadRequest(message, status=403, code="host_not_allowed")
        if self.keys and path not in OPEN_PATHS:
            kind, _, given = headers.get(b"authorization", b"").partition(b" ")
            # All are compared, in the same time whether they agree in many letters or in none.
            agrees = [hmac.compare_digest(given.strip(), key.encode()) for key in self.keys]
            if kind.lower() != b"bearer" or not any(agrees):
                raise BadRequest("the API key is missing or wrong", status=401, code="bad_api_key")


def check_content_type(headers: Mapping[bytes, bytes]) -> None:
    """Return if a body says that it is JSON.

    Raises:
        BadRequest: it does not.
    """
    kind = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
    if kind != b"application/json":
        message = "a body is sent with the header Content-Type: application/json"
        raise BadRequest(message, status=415, code="content_type")


def host_name(host: str) -> str:
    """Return the name in a Host header or an address, without its port, in lower case."""
    if host.startswith("["):
        return host[1:].split("]")[0].lower()
    return host.rsplit(":", 1)[0].lower() if host.count(":") == 1 else host.lower()


def is_loopback(host: str) -> bool:
    """Return whether a name or address is that of the machine for itself alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(path: Path) -> tuple[str, ...]:
    """Return the keys of a file, one a line; empty lines and those that begin with # are none.

    Raises:
        ConfigError: it cannot be read, holds no key, or one that no header can carry.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        problem = f"{path} cannot be read: {error}"
    else:
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if keys and all(key.isascii() and key.isprintable() and " " not in key for key in keys):
            return keys
        problem = f"{path} holds no key" if not keys else f"{path} holds a key with odd characters"
    raise ConfigError(
        f"{problem}.",
        rule="a file of keys has one a line, of visible ASCII characters",
        flags=["--api-key-file"],
        fix=f"for example: openssl rand -hex 24 > {path}",
    )
