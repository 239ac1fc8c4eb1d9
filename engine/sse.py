"""The parts of HTTP that frameworks leave open: bounded bodies, event streams, lost clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from engine.openai_api import ApiError


class ClientGone(Exception):
    """The client has closed the connection; nobody is left to answer."""


class Json(Response):
    """ASCII JSON whose floats keep their bits (Python's repr)."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """See starlette.responses.Response."""
        return dump(content).encode()


def dump(content: object) -> str:
    """Compact JSON; NaN and infinities are our bug and raise ValueError."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


async def read_body(request: Request, bytes_max: int, seconds_max: float) -> bytes:
    """The whole body. Raises ApiError 413 or 408 beyond the limits, ClientGone if it ends early."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > bytes_max:
        raise _too_large(f"{announced} bytes", bytes_max)
    try:
        async with asyncio.timeout(seconds_max):
            return await _collect(request, bytes_max)
    except TimeoutError as error:
        raise ApiError(f"the body has not arrived within {seconds_max:g} s", status=408) from error


async def _collect(request: Request, bytes_max: int) -> bytes:
    body = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        body += message.get("body", b"")
        if len(body) > bytes_max:
            raise _too_large(f"over {bytes_max} bytes", bytes_max)
        if not message.get("more_body", False):
            return bytes(body)


def _too_large(size: str, bytes_max: int) -> ApiError:
    return ApiError(f"the body has {size}; the limit is {bytes_max} bytes", status=413)


async def unless_gone(request: Request, work: Awaitable):
    """The result of `work`; ClientGone (and `work` cancelled) as soon as the client leaves."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events from an iterator of lists of documents; each list is one write.

    The iterator is closed and `close` is awaited in every case, also when the client leaves
    before the first event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[list[object]],
        request: Request,
        close: Callable[[], Awaitable[None]],
    ):
        super().__init__(headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._events, self._request, self._close = events, request, close

    async def __call__(self, scope, receive, send) -> None:
        """See the ASGI specification."""
        try:
            await unless_gone(self._request, self._send(send))
        except ClientGone:
            pass  # the iterator is closed below, which gives the pages back
        finally:
            await self._events.aclose()
            await self._close()

    async def _send(self, send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for documents in self._events:
            body = "".join(f"data: {dump(d)}\n\n" for d in documents).encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})
