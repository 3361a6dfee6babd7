"""The ASGI application: routes, bodies with limits, answers and streams.

It is written to the ASGI specification itself, so that every wait has its limit: for the body,
for the engine, and for a client that does not take what it asked for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from megatron.core.datasets.preprocessing.documents import BadDocumentError
from megatron.core.foundation.errors import MegatronError
from megatron.core.tokenizers.base import TextTokenizer
from megatron.inference.engine import NOT_FINITE, Request, Token
from megatron.inference.server.access import Access, check_content_type
from megatron.inference.server.client import Client, ClientGone, Receive, Send
from megatron.inference.server.counters import Counters
from megatron.inference.server.limits import Limits
from megatron.inference.server.protocol import (
    BadRequest,
    TextRequest,
    parse_json,
    read_request,
)
from megatron.inference.server.responses import Response
from megatron.inference.server.serving import Service, ServiceError, Submission
from megatron.inference.text import Continuation, TextStream, take

_ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
_WATCHED = frozenset({"/health", "/metrics"})
_PLACES = frozenset({"/", "/v1/completions", "/v1/chat/completions", "/v1/models"}) | _WATCHED
_LOG = logging.getLogger(__name__)


class App:
    """The server's ASGI application.

    Args:
        service: the running engine.
        tokenizer: has `tokenize`, `tokenize_part` and `detokenize`.
        model: the name under which the model is served.
        chat_template: renders messages; None if the model has none.
        access: who is answered.
        log: takes a line for every request but those of a watcher; None logs none.
        ends: ids that end a continuation.
    """

    def __init__(
        self,
        service: Service,
        tokenizer: TextTokenizer,
        model: str,
        limits: Limits,
        chat_template: Any,
        access: Access | None = None,
        log: Callable[[str], None] | None = None,
        ends: frozenset[int] = frozenset(),
    ) -> None:
        self.service, self.tokenizer, self.model = service, tokenizer, model
        self.limits, self.chat_template, self.ends = limits, chat_template, ends
        self.access, self.log = access or Access(), log
        self.counters = Counters()
        self.started = int(time.time())

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request; see the ASGI specification, version 3."""
        if scope["type"] != "http":
            return
        client = Client(receive, send, self.limits, dict(scope["headers"]))
        method, path, begin = scope["method"], scope["path"], time.monotonic()
        try:
            try:
                self.access.check(client.headers, path)
                await self._route(method, path, client)
            except (BadRequest, ServiceError) as problem:
                shown = _shown(problem)
                await client.respond(shown.status, shown.body())
        except (ClientGone, ConnectionError):
            pass
        except BaseException as error:  # a panic of a tokenizer's Rust code is no Exception
            if isinstance(error, _ENDS):
                raise
            _LOG.exception("%s %s failed", method, path)
            await client.respond_if_possible(500, BadRequest("internal error", status=500).body())
        finally:
            index = path if path in _PLACES else "other"
            self.counters.count_request(index, client.status)
            if self.log is not None and path not in _WATCHED:
                self.log(
                    f"{method[:8]} {index} {client.status or 'left'} {client.used} "
                    f"{time.monotonic() - begin:.2f} s"
                )

    async def _route(self, method: str, path: str, client: Client) -> None:
        posts = {"/v1/completions": False, "/v1/chat/completions": True}
        if path in posts:
            if method != "POST":
                raise BadRequest(f"{path[:80]} is called with POST", status=405)
            check_content_type(client.headers)
            body = await client.body()
            request = read_request(
                parse_json(body, self.limits),
                is_chat=posts[path],
                model=self.model,
                limits=self.limits,
            )
            await self._continue(request, client)
            return
        found: dict[str, Any] | None = None
        if path == "/health":
            found = {"status": "ok"}
            if self.service.failure is not None:
                raise self.service.failure
        elif path == "/":
            found = {"model": self.model, "paths": sorted(_PLACES - {"/"})}
        elif path == "/metrics":
            text = self.counters.text(self.service.engine.num_running, self.service.num_unfinished)
            await client.respond_text(text)
            return
        elif path == "/v1/models":
            found = {"object": "list", "data": [self._described()]}
        elif path == f"/v1/models/{self.model}":
            found = self._described()
        if found is None:
            raise BadRequest(f"there is nothing at {path[:80]!r}", status=404)
        if method not in ("GET", "HEAD"):
            raise BadRequest(f"{path[:80]} is called with GET", status=405)
        await client.respond(200, found)

    def _described(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.started,
            "owned_by": "local",
            "max_model_len": self.service.engine.max_length,
        }

    async def _continue(self, request: TextRequest, client: Client) -> None:
        # Tokenizing a megabyte takes a while: other clients are answered meanwhile.
        prompts = await asyncio.to_thread(self._tokenized, request)
        requests = [
            self._sequence(request, tokens, number)
            for tokens in prompts
            for number in range(request.count)
        ]
        for one in requests:
            problem = self.service.engine.check(one)
            if problem is not None:
                is_too_long = "--max-new-tokens" in problem.flags
                code = "context_length_exceeded" if is_too_long else "invalid_prompt"
                raise BadRequest(problem.found, param="prompt", code=code)
        if not self.service.has_capacity_for(len(requests)):
            raise BadRequest("too many requests are waiting", status=429, code="queue_full")
        response = Response(request, self.model, self.tokenizer, sum(map(len, prompts)))
        work = _Work(self.service, requests, self.tokenizer, request.stop, self.limits)
        prefixes = [""] * len(requests)
        if request.echoes:
            shown = [
                prompt if isinstance(prompt, str) else self.tokenizer.detokenize(prompt)
                for prompt in request.prompts
            ]
            prefixes = [prompt for prompt in shown for _ in range(request.count)]
        watching = asyncio.ensure_future(client.gone())
        try:
            if request.streams:
                await self._stream(response, work, prefixes, client, watching)
            else:
                async for _ in work.pieces(watching):
                    pass
                await client.respond(200, response.full(work.found, prefixes))
        finally:
            watching.cancel()
            work.give_up()
            num_new = sum(len(one.tokens) for one in work.found)
            client.used = f"{response.num_prompt_tokens} + {num_new} tokens"
            self.counters.count_tokens(response.num_prompt_tokens, num_new)

    async def _stream(
        self,
        response: Response,
        work: _Work,
        prefixes: list[str],
        client: Client,
        watching: asyncio.Future[None],
    ) -> None:
        await client.begin_stream()
        begun = [False] * len(prefixes)
        try:
            async for index, text, logprobs, reason in work.pieces(watching):
                if not text and not logprobs and reason is None and begun[index]:
                    continue
                text = text if begun[index] else prefixes[index] + text
                chunk = response.chunk(index, text, logprobs, reason, is_first=not begun[index])
                begun[index] = True
                await client.event(json.dumps(chunk))
        except (BadRequest, ServiceError) as problem:
            # The status is sent already: the error comes as an event.
            await client.event(json.dumps(_shown(problem).body()))
            await client.end_stream()
            return
        if response.request.includes_usage:
            num_new = sum(len(one.tokens) for one in work.found)
            await client.event(json.dumps(response.usage_chunk(num_new)))
        await client.event("[DONE]")
        await client.end_stream()

    def _tokenized(self, request: TextRequest) -> list[list[int]]:
        prompts: list[Any] = list(request.prompts)
        tokenize = self.tokenizer.tokenize
        if request.is_chat:
            if self.chat_template is None:
                message = "this model has no chat template"
                raise BadRequest(message, param="messages", code="no_chat_template")
            try:
                prompts = [self.chat_template.render(list(request.messages), to_be_answered=True)]
            except BadDocumentError as error:
                raise BadRequest(f"messages: {error}", param="messages") from None
            tokenize = self.tokenizer.tokenize_part  # the template writes special tokens itself
        try:
            return [
                tokenize(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts
            ]
        except (MegatronError, ValueError, KeyError) as error:
            said = error.found if isinstance(error, MegatronError) else error
            raise BadRequest(f"the prompt cannot be tokenized: {said}", param="prompt") from None

    def _sequence(self, request: TextRequest, tokens: list[int], number: int) -> Request:
        most_left = self.service.engine.max_length - len(tokens)
        most = request.max_new_tokens
        return Request(
            tokens=tokens,
            max_new_tokens=max(1, most_left) if most is None else most,
            sampling=request.sampling,
            sequence=number,
            stop_tokens=self.ends,
            num_top_logprobs=request.num_top_logprobs,
        )


class _Work:
    """The sequences of one request, while the engine works at them."""

    def __init__(
        self,
        service: Service,
        requests: list[Request],
        tokenizer: TextTokenizer,
        stop: tuple[str, ...],
        limits: Limits,
    ) -> None:
        self.found = [Continuation() for _ in requests]
        self._service = service
        self._streams = [TextStream(tokenizer, one.tokens, stop) for one in requests]
        self._open = set(range(len(requests)))
        self._deadline = time.monotonic() + limits.request_timeout_s
        loop = asyncio.get_running_loop()
        # Bounded by itself: a sequence brings no more tokens than it may have.
        self._arrived: asyncio.Queue[tuple[int, Token | ServiceError]] = asyncio.Queue()

        def deliver(index: int, what: Token | ServiceError) -> None:
            with suppress(RuntimeError):  # the server has stopped; nobody listens
                loop.call_soon_threadsafe(self._arrived.put_nowait, (index, what))

        self._submission: Submission = service.submit(requests, deliver)

    async def pieces(
        self, watching: asyncio.Future[None]
    ) -> AsyncIterator[tuple[int, str, list[Any], str | None]]:
        """Yield (place, new text, logs of new tokens, reason of the end) until all have ended.

        Raises:
            ClientGone: `watching` is done.
            BadRequest: it takes too long, or the model computes no number.
            ServiceError: the engine has ended.
        """
        while self._open:
            index, what = await self._next(watching)
            if isinstance(what, ServiceError):
                self._open.clear()
                raise what
            if index not in self._open:
                continue  # came after a stop word
            stream, result = self._streams[index], self.found[index]
            known = len(result.logprobs)
            if what.finish_reason == "error":
                raise BadRequest(NOT_FINITE, status=500, code="not_finite")
            text = take(what, stream, result)
            ended = what.finish_reason is not None or stream.stopped
            if ended:
                self._open.discard(index)
                if what.finish_reason is None:
                    self._service.cancel(self._submission, index)
            yield index, text, result.logprobs[known:], result.finish_reason if ended else None

    async def _next(self, watching: asyncio.Future[None]) -> tuple[int, Token | ServiceError]:
        if not self._arrived.empty():
            if watching.done():
                raise ClientGone
            return self._arrived.get_nowait()
        arriving: asyncio.Future[Any] = asyncio.ensure_future(self._arrived.get())
        waiting: set[asyncio.Future[Any]] = {arriving, watching}
        left = self._deadline - time.monotonic()
        try:
            await asyncio.wait(waiting, timeout=max(left, 0), return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                raise ClientGone
            if not arriving.done():
                raise BadRequest("the answer took too long", status=504, code="timeout")
            return arriving.result()
        finally:
            arriving.cancel()

    def give_up(self) -> None:
        """Tell the engine that nobody waits for what is left."""
        for index in self._open:
            self._service.cancel(self._submission, index)
        self._open.clear()


def _shown(problem: BadRequest | ServiceError) -> BadRequest:
    if isinstance(problem, BadRequest):
        return problem
    return BadRequest(problem.found, status=503, code="unavailable")
