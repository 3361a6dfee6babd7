"""The server answers OpenAI's own client, says what is wrong, and outlives hostile clients."""

import http.client
import json
import re
import socket
import threading
import time

import openai
import pytest
import torch

from megatron.core.datasets.preprocessing.chat_template import ChatTemplate
from megatron.core.foundation.errors import ConfigError, NumericsError
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parameters.rng import rng_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.settings.command_line import read_command_line
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport.object_collectives import SingleProcess
from megatron.inference.engine import Engine, Request
from megatron.inference.forward import CachedModel
from megatron.inference.generate import generate
from megatron.inference.server.access import Access, read_keys
from megatron.inference.server.app import App
from megatron.inference.server.connections import http_server, origin_of
from megatron.inference.server.limits import Limits
from megatron.inference.server.protocol import BadRequest, read_request
from megatron.inference.server.serving import Service
from megatron.inference.text import continue_texts
from tests.parity import hostile_requests
from tools import run_text_generation_server
from tools.run_text_generation_server import ServerFlags

LIMITS = Limits(
    body_bytes=1 << 18,
    queued=12,
    sequences=6,
    receive_timeout_s=1.0,
    send_timeout_s=1.0,
    connections_per_address=40,
)
CONTEXT = 96
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class Bytes:
    """One token a byte."""

    def tokenize(self, text):
        return list(text.encode())

    def tokenize_part(self, text):
        return list(text.encode())

    def detokenize(self, tokens):
        return bytes(tokens).decode("utf-8", errors="replace")


@pytest.fixture(scope="module")
def model():
    rng_state().set_seed(4)
    config = TransformerConfig(
        num_layers=2, hidden_size=32, num_attention_heads=4, init_method_std=0.5,
        use_cpu_initialization=True,
    )  # fmt: skip
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=128,
        max_sequence_length=CONTEXT,
        pg_collection=ProcessGroupCollection.single(),
    ).eval()


@pytest.fixture(scope="module")
def server(model):
    groups = ProcessGroupCollection.single()
    engine = Engine(
        CachedModel(model, vocab_size=128, max_rows=4, max_length=CONTEXT, groups=groups)
    )
    service = Service(engine, SingleProcess(), LIMITS.queued)
    access = Access(hosts=frozenset({"known.example"}))
    app = App(service, Bytes(), "model", LIMITS, ChatTemplate(TEMPLATE, {}), access)
    listening = http_server(app, limits=LIMITS)
    listening.config.port = 0
    threads = [threading.Thread(target=service.run), threading.Thread(target=listening.run)]
    for thread in threads:
        thread.start()
    while not listening.started:
        time.sleep(0.01)
    yield listening.servers[0].sockets[0].getsockname()[1], service
    listening.should_exit = True
    service.stop()
    for thread in threads:
        thread.join(20)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server[0]}/v1", api_key="-") as found:
        yield found


def posted(port, body):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())
    finally:
        connection.close()


def greedy(model, prompt, count):
    (row,) = generate(
        model, [list(prompt)], max_new_tokens=count, vocab_size=128,
        max_sequence_length=CONTEXT, pg_collection=ProcessGroupCollection.single(),
    )  # fmt: skip
    return Bytes().detokenize(row[len(prompt) :])


def test_a_prompt_begins_as_its_tokenizer_says_and_a_conversation_as_its_template_says(server):
    class Begun(Bytes):
        def tokenize(self, text):
            return [1, *text.encode()]

    app = App(server[1], Begun(), "model", LIMITS, ChatTemplate(TEMPLATE, {}), ends=frozenset({7}))
    body = {"model": "model", "prompt": ["a", "b"]}
    request = read_request(body, is_chat=False, model="model", limits=LIMITS)
    assert app._tokenized(request) == [[1, *b"a"], [1, *b"b"]]
    assert app._sequence(request, [1], 0).stop_tokens == {7}
    body = {"model": "model", "messages": [{"role": "user", "content": "a"}]}
    request = read_request(body, is_chat=True, model="model", limits=LIMITS)
    assert app._tokenized(request) == [[*b"<user>a<assistant>"]]


def test_an_echo_is_the_prompt_and_not_what_its_tokenizer_put_around_it(server, client):
    for prompt in ("To be", [*b"To be"]):
        found = client.completions.create(
            model="model", prompt=prompt, max_tokens=2, echo=True, n=2
        )
        assert all(choice.text.startswith("To be") for choice in found.choices)


def test_a_completion_is_what_the_model_writes(client, model):
    found = client.completions.create(model="model", prompt="Hello", max_tokens=9, temperature=0)
    assert found.choices[0].text == greedy(model, b"Hello", 9)
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (5, 9)


def test_a_stream_is_the_same_in_pieces(client, model):
    stream = client.completions.create(
        model="model", prompt=["Hello", "you"], max_tokens=9, temperature=0, stream=True,
        stream_options={"include_usage": True},
    )  # fmt: skip
    texts, usage = ["", ""], None
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [greedy(model, b"Hello", 9), greedy(model, b"you", 9)]
    assert usage.completion_tokens == 18


def test_a_chat_goes_through_the_template(client, model):
    options = {"model": "model", "max_completion_tokens": 7, "temperature": 0}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    expected = greedy(model, b"<system>s<user>Hi<assistant>", 7)
    full = client.chat.completions.create(messages=messages, **options)
    assert full.choices[0].message.content == expected
    pieces = client.chat.completions.create(messages=messages, stream=True, **options)
    deltas = [chunk.choices[0].delta for chunk in pieces]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == expected


def test_a_seed_repeats_and_its_continuations_differ(client):
    def sampled(seed):
        found = client.completions.create(
            model="model", prompt="ab", max_tokens=8, temperature=1.0, n=3, seed=seed
        )
        return [choice.text for choice in found.choices]

    assert sampled(5) == sampled(5) != sampled(6)
    assert len(set(sampled(5))) == 3


def test_log_probabilities_and_stop_words(client):
    found = client.completions.create(
        model="model", prompt="Hello", max_tokens=6, temperature=0, logprobs=2
    ).choices[0]
    assert len(found.logprobs.token_logprobs) == 6
    assert all(len(best) <= 2 for best in found.logprobs.top_logprobs)
    assert max(found.logprobs.token_logprobs) <= 0
    assert found.logprobs.text_offset == list(range(6))  # a token is a character here
    pieces = client.completions.create(
        model="model", prompt="Hello", max_tokens=6, temperature=0, logprobs=0, stream=True
    )
    logs = [piece.choices[0].logprobs for piece in pieces]
    assert [at for one in logs if one for at in one.text_offset] == list(range(6))
    word = found.text[2:4]
    cut = client.completions.create(
        model="model", prompt="Hello", max_tokens=6, temperature=0, stop=word
    ).choices[0]
    assert cut.text == found.text[: found.text.index(word)]
    assert cut.finish_reason == "stop"
    chat = client.chat.completions.create(
        model="model", messages=[{"role": "user", "content": "x"}], max_tokens=2, logprobs=True,
        top_logprobs=3,
    )  # fmt: skip
    assert [len(step.top_logprobs) for step in chat.choices[0].logprobs.content] == [3, 3]


def test_models_are_listed(client):
    assert [one.id for one in client.models.list()] == ["model"]
    assert client.models.retrieve("model").id == "model"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "there is no model 'other'"),
        ({"max_tokens": 1000}, 400, "do not fit the model's 96 positions"),
        ({"max_tokens": 0}, 400, "max_tokens is not between"),
        ({"temperature": -1}, 400, "temperature is not between 0 and 2"),
        ({"temperature": "hot"}, 400, "temperature is not a number"),
        ({"n": 7}, 400, "n is not between 1 and 6"),
        ({"prompt": ["a"] * 7}, 400, "more than 6 continuations"),
        ({"prompt": ""}, 400, "a prompt is empty"),
        ({"prompt": {"a": 1}}, 400, "prompt is not a text"),
        ({"prompt": "\ud800"}, 400, "half of a surrogate pair"),
        ({"presence_penalty": 1}, 400, "presence_penalty is not supported"),
        ({"stop": ["a"] * 5}, 400, "more than 4 stop words"),
        ({"stop": ""}, 400, "a stop word has 1 to"),
        ({"stream_options": {}}, 400, "stream_options goes with stream"),
        ({"surprise": 1}, 400, "unknown field 'surprise'"),
        ({"prompt": "a" * (1 << 18)}, 413, "the body is larger"),
        ({"prompt": "a" * 20_000_000}, 413, "the body is larger"),
    ],
)
def test_what_cannot_be_done_is_said(server, fields, status, message):
    body = {"model": "model", "prompt": "a", "max_tokens": 1, **fields}
    found, _, answer = posted(server[0], body)
    assert found == status
    assert message in answer["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": ""}, "invalid_prompt"),
        ({"prompt": [1_000_000]}, "invalid_prompt"),
        ({"max_tokens": 1000}, "context_length_exceeded"),
    ],
)
def test_only_a_prompt_that_is_too_long_has_the_code_of_one(server, fields, code):
    body = {"model": "model", "prompt": "a", "max_tokens": 1, **fields}
    assert posted(server[0], body)[2]["error"]["code"] == code


def test_more_than_the_queue_holds_is_told_to_come_again(server):
    port, service = server
    body = {"model": "model", "prompt": ["a"] * 6, "max_tokens": 90}
    found = []

    def ask():
        found.append(posted(port, body))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for status, _, _ in found} == {200, 429}
    assert all(headers["retry-after"] == "1" for status, headers, _ in found if status == 429)
    assert service.num_unfinished == 0


def test_hostile_clients_do_not_disturb_others(server, monkeypatch):
    monkeypatch.setattr(
        hostile_requests, "GOOD",
        {"model": "model", "prompt": "Hello", "max_tokens": 4, "temperature": 0},
    )  # fmt: skip
    port, service = server
    found = hostile_requests.besiege(port, 3 * len(hostile_requests.ATTACKS), every=21)
    assert found["wrong_types", "400"] and found["deep_json", "400"]
    deadline = time.monotonic() + 10
    while service.num_unfinished and time.monotonic() < deadline:
        time.sleep(0.05)
    assert service.num_unfinished == 0, "sequences of clients that left go on"


def test_a_client_that_says_nothing_is_dropped(server):
    with socket.create_connection(("127.0.0.1", server[0]), 10) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nHo")
        begin = time.monotonic()
        assert slow.recv(100) == b""
    assert time.monotonic() - begin < 5


def asked(port, *lines, body=b"", method="POST", path="/v1/completions"):
    """Send a request of these header lines; return status and JSON, and whether it ended."""
    with socket.create_connection(("127.0.0.1", port), 20) as client:
        head = "\r\n".join([f"{method} {path} HTTP/1.1", *lines])
        client.sendall(head.encode() + b"\r\n\r\n" + body)
        answer = http.client.HTTPResponse(client, method=method)
        answer.begin()
        content = answer.read()
        client.settimeout(5)
        ended = client.recv(1) == b"" if answer.will_close else False
    return answer.status, content, ended


@pytest.mark.parametrize("line", ["GET /health", "GET /", "GET /nothing", "PUT /v1/completions"])
def test_a_body_that_nobody_reads_keeps_no_connection(server, line):
    method, path = line.split()
    begin = time.monotonic()
    with socket.create_connection(("127.0.0.1", server[0]), 20) as client:
        head = f"{line} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        client.sendall(head.encode())
        client.settimeout(0.2)
        received, ended = b"", False
        while not ended and time.monotonic() - begin < 10:
            try:
                part = client.recv(4096)
                received, ended = received + part, not part
                client.sendall(b"x")
            except TimeoutError:
                client.sendall(b"x")  # each byte would put a timer off
            except ConnectionError:
                ended = True
    assert received.startswith(b"HTTP/1.1 ")
    assert ended and time.monotonic() - begin < 6


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["Host: localhost", "Content-Type: text/plain"], 415),
        (["Host: localhost"], 415),
        (["Host: evil.example", "Content-Type: application/json"], 403),
        (["Host: 127.0.0.1.evil.example:80", "Content-Type: application/json"], 403),
        (["Host: known.example:5000", "Content-Type: application/json; charset=utf-8"], 200),
        (["Host: [::1]:5000", "Content-Type: Application/JSON"], 200),
        (["Host: 127.0.0.2", "Content-Type: application/json"], 200),
    ],
)
def test_a_page_of_a_browser_is_not_answered(server, lines, status):
    body = json.dumps({"model": "model", "prompt": "a", "max_tokens": 1}).encode()
    found, _, _ = asked(server[0], *lines, f"Content-Length: {len(body)}", body=body)
    assert found == status


def test_clients_need_one_of_the_keys_where_there_are_some(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key\n\nsecond-key\n")
    access = Access(keys=read_keys(file))
    access.check({b"authorization": b"Bearer second-key"}, "/v1/models")
    access.check({}, "/health")
    for given in (b"", b"Bearer", b"Bearer third-key", b"Basic first-key", b"Bearer first-key x"):
        with pytest.raises(BadRequest) as caught:
            access.check({b"authorization": given}, "/v1/models")
        assert caught.value.status == 401
    for text in ("", "# none\n", "with blank\n", "t\u00e4st\n"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="key"):
            read_keys(file)


@pytest.mark.parametrize(
    ("words", "is_warned"),
    [
        ("--host 0.0.0.0", True), ("--host 192.0.2.7", True), ("--host 127.0.0.1", False),
        ("--host 0.0.0.0 --api-key-file KEYS", False),
    ],
)  # fmt: skip
def test_an_address_that_the_network_reaches_without_keys_is_warned_of(
    tmp_path, capsys, words, is_warned
):
    (tmp_path / "keys").write_text("first-key\n")
    words = words.replace("KEYS", str(tmp_path / "keys"))
    run_text_generation_server.access_of(read_command_line(ServerFlags, words.split()))
    said = capsys.readouterr().err
    assert ("warning: --host" in said and "--api-key-file" in said) == is_warned


def test_each_request_gets_one_line_of_the_log(server, model):
    lines = []
    port, service = server
    app = App(service, Bytes(), "model", LIMITS, None, Access(), log=lines.append)
    listening = http_server(app, limits=LIMITS)
    listening.config.port = 0
    thread = threading.Thread(target=listening.run)
    thread.start()
    while not listening.started:
        time.sleep(0.01)
    try:
        here = listening.servers[0].sockets[0].getsockname()[1]
        status, _, _ = posted(here, {"model": "model", "prompt": "Hello", "max_tokens": 3})
        assert status == 200
        posted(here, {"prompt": 7.5})
        asked(here, "Host: localhost", method="GET", path="/health")
    finally:
        listening.should_exit = True
        thread.join(20)
    assert re.fullmatch(r"POST /v1/completions 200 5 \+ 3 tokens \d+\.\d\d s", lines[0]), lines
    assert lines[1].startswith("POST /v1/completions 400 ")
    assert len(lines) == 2


def test_counts_and_the_list_of_paths_are_shown(server, client):
    client.completions.create(model="model", prompt="Hello", max_tokens=3)
    _, text, _ = asked(server[0], "Host: localhost", method="GET", path="/metrics")
    counts = dict(line.rsplit(" ", 1) for line in text.decode().splitlines() if line[0] != "#")
    assert int(counts['lattice_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert int(counts["lattice_new_tokens_total"]) >= 3
    assert counts["lattice_sequences_running"] == "0"
    _, shown, _ = asked(server[0], "Host: localhost", method="GET", path="/")
    assert "/v1/chat/completions" in json.loads(shown)["paths"]


def test_any_failure_is_answered_in_json(server, monkeypatch):
    class Panic(BaseException):
        pass

    def panics(self, text):
        raise Panic

    monkeypatch.setattr(Bytes, "tokenize", panics)
    status, _, answer = posted(server[0], {"model": "model", "prompt": "a"})
    assert (status, answer["error"]["message"]) == (500, "internal error")


def test_a_model_that_computes_no_number_is_an_error(server, model, client):
    broken = torch.full_like(model.output_layer.weight, torch.nan)
    full = model.output_layer.weight.detach().clone()
    cached = CachedModel(
        model, vocab_size=128, max_rows=2, max_length=9, groups=ProcessGroupCollection.single()
    )
    with torch.no_grad():
        model.output_layer.weight.copy_(broken)
        try:
            for temperature in (0, 1):
                body = {"model": "model", "prompt": "a", "temperature": temperature, "logprobs": 1}
                status, _, answer = posted(server[0], body)
                assert (status, answer["error"]["code"]) == (500, "not_finite")
            for asking in (model, cached):
                with pytest.raises(NumericsError, match="not finite"):
                    greedy(asking, b"a", 2)
            with pytest.raises(NumericsError, match="not finite"):
                continue_texts(Engine(cached), [Request(tokens=[1], max_new_tokens=2)], Bytes())
            with pytest.raises(NumericsError, match="not finite"):
                generate(
                    model, [[1]], max_new_tokens=2, vocab_size=128, max_sequence_length=CONTEXT,
                    uses_cache=False, pg_collection=ProcessGroupCollection.single(),
                )  # fmt: skip
        finally:
            model.output_layer.weight.copy_(full)
    assert greedy(model, b"Hello", 2) == greedy(cached, b"Hello", 2)
    assert client.completions.create(model="model", prompt="a", max_tokens=1).choices


class Breaking(Engine):
    def step(self):
        if self.is_idle:
            return []
        raise RuntimeError("out of memory")


def test_clients_are_told_when_the_engine_ends(model):
    cached = CachedModel(
        model, vocab_size=128, max_rows=1, max_length=8, groups=ProcessGroupCollection.single()
    )
    service = Service(Breaking(cached), SingleProcess(), 4)
    told = []
    service.submit([Request(tokens=[1], max_new_tokens=2)], lambda *what: told.append(what))
    with pytest.raises(RuntimeError, match="out of memory"):
        service.run()
    assert told[0][0] == 0 and "out of memory" in str(told[0][1])
    with pytest.raises(type(service.failure)):
        service.submit([Request(tokens=[1], max_new_tokens=2)], lambda *what: None)


def test_one_address_does_not_take_the_places_of_others(server):
    def is_answered(client):
        try:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            return client.recv(4096).startswith(b"HTTP/1.1 200")
        except ConnectionError:
            return False

    def connected(source):
        return socket.create_connection(("127.0.0.1", server[0]), 20, (source, 0))

    kept = []
    try:
        for _ in range(LIMITS.connections_per_address + 1):
            kept.append(connected("127.0.0.9"))
        assert not is_answered(kept[-1])
        kept.append(connected("127.0.0.10"))
        assert is_answered(kept[-1])
    finally:
        for client in kept:
            client.close()


@pytest.mark.parametrize(
    ("peer", "origin"),
    [
        (("10.1.2.3", 5), "10.1.2.3"),
        (("::ffff:10.1.2.3", 5, 0, 0), "10.1.2.3"),
        (("2001:db8:1:2:aaaa::1", 5, 0, 0), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 5, 0, 2), "fe80::/64"),
        (None, ""),
    ],
)
def test_an_address_is_one_client_and_so_is_a_network_of_ipv6(peer, origin):
    assert origin_of(peer) == origin


@pytest.mark.parametrize(("words", "share"), [("", 256), ("--host 0.0.0.0", 128),
                                              ("--max-connections-per-address 7", 7)])  # fmt: skip
def test_a_client_from_elsewhere_gets_half_of_the_places(words, share):
    options = read_command_line(ServerFlags, words.split())
    assert run_text_generation_server.limits_of(options).connections_per_address == share
