"""Hostile clients against the text server: it stays alive, and answers others in between.

    python -m tests.parity.hostile_requests                   # 2,000 requests, tensor parallel 2
    python -m tests.parity.hostile_requests --requests 200

Starts `tools/run_text_generation_server.py` on a small random model, lets clients of all kinds at
it, asks a good question after every 20 of them, and measures the memory of the server's processes.
Prints a table; the exit status is 1 if an answer was wrong, a status was 500 or above (but for
"busy"), or memory grew by more than 10 % after the first quarter.
"""

import json
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron.core.settings.command_line import read_command_line
from tests.harness.pool import REPOSITORY
from tests.harness.started import environment, torchrun

GOOD = {"model": "model", "prompt": [5, 17, 3], "max_tokens": 8, "temperature": 0}
TIMEOUT_S = 30.0
GROWTH = 0.10

Attack = Callable[[int, random.Random], "str | None"]
"""Takes the port; returns the status, or None where the connection just ended."""


def exchange(port: int, data: bytes, *, then_close: bool = False) -> str | None:
    """Send bytes; return the status of the answer."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        with suppress(ConnectionError):  # an early answer may end the sending
            client.sendall(data)
        if then_close:
            return None
        try:
            answer = client.recv(65536)
        except ConnectionError:
            return None
    found = re.match(rb"HTTP/1\.\d (\d{3})", answer)
    return found[1].decode() if found else None


def posted(body: bytes, path: str = "/v1/completions", length: int | None = None) -> bytes:
    """Return a request that ends the connection."""
    size = len(body) if length is None else length
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + body


def answer_of(port: int, body: dict, path: str = "/v1/completions") -> dict:
    """Ask a good question; return the answer."""
    with socket.create_connection(("127.0.0.1", port), TIMEOUT_S) as client:
        client.sendall(posted(json.dumps(body).encode(), path))
        received = b""
        while part := client.recv(65536):
            received += part
    head, _, content = received.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), received[:500]
    return json.loads(content)


def good_text(port: int) -> str:
    return answer_of(port, GOOD)["choices"][0]["text"]


def changed(**fields: object) -> bytes:
    return json.dumps({**GOOD, **fields}).encode()


def garbage(port: int, draw: random.Random) -> str | None:
    return exchange(port, draw.randbytes(draw.choice([1, 100, 5000])) + b"\r\n\r\n")


def large_headers(port: int, draw: random.Random) -> str | None:
    return exchange(port, b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * draw.choice([20000, 200000]))


def broken_off_headers(port: int, draw: random.Random) -> str | None:
    return exchange(port, b"POST /v1/completions HTTP/1.1\r\nHos", then_close=True)


def false_lengths(port: int, draw: random.Random) -> str | None:
    length = draw.choice([-1, 10**9, 10**30, 3])
    return exchange(port, posted(changed(), length=length))


def broken_off_bodies(port: int, draw: random.Random) -> str | None:
    return exchange(port, posted(changed()[:20], length=500), then_close=True)


def large_bodies(port: int, draw: random.Random) -> str | None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    head += b"Content-Type: application/json\r\n\r\n"
    chunks = (b"10000\r\n" + b"x" * 65536 + b"\r\n") * draw.choice([20, 80])
    return exchange(port, head + chunks + b"0\r\n\r\n")


def deep_json(port: int, draw: random.Random) -> str | None:
    depth = draw.choice([40, 1000, 100000])
    opening, closing = draw.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return exchange(port, posted(b'{"prompt":' + opening * depth + b"1" + closing * depth + b"}"))


def not_json(port: int, draw: random.Random) -> str | None:
    bodies = [b"", b"[]", b"1", b'"x"', b"{", b"\xff\xfe", b'{"prompt": NaN}', b"9" * 100000]
    return exchange(port, posted(draw.choice(bodies)))


def wrong_types(port: int, draw: random.Random) -> str | None:
    fields = ("prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed",
              "stream", "logprobs", "model", "echo", "stream_options", "logit_bias")  # fmt: skip
    values = [{}, [], [[]], "x", -1, 1e308, True, [None], {"a": 1}, "\ud800", 10**40, 0.5]
    return exchange(port, posted(changed(**{draw.choice(fields): draw.choice(values)})))


def wrong_messages(port: int, draw: random.Random) -> str | None:
    values = [None, [], "hi", [1], [{}], [{"role": "user"}], [{"role": 1, "content": "x"}],
              [{"role": "user", "content": [{"type": "image_url", "image_url": "file:///"}]}],
              [{"role": "user", "content": "{{ 7 * 7 }}{% for i in range(10**9) %}{% endfor %}"}],
              [{"role": "user", "content": "x", "tool_calls": []}]]  # fmt: skip
    body = json.dumps({"model": "model", "messages": draw.choice(values)}).encode()
    return exchange(port, posted(body, "/v1/chat/completions"))


def too_much(port: int, draw: random.Random) -> str | None:
    wants = [{"prompt": [1] * 100000}, {"max_tokens": 10**9}, {"n": 1000}, {"stop": ["a"] * 99},
             {"prompt": [[1]] * 500}, {"prompt": "1 " * 200000}, {"stop": "x" * 10**5},
             {"prompt": [10**9]}, {"unknown": 1}, {"logprobs": 10**6}]  # fmt: skip
    return exchange(port, posted(changed(**draw.choice(wants))))


def wrong_places(port: int, draw: random.Random) -> str | None:
    line = draw.choice(["GET /../../etc/passwd", "DELETE /v1/models", "GET /v1/completions",
                        "POST /v1/models", "GET /" + "a" * 9000, "BREW /coffee"])  # fmt: skip
    return exchange(
        port, f"{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    )


def strange_http(port: int, draw: random.Random) -> str | None:
    return exchange(port, draw.choice([
        b"GET /health HTTP/9.9\r\n\r\n", b"GET /health\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    ]) + b"\r\n")  # fmt: skip


def from_a_page(port: int, draw: random.Random) -> str | None:
    request = posted(changed())
    swap = draw.choice([(b"localhost", b"evil.example"), (b"application/json", b"text/plain")])
    return exchange(port, request.replace(*swap))


def bodies_that_nobody_reads(port: int, draw: random.Random) -> str | None:
    line = draw.choice(["GET /health", "GET /nothing", "POST /v1/models", "PUT /v1/completions"])
    head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
    return exchange(port, head.encode() + b"x" * draw.choice([0, 10, 100000]))


def leaves_a_stream(port: int, draw: random.Random) -> str | None:
    return exchange(port, posted(changed(stream=True, max_tokens=draw.choice([2, 40]))))


ATTACKS: tuple[Attack, ...] = (
    garbage, large_headers, broken_off_headers, false_lengths, broken_off_bodies, large_bodies,
    deep_json, not_json, wrong_types, wrong_messages, too_much, wrong_places, strange_http,
    from_a_page, bodies_that_nobody_reads, leaves_a_stream,
)  # fmt: skip


@contextmanager
def slow_clients(port: int, count: int) -> Iterator[None]:
    """Keep connections open that say little, or ask and never read."""
    clients = []
    for number in range(count):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", port))
        kinds = (b"", b"POST /v1/comp", posted(b"{", length=100),
                 posted(changed(stream=True, max_tokens=40)))  # fmt: skip
        client.sendall(kinds[number % len(kinds)])
        clients.append(client)
    try:
        yield
    finally:
        for client in clients:
            client.close()


def besiege(
    port: int, count: int, check: Callable[[int], None] = lambda done: None, every: int = 20
) -> Counter:
    """Let `count` hostile requests at a server, with slow clients beside them.

    Args:
        check: called now and then with the number of requests so far.
        every: requests between two good questions.
    Returns:
        (attack, status) -> times.
    Raises:
        AssertionError: a good question got another answer, or a status is 500 or above.
    """
    expected = good_text(port)
    draw = random.Random(7)
    found: Counter = Counter()
    for begin in range(0, count, every):
        with slow_clients(port, 8):
            for number in range(begin, min(begin + every, count)):
                attack = ATTACKS[number % len(ATTACKS)]
                status = attack(port, draw)
                assert status is None or status < "500" or status == "503", (attack, status)
                found[attack.__name__, status or "closed"] += 1
            assert good_text(port) == expected, f"after {number + 1} requests"
        check(number + 1)
    return found


@contextmanager
def running_server(folder: Path, *flags: str, num_ranks: int = 2) -> Iterator[tuple[int, int]]:
    """Start the server on a small random model; give its port and the launcher's process id."""
    import torch
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=98, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        eos_token_id=None, bos_token_id=None, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    command = [
        sys.executable, *torchrun(num_ranks), "tools/run_text_generation_server.py",
        "--load-hf", str(folder), "--tensor-model-parallel-size", str(num_ranks),
        "--tokenizer-type", "NullTokenizer",
        "--transformer-impl", "local", "--port", "0", *flags,
    ]  # fmt: skip
    log = folder / "server.log"
    with log.open("w") as into:
        launcher = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment(), stdout=into, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + 240
        while not (found := re.search(r"serving \S+ at http://[\d.]+:(\d+)", log.read_text())):
            ended = launcher.poll() is not None or time.monotonic() > deadline
            assert not ended, log.read_text()[-4000:]
            time.sleep(0.5)
        yield int(found[1]), launcher.pid
        for rank in psutil.Process(launcher.pid).children():
            rank.send_signal(signal.SIGINT)
        assert launcher.wait(60) == 0, log.read_text()[-4000:]
    finally:
        if launcher.poll() is None:
            launcher.kill()


def memory_bytes(launcher: int) -> int:
    """Return the resident memory of all ranks."""
    return sum(child.memory_info().rss for child in psutil.Process(launcher).children())


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What the command line says."""

    requests: int = 2000
    ranks: int = 2


def main() -> int:
    """Run and print; return the exit status."""
    options = read_command_line(Flags, description=__doc__.split("\n")[0])
    sizes: list[tuple[int, int]] = []
    with tempfile.TemporaryDirectory() as folder:
        timeouts = ("--receive-timeout-s", "2")
        with running_server(Path(folder), *timeouts, num_ranks=options.ranks) as (port, launcher):
            begin = time.monotonic()
            found = besiege(
                port, options.requests, lambda done: sizes.append((done, memory_bytes(launcher)))
            )
            seconds = time.monotonic() - begin
    for (attack, status), times in sorted(found.items()):
        print(f"{attack:20} {status:6} {times:5}")
    early = next(size for done, size in sizes if done >= options.requests / 4)
    growth = sizes[-1][1] / early - 1
    print(
        f"{options.requests} hostile requests in {seconds:.0f} s; {len(sizes)} good ones between, "
        f"all answered alike; memory {early / 2**20:.0f} MiB after a quarter, "
        f"{sizes[-1][1] / 2**20:.0f} MiB at the end ({growth:+.1%})"
    )
    return 0 if growth <= GROWTH else 1


if __name__ == "__main__":
    sys.exit(main())
