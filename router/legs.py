"""One leg: one POST to one worker, read to its end, every wait bounded."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp

from tpla.core.config.router import LegTimeouts
from tpla.core.errors import BadRequest
from tpla.router import failures, sse
from tpla.router.failures import LegFailure, Reason
from tpla.router.registry import Worker

T = TypeVar("T")

MAX_ERROR_BYTES = 1024 * 1024
END_OF_BODY_SECONDS = 1.0
MAX_ANSWER_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Call:
    """One sample to generate: what both workers are sent, but for room and request id."""

    path: str
    body: Sequence[bytes]
    """JSON objects without their braces (:func:`members`), together the object that is sent."""
    stream: bool
    prompt: str
    """The prompt as text, for policies that look at prefixes."""
    deadline: float
    """Monotonic time at which the request as a whole must be over."""
    time_limit: float
    """The seconds that ``deadline`` stands for, for messages."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """One piece of an answer: an event of a stream, or a whole JSON answer."""

    raw: bytes
    body: Mapping[str, Any]


def members(values: Mapping[str, Any]) -> bytes:
    """``values`` as a JSON object without its braces.

    A prompt may take a tenth of a second to write, and its samples may be 128: what they share is
    written once.

    Raises:
        BadRequest: a string holds a lone surrogate, which UTF-8 cannot carry.
    """
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False)[1:-1].encode()
    except UnicodeEncodeError as error:
        raise BadRequest("The request holds a lone surrogate; send valid Unicode.") from error


def joined(parts: Iterable[bytes]) -> bytes:
    """The JSON object that has all members in ``parts`` (:func:`members`)."""
    return b"{" + b", ".join(part for part in parts if part) + b"}"


class Leg:
    """The POST of a call to one worker."""

    def __init__(self, worker: Worker, call: Call, content: bytes, limits: LegTimeouts) -> None:
        self.worker = worker
        self.role = worker.role.value
        self.delivered = False
        """Whether the worker may have received the request."""
        self.complete = False
        """Whether the worker has answered to the end, so that nothing is left to abort."""
        self._call = call
        self._content = content
        self._limits = limits
        self._begin = asyncio.get_running_loop().time()
        self._heard = False
        """Whether a chunk of the answer has arrived."""

    async def events(self) -> AsyncGenerator[Event, None]:
        """The answer. Ends normally only when the worker has said all that it owed.

        Raises:
            LegFailure: it did not.
        """
        response = await self._post()
        try:
            if response.status != 200:
                content = await self._read(response, MAX_ERROR_BYTES)
                self.complete = True
                raise failures.from_answer(self.role, response.status, content)
            if self._call.stream:
                async with aclosing(self._read_stream(response)) as events:
                    async for event in events:
                        yield event
            else:
                yield await self._read_json(response)
        except aiohttp.ClientError as error:
            raise self._disconnected(error) from error
        finally:
            response.close()  # unless the answer was read to its end, this ends the connection
        self.complete = True

    async def _post(self) -> aiohttp.ClientResponse:
        """The worker's answer, once its head is here."""
        post = self.worker.session.post(
            self._call.path,
            data=self._content,
            headers=dict(self._call.headers),
            allow_redirects=False,
        )
        self.delivered = True
        try:
            return await self._bounded(post)
        except aiohttp.ClientConnectorError as error:
            self.delivered = False
            if not failures.refused_by_host(error):
                detail = f"could not be asked: {error.strerror or error}"
                raise failures.lost(Reason.LOCAL, self.role, detail) from error
            raise failures.lost(Reason.CONNECT, self.role, "cannot be reached") from error
        except aiohttp.ServerTimeoutError as error:
            # Not decisive as a refusal is: it may be this process that is overloaded.
            self.delivered = False
            raise failures.timed_out(
                self.role, "answer to connect", self._limits.connect
            ) from error
        except aiohttp.ClientError as error:
            raise self._disconnected(error) from error

    async def _read_stream(self, response: aiohttp.ClientResponse) -> AsyncGenerator[Event, None]:
        parser = sse.EventParser()
        finished = False
        while chunk := await self._next(response):
            try:
                found = list(parser.feed(chunk))
            except sse.EventTooLong as error:
                raise failures.lost(Reason.MALFORMED, self.role, f"sent {error}") from error
            for data in found:
                if data == sse.DONE:
                    if not finished:
                        raise self._truncated()
                    await _read_to_end(response)
                    return
                body = self._parse(data)
                finished = self._inspect(body) or finished
                yield Event(sse.encode(data), body)
        raise self._truncated()

    async def _read_json(self, response: aiohttp.ClientResponse) -> Event:
        content = await self._read(response, MAX_ANSWER_BYTES)
        body = self._parse(content)
        if not self._inspect(body):
            raise self._truncated()
        return Event(content, body)

    async def _read(self, response: aiohttp.ClientResponse, limit: int) -> bytes:
        content = bytearray()
        while chunk := await self._next(response):
            content += chunk
            if len(content) > limit:
                raise failures.lost(Reason.MALFORMED, self.role, f"answered over {limit} bytes")
        return bytes(content)

    async def _next(self, response: aiohttp.ClientResponse) -> bytes:
        """What has arrived since the last call, at least one byte; nothing at the end."""
        chunk = await self._bounded(response.content.readany())
        self.worker.last_contact = time.monotonic()
        self._heard = True
        return chunk

    def _parse(self, data: bytes) -> Mapping[str, Any]:
        try:
            body = json.loads(data)
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise failures.lost(Reason.MALFORMED, self.role, "answered something that is not JSON")
        return body

    def _inspect(self, body: Mapping[str, Any]) -> bool:
        """Whether a choice ends here.

        Raises:
            LegFailure: the worker reports an error or an abort inside an answer of status 200.
        """
        if body.get("error") or body.get("object") == "error":
            raise failures.from_event(self.role, body.get("error") or body)
        reasons = [choice.get("finish_reason") for choice in body.get("choices") or ()]
        if "abort" in reasons:
            raise failures.aborted(self.role, None)
        return any(reasons)

    def _truncated(self) -> LegFailure:
        return failures.lost(Reason.TRUNCATED, self.role, "ended its answer early")

    def _disconnected(self, error: aiohttp.ClientError) -> LegFailure:
        name = type(error).__name__
        return failures.lost(Reason.DISCONNECTED, self.role, f"closed the connection ({name})")

    async def _bounded(self, wait: Awaitable[T]) -> T:
        """``wait``, for as long as the worker may be silent.

        The head alone breaks no silence: until the first chunk, all waits share ``first_byte``. An
        unstreamed decode leg answers when all is generated: only the deadline bounds it.
        """
        deadline = self._call.deadline
        if self._heard:
            until, limit = asyncio.get_running_loop().time() + self._limits.idle, self._limits.idle
        elif self.role == "decode" and not self._call.stream:
            until, limit = deadline, self._call.time_limit
        else:
            until, limit = self._begin + self._limits.first_byte, self._limits.first_byte
        try:
            async with asyncio.timeout_at(min(until, deadline)):
                return await wait
        except aiohttp.ServerTimeoutError:
            raise  # aiohttp's own: no connection in time
        except TimeoutError:
            if deadline <= until:
                raise failures.deadline_passed(self._call.time_limit) from None
            if not self._heard and self.worker.well_since(self._begin):
                raise failures.overdue(self.role, limit) from None
            what = "further data" if self._heard else "answer"
            raise failures.timed_out(self.role, what, limit) from None


async def _read_to_end(response: aiohttp.ClientResponse) -> None:
    """After ``[DONE]``: take the end of the body too, so that the connection can be used again."""
    try:
        async with asyncio.timeout(END_OF_BODY_SECONDS):
            await response.content.read()
    except (TimeoutError, aiohttp.ClientError):
        pass  # The answer is whole without it.
