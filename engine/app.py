"""The endpoints: from an HTTP request to sequences, and from their tokens to an answer."""

from __future__ import annotations

import asyncio
import hmac
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine import openapi
from engine.answers import Answer
from engine.calls import Call, Limits, read_chat, read_completion
from engine.chat import ChatFormat
from engine.engine_loop import ChoiceSink, End, EngineLoop, Outbox, Piece
from engine.errors import RequestError
from engine.metrics import CONTENT_TYPE, Metrics
from engine.openai_api import DETOKENIZE, TOKENIZE, ApiError, checked, parse_json
from engine.sampler import Sampling
from engine.sequence import Request as SequenceRequest
from engine.sse import ClientGone, EventStream, Json, read_body, unless_gone
from engine.text import Text

Handler = Callable[[Request], Awaitable[Response]]
_GONE = 499
"""Status for a client that left; nobody receives it."""


class App:
    """Handlers over one engine loop; `clock` gives seconds since the epoch for `created`."""

    def __init__(
        self,
        loop: EngineLoop,
        metrics: Metrics,
        text: Text,
        form: ChatFormat,
        limits: Limits,
        options,
        clock: Callable[[], float] = time.time,
    ):
        self._loop, self._metrics, self._text, self._form = loop, metrics, text, form
        self._limits, self._options, self._clock = limits, options, clock
        seed = options.seed
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        self._created_s = int(clock())
        self._draining = False
        self._probe: asyncio.Future | None = None

    def routes(self) -> Starlette:
        """The ASGI application."""
        open_to_all = [("/health", "GET", self.health), ("/metrics", "GET", self.show_metrics)]
        guarded = [
            ("/v1/models", "GET", self.models),
            ("/v1/completions", "POST", self.completions),
            ("/v1/chat/completions", "POST", self.chat),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
            ("/openapi.json", "GET", self.describe),
        ]
        routes = [Route(p, self._answering(h), methods=[m]) for p, m, h in open_to_all]
        routes += [Route(p, self._answering(h, True), methods=[m]) for p, m, h in guarded]
        handlers = {HTTPException: self._http_error, Exception: self._our_fault}
        return Starlette(routes=routes, exception_handlers=handlers)

    def drain(self) -> None:
        """Take no more requests; those on their way go on."""
        self._draining = True

    def _answering(self, handler: Handler, guarded: bool = False) -> Handler:
        """The handler with errors turned into answers, behind the API key if `guarded`."""

        async def endpoint(request: Request) -> Response:
            try:
                if guarded:
                    self._check_key(request)
                return await handler(request)
            except ApiError as error:
                return self._refusal(error)
            except RequestError as error:
                return self._refusal(ApiError(str(error), param="prompt"))
            except ClientGone:
                return Response(status_code=_GONE)

        return endpoint

    def _refusal(self, error: ApiError) -> Response:
        self._metrics.count_refusal(error.status)
        headers = {"retry-after": "1"} if error.status in (429, 503) else None
        return Json(error.document, status_code=error.status, headers=headers)

    async def _http_error(self, request: Request, error: HTTPException) -> Response:
        path = ascii(request.url.path)[:100]
        sentences = {
            404: f"there is nothing at {path}",
            405: f"{path} does not accept {ascii(request.method)}",
        }
        message = sentences.get(error.status_code, error.detail)
        response = self._refusal(ApiError(message, status=error.status_code))
        response.headers.update(error.headers or {})
        return response

    async def _our_fault(self, request: Request, error: Exception) -> Response:
        """Starlette logs the traceback after this answer."""
        return self._refusal(ApiError("the server has failed at this request", status=500))

    def _check_key(self, request: Request) -> None:
        key = self._options.api_key
        given = request.headers.get("authorization", "")
        if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(
                "the API key is missing or wrong; accepted: Authorization: Bearer KEY",
                status=401,
                code="invalid_api_key",
            )

    async def _body(self, request: Request) -> object:
        options = self._options
        body = await read_body(request, options.body_bytes_max, options.body_seconds_max)
        return parse_json(body)

    # Generation

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        document = await self._body(request)
        call = read_completion(document, self._text, self._limits, self._seed())
        return await self._generate(request, call)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        document = await self._body(request)
        call = read_chat(document, self._text, self._limits, self._seed(), self._form)
        return await self._generate(request, call)

    def _seed(self) -> int:
        return self._seeds.getrandbits(62)

    async def _generate(self, request: Request, call: Call) -> Response:
        if self._draining:
            raise ApiError("the server is shutting down", status=503)
        kind = "chatcmpl" if call.chat else "cmpl"
        name = f"{kind}-{uuid.UUID(int=self._seeds.getrandbits(128)).hex}"
        answer = Answer(call, self._text, self._limits.model_name, name, int(self._clock()))
        items = self._items(call)
        if call.stream:
            # The first result comes before the headers, so that early trouble has its own status.
            try:
                first = await unless_gone(request, anext(items))
            except BaseException:
                await items.aclose()
                raise
            return EventStream(self._events(answer, first, items), request, items.aclose)
        async with aclosing(items):
            await unless_gone(request, _take_all(items, answer))
        return Json(answer.whole())

    async def _items(self, call: Call) -> AsyncIterator[list]:
        """What arrives for the call, as lists of what came at once.

        Raises ApiError if a sequence cannot be finished. However this ends, nothing stays behind
        in the engine.
        """
        outbox = self._loop.outbox()
        began_s, waiting = time.monotonic(), True
        sequences = self._loop.submit(self._requests(call, outbox))
        try:
            open_choices = call.choices
            while open_choices:
                items = await self._arrivals(outbox)
                if waiting and any(isinstance(item, Piece) for item in items):
                    waiting = False
                    self._metrics.observe_first_token(time.monotonic() - began_s)
                for item in items:
                    if isinstance(item, End):
                        open_choices -= 1
                        _raise_unless_finished(item)
                yield items
        finally:
            self._loop.cancel(sequences)

    def _requests(self, call: Call, outbox: Outbox) -> list[SequenceRequest]:
        requests = []
        for index in range(call.choices):
            prompt = call.prompts[index // call.n]
            sink = ChoiceSink(
                outbox, index, self._text, call.stops, call.stop_ids, call.think_close
            )
            requests.append(
                SequenceRequest(
                    ids=prompt.ids,
                    max_tokens=call.max_tokens,
                    sink=sink,
                    sampling=call.sampling.for_choice(index % call.n),
                    stop_ids=call.stop_ids,
                    logprobs=call.logprobs,
                    prompt_logprobs=call.logprobs if call.echo else None,
                )
            )
        return requests

    async def _arrivals(self, outbox: Outbox) -> list:
        """All that waits in the queue, at least one item; ApiError if none can be expected."""
        while True:
            try:
                async with asyncio.timeout(self._options.stall_seconds_max):
                    items = [await outbox.queue.get()]
                break
            except TimeoutError:
                if (trouble := self._loop.trouble()) is not None:
                    raise ApiError(trouble, status=503) from None
        while not outbox.queue.empty():
            items.append(outbox.queue.get_nowait())
        return items

    async def _events(self, answer: Answer, first: list, items) -> AsyncIterator[list]:
        yield answer.opening() + _chunks(answer, first)
        try:
            async for arrived in items:
                if documents := _chunks(answer, arrived):
                    yield documents
        except ApiError as error:
            yield [error.document]
            return
        yield answer.closing()

    # The rest

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        model = {
            "id": self._limits.model_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "sparkproof",
            "max_model_len": self._limits.tokens_max,
        }
        return Json({"object": "list", "data": [model]})

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize: ids and their texts."""
        body = checked(await self._body(request), TOKENIZE)
        ids = self._text.encode(body["prompt"], body.get("add_special_tokens", True))
        pieces = [self._text.piece(i) for i in ids]
        limit = self._limits.tokens_max
        return Json(
            {"count": len(ids), "max_model_len": limit, "tokens": ids, "token_strs": pieces}
        )

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of ids."""
        body = checked(await self._body(request), DETOKENIZE)
        for token_id in body["tokens"]:
            if token_id >= self._limits.vocab_size:
                raise ApiError(
                    f"token id {token_id} is out of range; accepted: 0 to "
                    f"{self._limits.vocab_size - 1}",
                    param="tokens",
                )
        return Json({"prompt": self._text.decode(body["tokens"])})

    async def describe(self, request: Request) -> Response:
        """GET /openapi.json."""
        return Json(openapi.document(self._limits.model_name))

    async def show_metrics(self, request: Request) -> Response:
        """GET /metrics."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def health(self, request: Request) -> Response:
        """GET /health: 200 only if steps end; an idle engine runs a token to prove it."""
        trouble = "the server is shutting down" if self._draining else self._loop.trouble()
        if trouble is None and self._loop.idle_for(self._options.probe_seconds):
            trouble = await self._run_probe()
        if trouble is not None:
            return Json({"status": "unhealthy", "reason": trouble}, status_code=503)
        return Json({"status": "ok"})

    async def _run_probe(self) -> str | None:
        """One token through the engine, once for all who ask meanwhile; what is wrong, if it is."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._probe_engine())
        return await asyncio.shield(self._probe)

    async def _probe_engine(self) -> str | None:
        outbox = self._loop.outbox()
        sink = ChoiceSink(outbox, 0, self._text)
        request = SequenceRequest((0,), 1, sink, Sampling(temperature=0), counted=False)
        try:
            sequences = self._loop.submit([request])
            async with asyncio.timeout(self._options.stall_seconds_max):
                while not isinstance(item := await outbox.queue.get(), End):
                    pass
        except ApiError as error:
            return str(error)
        except TimeoutError:
            self._loop.cancel(sequences)
            return f"no step has ended within {self._options.stall_seconds_max:g} s"
        return item.reason if item.reason.startswith("error") else None


async def _take_all(items: AsyncIterator, answer: Answer) -> None:
    async for arrived in items:
        for item in arrived:
            answer.add(item)


def _chunks(answer: Answer, items: list) -> list[dict]:
    return [document for item in items for document in answer.chunk(item)]


def _raise_unless_finished(end: End) -> None:
    if end.reason.startswith("error"):
        raise ApiError(end.reason.removeprefix("error: "), status=503)
    if end.reason == "cancelled":
        raise ApiError("the server is shutting down", status=503)
