"""A small HTTP server in a thread: a GET of any path returns the text of one function."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

LOOPBACK = "127.0.0.1"


class HttpEndpoint:
    """Serves requests in a thread until it is closed.

    Args:
        answer: called in the thread for each request; returns plain text.
        host: address to listen at; there is no authentication.
    Raises:
        OSError: the address is in use or does not exist.
    """

    def __init__(self, answer: Callable[[], str], *, port: int, host: str = LOOPBACK) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = 10.0

            def do_GET(self) -> None:
                text = answer().encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                with contextlib.suppress(ConnectionError):
                    self.wfile.write(text)

            def log_message(self, format: str, *args: object) -> None:
                """Print nothing."""

        self._server = ThreadingHTTPServer((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="http endpoint", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop the server and its thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
