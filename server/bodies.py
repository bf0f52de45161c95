"""Reading a request body: bounded in size, in time and in what counts as JSON."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from tpla.core.errors import BadRequest, TooLarge
from tpla.server.errors import BodyTimeout, ClientGone

DRAINED_FACTOR = 8
"""How many times the limit is read and dropped, so that a client still sending sees its 413.

An answer given before the body has been read ends in a connection reset for most clients.
"""


async def read_object(request: Request, *, max_bytes: int, timeout: float) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        TooLarge: the body exceeds ``max_bytes``.
        BodyTimeout: the body did not arrive within ``timeout`` seconds.
        BadRequest: it is not a JSON object.
        ClientGone: the client left while sending it.
    """
    try:
        async with asyncio.timeout(timeout):
            content = await _read(request, max_bytes)
    except TimeoutError:
        raise BodyTimeout(f"The request body did not arrive within {timeout:g} s.") from None
    except ClientDisconnect:
        raise ClientGone from None
    return _decode(content)


async def _read(request: Request, max_bytes: int) -> bytes:
    error = TooLarge(f"The request body exceeds {max_bytes} bytes; send a shorter prompt.")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes and "expect" in request.headers:
        raise error  # It waits for permission to send: it has not begun.
    content = bytearray()
    total = 0
    async for chunk in request.stream():
        total += len(chunk)
        if total <= max_bytes:
            content += chunk
        elif total > max_bytes * DRAINED_FACTOR:
            break
    if total > max_bytes:
        raise error
    return bytes(content)


def _decode(content: bytes) -> dict[str, Any]:
    try:
        body = json.loads(content, parse_constant=_not_json, parse_float=_finite)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None
    except ValueError as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise BadRequest(f"The request body must be a JSON object, not {_name(body)}.")
    return body


def _not_json(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} exceeds the range of a number")
    return value


def _name(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
