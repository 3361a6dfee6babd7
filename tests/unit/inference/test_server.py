"""The server answers OpenAI's own client, says what is wrong, and outlives hostile clients."""

import http.client
import json
import socket
import threading
import time
from contextlib import contextmanager

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
from megatron.core.tokenizers.null_and_byte import ByteTokenizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transport.object_collectives import SingleProcess
from megatron.inference.engine import Engine, Request
from megatron.inference.forward import CachedModel
from megatron.inference.generate import generate
from megatron.inference.server import App, http_server
from megatron.inference.serving import Limits, Service
from megatron.inference.text import continue_texts
from tests.parity import hostile_requests
from tools.run_text_generation_server import ServerFlags, access_of, read_keys

LIMITS = Limits(body_bytes=1 << 18, queued=12, receive_timeout_s=1.0)
CONTEXT = 96
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


class Bytes(ByteTokenizer):
    def tokenize_part(self, text):  # also where a test changes `tokenize`
        return list(text.encode())


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


@contextmanager
def serving(service, **access):
    """Serve; give the port."""
    app = App(
        service=service, tokenizer=Bytes(), model="model", limits=LIMITS,
        chat_template=ChatTemplate(TEMPLATE, {}), **access,
    )  # fmt: skip
    listening = http_server(app, logs_requests=False)
    listening.config.port = 0
    thread = threading.Thread(target=listening.run)
    thread.start()
    while not listening.started:
        time.sleep(0.01)
    try:
        yield listening.servers[0].sockets[0].getsockname()[1]
    finally:
        listening.should_exit = True
        thread.join(20)


@pytest.fixture(scope="module")
def server(model):
    groups = ProcessGroupCollection.single()
    engine = Engine(
        CachedModel(model, vocab_size=128, max_rows=4, max_length=CONTEXT, groups=groups)
    )
    service = Service(engine, SingleProcess())
    thread = threading.Thread(target=service.run)
    thread.start()
    with serving(service, hosts=frozenset({"known.example"})) as port:
        yield port, service
    service.stop()
    thread.join(20)


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server[0]}/v1", api_key="-") as found:
        yield found


def posted(port, body, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        headers = {"Content-Type": "application/json", **headers}
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


def test_a_prompt_begins_as_its_tokenizer_says_and_a_conversation_as_its_template_says(
    server, client, model, monkeypatch
):
    monkeypatch.setattr(Bytes, "tokenize", lambda self, text: [1, *text.encode()])
    options = {"model": "model", "max_tokens": 5, "temperature": 0}
    found = client.completions.create(prompt=["a", "b"], **options)
    assert [choice.text for choice in found.choices] == [
        greedy(model, b"\x01a", 5), greedy(model, b"\x01b", 5),
    ]  # fmt: skip
    messages = [{"role": "user", "content": "a"}]
    found = client.chat.completions.create(messages=messages, **options)
    assert found.choices[0].message.content == greedy(model, b"<user>a<assistant>", 5)


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


def test_a_stop_word_ends_a_text_and_is_no_part_of_it(client):
    options = {"model": "model", "prompt": "Hello", "max_tokens": 6, "temperature": 0}
    text = client.completions.create(**options).choices[0].text
    (cut,) = client.completions.create(**options, stop=text[2:4]).choices
    assert cut.text == text[: text.index(text[2:4])]
    assert cut.finish_reason == "stop"


def test_models_are_listed(client):
    assert [one.id for one in client.models.list()] == ["model"]


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"model": "other"}, 404, "there is no model 'other'"),
        ({"max_tokens": 1000}, 400, "do not fit the model's 96 positions"),
        ({"max_tokens": 0}, 400, "max_tokens: Input should be greater than or equal to 1"),
        ({"temperature": -1}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"temperature": "hot"}, 400, "temperature: Input should be a valid number"),
        ({"temperature": True}, 400, "temperature: Input should be a valid number"),
        ({"n": 17}, 400, "n: Input should be less than or equal to 16"),
        ({"prompt": ["a"] * 17}, 400, "more than 16 continuations"),
        ({"prompt": ""}, 400, "a prompt is empty"),
        ({"prompt": {"a": 1}}, 400, "prompt.str: Input should be a valid string"),
        ({"prompt": "\ud800"}, 400, "Invalid JSON"),
        ({"presence_penalty": 1}, 400, "presence_penalty: Input should be 0"),
        ({"logit_bias": {"1": 1.0}}, 400, "logit_bias: Extra inputs are not permitted"),
        ({"stop": ["a"] * 5}, 400, "at most 4 items"),
        ({"stop": ""}, 400, "at least 1 character"),
        ({"stream_options": {}}, 400, "stream_options needs stream"),
        ({"surprise": 1}, 400, "surprise: Extra inputs are not permitted"),
        ({"prompt": "a" * (1 << 18)}, 413, "the body is larger"),
        ({"prompt": "a" * 20_000_000}, 413, "the body is larger"),
    ],
)
def test_a_request_that_cannot_be_done_is_refused_with_the_reason(server, fields, status, message):
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


def test_clients_need_one_of_the_keys_where_there_are_some(server, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst-key\n\nsecond-key\n")
    body = {"model": "model", "prompt": "a", "max_tokens": 1}
    with serving(server[1], keys=read_keys(file)) as port:
        assert posted(port, body, Authorization="Bearer second-key")[0] == 200
        assert asked(port, "Host: localhost", method="GET", path="/health")[0] == 200
        for given in ("", "Bearer", "Bearer third-key", "Basic first-key", "Bearer first-key x"):
            status, headers, _ = posted(port, body, Authorization=given)
            assert (status, headers["www-authenticate"]) == (401, "Bearer"), given
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
    access_of(read_command_line(ServerFlags, words.split()))
    said = capsys.readouterr().err
    assert ("warning: --host" in said and "--api-key-file" in said) == is_warned


def test_limits_are_positive():
    with pytest.raises(ConfigError, match="--max-queue 0"):
        access_of(read_command_line(ServerFlags, ["--max-queue", "0"]))


@pytest.mark.parametrize("kind", [RuntimeError, BaseException])
def test_any_failure_of_a_tokenizer_is_an_error(kind, server, monkeypatch):
    """Errors in the Rust code of a tokenizer are no Exception."""

    def fails(self, text):
        raise kind

    monkeypatch.setattr(Bytes, "tokenize", fails)
    body = json.dumps({"model": "model", "prompt": "a"}).encode()
    lines = ("Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}")
    status, content, _ = asked(server[0], *lines, body=body)
    assert status == 500
    assert b"internal error" in content.lower().replace(b"server ", b"")


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
                body = {"model": "model", "prompt": "a", "temperature": temperature}
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
    service = Service(Breaking(cached), SingleProcess())
    told = []
    service.submit(Request(tokens=[1], max_new_tokens=2), told.append)
    with pytest.raises(RuntimeError, match="out of memory"):
        service.run()
    assert "out of memory" in str(told[0])
    with pytest.raises(type(service.failure)):
        service.submit(Request(tokens=[1], max_new_tokens=2), told.append)
    with serving(service) as port:
        assert asked(port, "Host: localhost", method="GET", path="/health")[0] == 503
