"""An HTTP server with OpenAI's completions and chats, on Starlette, pydantic and uvicorn.

Unknown fields are refused, because ignoring them would change the answer. A web page in a browser
can send requests to this machine: so bodies must be `application/json`, for which a browser needs
permission, and the Host header must name this machine, which prevents DNS rebinding. Each
connection carries one request and has a limited lifetime.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from megatron.core.datasets.preprocessing.documents import BadDocumentError
from megatron.core.foundation.errors import MegatronError
from megatron.core.foundation.optional_imports import require
from megatron.core.tokenizers.base import TextTokenizer
from megatron.inference.engine import NOT_FINITE, Request, Token
from megatron.inference.sampling import Sampling
from megatron.inference.serving import Limits, Service, ServiceError
from megatron.inference.text import Continuation, TextStream, take

_PURPOSE = "tools/run_text_generation_server.py"
pydantic: Any = require("pydantic", purpose=_PURPOSE)
requests: Any = require("starlette.requests", purpose=_PURPOSE)
responses: Any = require("starlette.responses", purpose=_PURPOSE)
uvicorn: Any = require("uvicorn", purpose=_PURPOSE)
H11Protocol: Any = require("uvicorn.protocols.http.h11_impl", purpose=_PURPOSE).H11Protocol

_MOST_SEQUENCES = 16
"""Continuations of one request: prompts times `n`."""
NonEmpty = pydantic.Field(min_length=1)
Positive = Annotated[int, pydantic.Field(ge=1, lt=1 << 31)]
StopWord = Annotated[str, pydantic.Field(min_length=1, max_length=256)]
Tokens = Annotated[list[Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]], NonEmpty]


class _Model(pydantic.BaseModel):  # type: ignore[misc]
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class _Body(_Model):
    model: str
    max_tokens: Positive | None = None
    temperature: float = pydantic.Field(1.0, ge=0, le=2)
    top_p: float = pydantic.Field(1.0, ge=0, le=1)
    top_k: int = pydantic.Field(0, ge=0, lt=1 << 31)
    seed: Annotated[int, pydantic.Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: int = pydantic.Field(1, ge=1, le=_MOST_SEQUENCES)
    stop: StopWord | Annotated[list[StopWord], pydantic.Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: dict[Literal["include_usage"], bool] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    user: Any = None


class _Completion(_Body):
    prompt: str | Tokens | Annotated[list[str], NonEmpty] | Annotated[list[Tokens], NonEmpty]
    max_tokens: Positive | None = 16


class _Part(_Model):
    type: Literal["text"]
    text: str


class _Message(_Model):
    role: str
    content: str | list[_Part]
    name: str | None = None


class _Chat(_Body):
    messages: Annotated[list[_Message], NonEmpty]
    max_completion_tokens: Positive | None = None


class ApiError(Exception):
    """An answer with an HTTP status, a message and OpenAI's code of the error."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


def _error_response(error: Exception) -> Any:
    if isinstance(error, ServiceError):
        error = ApiError(503, error.found, "unavailable")
    elif isinstance(error, pydantic.ValidationError):
        found = error.errors(include_url=False, include_input=False, include_context=False)[:4]
        where = [".".join(map(str, one["loc"]))[:80] or "the body" for one in found]
        texts = [f"{place}: {one['msg']}" for place, one in zip(where, found, strict=True)]
        error = ApiError(400, "; ".join(texts))
    elif not isinstance(error, ApiError):
        error = ApiError(500, "internal error")
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    detail = {"message": error.message, "type": kind, "param": None, "code": error.code}
    headers = {429: {"Retry-After": "1"}, 401: {"WWW-Authenticate": "Bearer"}}.get(error.status)
    return responses.JSONResponse({"error": detail}, error.status, headers)


def is_loopback(host: str) -> bool:
    """Return whether a name or an address reaches only this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, kw_only=True)
class App:
    """The ASGI application."""

    service: Service
    tokenizer: TextTokenizer
    model: str
    """Name of the model for clients."""
    limits: Limits
    chat_template: Any = None
    """Renders messages; None if the model has no template."""
    ends: frozenset[int] = frozenset()
    """Token ids that end a continuation."""
    keys: tuple[str, ...] = ()
    """A request must contain one of these keys; without keys all requests are accepted."""
    hosts: frozenset[str] | None = frozenset()
    """Accepted Host headers in addition to names of this machine; None accepts all."""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Answer a request; stop when its client disconnects."""
        if scope["type"] != "http":
            return
        request, body = requests.Request(scope, receive), bytearray()
        problem, size = None, 0
        try:
            async with asyncio.timeout(self.limits.receive_timeout_s):
                async for part in request.stream():  # all of it: a client that sends does not read
                    size += len(part)
                    body += part if size <= self.limits.body_bytes else b""
            self._check(request, size)
        except requests.ClientDisconnect:
            return
        except TimeoutError:
            problem = ApiError(408, "the body took too long")
        except ApiError as error:
            problem = error
        answering = asyncio.ensure_future(self._answer(request, bytes(body), problem, send))
        leaving = asyncio.ensure_future(receive())  # returns when the client has disconnected
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answering
        finally:
            answering.cancel()
            leaving.cancel()

    def _check(self, request: Any, size: int) -> None:
        headers = request.headers
        if size > self.limits.body_bytes:
            raise ApiError(413, f"the body is larger than {self.limits.body_bytes} bytes")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise ApiError(415, "the header Content-Type: application/json is missing")
        try:
            host = urlsplit(f"//{headers.get('host', 'localhost')}").hostname or ""
        except ValueError:
            host = ""
        if self.hosts is not None and not is_loopback(host) and host not in self.hosts:
            raise ApiError(403, f"the Host {host[:80]!r} is not in --allowed-hosts")
        if self.keys and request.url.path != "/health":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Compare with all keys, each in constant time.
            equal = [hmac.compare_digest(given.encode(), key.encode()) for key in self.keys]
            if scheme.lower() != "bearer" or not any(equal):
                raise ApiError(401, "the API key is missing or wrong", "bad_api_key")

    async def _answer(self, request: Any, body: bytes, problem: ApiError | None, send: Any) -> None:
        """Send the response to a request, or to a problem of it."""
        unexpected = None
        try:
            if problem is not None:
                raise problem
            response = await self._respond(request.method, request.url.path.rstrip("/"), body)
        except (ApiError, ServiceError, pydantic.ValidationError) as error:
            response = _error_response(error)
        except Exception as error:
            unexpected, response = error, _error_response(error)
        # A `receive` that never returns: `__call__` watches for the end of the connection.
        await response(request.scope, asyncio.Future, send)
        if unexpected is not None:
            raise unexpected  # uvicorn logs it

    async def _respond(self, method: str, path: str, body: bytes) -> Any:
        posts = {"/v1/completions": self._complete, "/v1/chat/completions": self._chat}
        if path not in (*posts, "/v1/models", "/health"):
            raise ApiError(404, "Not Found")
        if method not in (("POST",) if path in posts else ("GET", "HEAD")):
            raise ApiError(405, "Method Not Allowed")
        if path in posts:
            return await posts[path](body)
        if path == "/v1/models":
            model = {"id": self.model, "object": "model", "created": 0, "owned_by": "local"}
            return responses.JSONResponse({"object": "list", "data": [model]})
        if self.service.failure is not None:
            raise self.service.failure
        return responses.JSONResponse({"status": "ok"})

    async def _complete(self, content: bytes) -> Any:
        """Continue prompts."""
        body = _Completion.model_validate_json(content)
        is_one = isinstance(body.prompt, str) or isinstance(body.prompt[0], int)
        prompts = [body.prompt] if is_one else body.prompt
        return await self._continue(body, prompts, self.tokenizer.tokenize, body.max_tokens)

    async def _chat(self, content: bytes) -> Any:
        """Continue a chat, which the model's template renders as one prompt."""
        body = _Chat.model_validate_json(content)
        if self.chat_template is None:
            raise ApiError(400, "this model has no chat template", "no_chat_template")
        messages = []
        for one in body.messages:
            parts = [one.content] if isinstance(one.content, str) else [p.text for p in one.content]
            messages.append({"role": one.role, "content": "".join(parts)})
        render = partial(self.chat_template.render, messages, to_be_answered=True)
        try:
            prompt = await asyncio.to_thread(render)
        except BadDocumentError as error:
            raise ApiError(400, f"messages: {error}") from None
        most = body.max_completion_tokens or body.max_tokens
        # `tokenize_part` adds no special tokens: the template contains them.
        return await self._continue(body, [prompt], self.tokenizer.tokenize_part, most)

    async def _continue(
        self, body: Any, prompts: list[Any], tokenize: Callable[[str], list[int]], most: int | None
    ) -> Any:
        if body.model != self.model:
            message = f"there is no model {body.model[:80]!r}; this server has {self.model!r}"
            raise ApiError(404, message, "model_not_found")
        if body.n * len(prompts) > _MOST_SEQUENCES:
            raise ApiError(400, f"more than {_MOST_SEQUENCES} continuations in one request")
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options needs stream")
        engine, sequences = self.service.engine, []
        sampling = Sampling(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p or 1e-9,  # 0 means the most likely token
            seed=secrets.randbits(62) if body.seed is None else body.seed,
        )
        for tokens in prompts:
            if isinstance(tokens, str):
                try:  # in a thread: a megabyte takes a while
                    tokens = await asyncio.to_thread(tokenize, tokens)
                except (MegatronError, ValueError, KeyError) as error:
                    found = error.found if isinstance(error, MegatronError) else error
                    raise ApiError(400, f"prompt: cannot be tokenized: {found}") from None
            one = partial(
                Request, tokens=tokens, sampling=sampling, stop_tokens=self.ends,
                max_new_tokens=most or max(1, engine.max_length - len(tokens)),
            )  # fmt: skip
            if problem := engine.check(one()):
                is_too_long = "--max-new-tokens" in problem.flags
                code = "context_length_exceeded" if is_too_long else "invalid_prompt"
                raise ApiError(400, f"prompt: {problem.found}", code)
            sequences += [one(sequence=number) for number in range(body.n)]
        unfinished = self.service.num_unfinished + len(sequences)
        if unfinished > engine.max_rows + self.limits.queued:
            raise ApiError(429, "too many sequences are waiting", "queue_full")
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        answer = _Answer(self, isinstance(body, _Chat), sequences, stop)
        if body.stream:
            events = answer.events((body.stream_options or {}).get("include_usage", False))
            return responses.StreamingResponse(events, media_type="text/event-stream")
        return responses.JSONResponse(await answer.full())


class _Answer:
    """The continuations of one request, in OpenAI's format."""

    def __init__(self, app: App, is_chat: bool, sequences: list[Request], stop: list[str]) -> None:
        self.app, self.is_chat, self.sequences = app, is_chat, sequences
        self.found = [Continuation() for _ in sequences]
        self.streams = [TextStream(app.tokenizer, one.tokens, stop) for one in sequences]
        self.common = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": app.model,
        }

    async def pieces(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield (index, new text, finish reason) until all continuations have ended.

        Raises:
            ApiError: the request takes too long, or the logits are not finite.
            ServiceError: the engine has ended.
        """
        service, loop = self.app.service, asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, Token | ServiceError]] = asyncio.Queue()

        def deliver(index: int, what: Token | ServiceError) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(arrived.put_nowait, (index, what))

        deadline = time.monotonic() + self.app.limits.request_timeout_s
        numbers: dict[int, int] = {}
        try:
            for index, one in enumerate(self.sequences):
                numbers[index] = service.submit(one, partial(deliver, index))
            while numbers:
                left_s = max(deadline - time.monotonic(), 0.0)
                index, what = await asyncio.wait_for(arrived.get(), left_s)
                if isinstance(what, ServiceError):
                    raise what
                if index not in numbers:
                    continue  # a token after a stop word
                if what.finish_reason == "error":
                    raise ApiError(500, NOT_FINITE, "not_finite")
                stream, found = self.streams[index], self.found[index]
                text = take(what, stream, found)
                has_ended = what.finish_reason is not None or stream.stopped
                if has_ended:
                    service.cancel(numbers.pop(index))
                yield index, text, found.finish_reason if has_ended else None
        except TimeoutError:
            raise ApiError(504, "the answer took too long", "timeout") from None
        finally:
            for number in numbers.values():
                service.cancel(number)

    async def events(self, includes_usage: bool) -> AsyncIterator[str]:
        """Yield the server-sent events of a stream; an error is also sent as an event."""
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        common = {**self.common, "object": kind}
        begun: set[int] = set()
        try:
            async for index, text, reason in self.pieces():
                delta = {"content": text}
                if index not in begun:
                    delta["role"] = "assistant"
                begun.add(index)
                choice = self._choice(index, text, reason, delta=delta)
                yield f"data: {json.dumps({**common, 'choices': [choice]})}\n\n"
        except Exception as error:
            yield f"data: {_error_response(error).body.decode()}\n\n"
            return
        if includes_usage:
            yield f"data: {json.dumps({**common, 'choices': [], 'usage': self._usage()})}\n\n"
        yield "data: [DONE]\n\n"

    async def full(self) -> dict[str, Any]:
        """Return the answer of a request that does not stream."""
        async for _ in self.pieces():
            pass
        choices = [
            self._choice(
                index, one.text, one.finish_reason,
                message={"role": "assistant", "content": one.text},
            )
            for index, one in enumerate(self.found)
        ]  # fmt: skip
        kind = "chat.completion" if self.is_chat else "text_completion"
        return {**self.common, "object": kind, "choices": choices, "usage": self._usage()}

    def _choice(self, index: int, text: str, reason: str | None, **of_chat: Any) -> dict[str, Any]:
        content = of_chat if self.is_chat else {"text": text}
        return {"index": index, "finish_reason": reason, "logprobs": None, **content}

    def _usage(self) -> dict[str, int]:
        # The prompt of n continuations is counted once.
        num_prompt = sum(len(one.tokens) for one in self.sequences if one.sequence == 0)
        num_new = sum(len(one.tokens) for one in self.found)
        counts = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
        return {**counts, "total_tokens": num_prompt + num_new}


def http_server(app: App, *, logs_requests: bool) -> Any:
    """Return a `uvicorn.Server`; its `run` serves until `should_exit`."""
    limits = app.limits

    class Protocol(H11Protocol):  # type: ignore[misc]
        """A connection that is closed after one request, or if the request does not arrive."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            # A client that does not read its answer must not keep the connection.
            longest_s = 2 * limits.receive_timeout_s + limits.request_timeout_s
            self.loop.call_later(longest_s, transport.abort)
            self.loop.call_later(limits.receive_timeout_s, self._end_without_request)

        def _end_without_request(self) -> None:
            if self.cycle is None:
                self.transport.abort()

    config = uvicorn.Config(
        app, http=Protocol, ws="none", lifespan="off", server_header=False,
        access_log=logs_requests, log_level="info" if logs_requests else "critical",
        limit_concurrency=limits.connections, headers=[("Connection", "close")],
        timeout_graceful_shutdown=5, h11_max_incomplete_event_size=16384,
    )  # fmt: skip
    server = uvicorn.Server(config)
    # The caller handles signals: the other ranks must end before the process does.
    server.capture_signals = contextlib.nullcontext
    return server
