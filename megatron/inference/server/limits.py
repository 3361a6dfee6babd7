"""What a client may ask of the server."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.settings.flags import flag, no_flag


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds on everything that costs memory or time."""

    body_bytes: int = flag(1 << 20, name="max_body_bytes")
    """Size of a request."""
    json_depth: int = no_flag(32)
    sequences: int = no_flag(16)
    """Continuations of one request: prompts times `n`."""
    queued: int = flag(64, name="max_queue")
    """Sequences that wait for a row of the cache; more are told to come again."""
    connections: int = flag(256, name="max_connections")
    """Clients at once."""
    connections_per_address: int = no_flag(256)
    """Of one client address, an IPv6 network of 64 bits counting as one: idle connections of one
    machine are not to take all places."""
    stop_words: int = no_flag(4)
    stop_characters: int = no_flag(256)
    log_probs: int = no_flag(20)
    receive_timeout_s: float = 10.0
    """For the headers, and again for the whole body."""
    send_timeout_s: float = 20.0
    """For a client to take the next piece of an answer."""
    request_timeout_s: float = 300.0
    """From the body to the last token."""
