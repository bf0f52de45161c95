"""Sending a stream while listening for the client to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tpla.core.errors import RoutingError
from tpla.server.errors import ClientGone, error_event
from tpla.server.generation import Generation
from tpla.server.record import RequestRecord

T = TypeVar("T")

log = structlog.get_logger("tpla.server")


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Result of ``work``; it is cancelled, and has ended, if the client leaves first.

    The request's body must have been read: what the client sends from now on is ignored.

    Raises:
        ClientGone: the client left.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class EventStream(Response):
    """The response that relays an opened generation; its head is sent with the first event."""

    media_type = "text/event-stream"

    def __init__(
        self, generation: Generation, record: RequestRecord, *, write_timeout: float
    ) -> None:
        super().__init__()
        self._generation = generation
        self._record = record
        self._write_timeout = write_timeout
        self._stream_headers: Mapping[str, str] = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay until the end, a failure, or the client's departure; then leave nothing behind."""
        try:
            await unless_client_leaves(receive, self._relay(send))
        except ClientGone:
            self._record.client_gone()
        except BaseException as error:
            self._record.crashed(error)
            raise
        finally:
            await self._generation.close()
            self._record.release()

    async def _relay(self, send: Send) -> None:
        headers = [(name.encode(), value.encode()) for name, value in self._stream_headers.items()]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        await self._bounded(send, start)
        self._record.first_token()
        try:
            async with aclosing(self._generation.events()) as events:
                async for event in events:
                    await self._bounded(send, _body(event, more=True))
        except RoutingError as error:
            self._record.failed(error)
            await self._bounded(send, _body(error_event(error), more=True))
        else:
            self._record.finished()
        await self._bounded(send, _body(b"", more=False))

    async def _bounded(self, send: Send, message: dict[str, Any]) -> None:
        """Send, unless the client takes nothing for too long: then it counts as gone."""
        try:
            async with asyncio.timeout(self._write_timeout):
                await send(message)
        except TimeoutError:
            log.warning("client_takes_nothing", seconds=self._write_timeout)
            raise ClientGone from None


def _body(content: bytes, *, more: bool) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": more}


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
