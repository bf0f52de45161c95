"""Every error leaves as OpenAI's nested object; nothing leaves as a stack trace."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tpla.core.errors import BadRequest, RoutingError

log = structlog.get_logger("tpla.server")

RETRY_AFTER_SECONDS = "1"


class BodyTimeout(BadRequest):
    """The client did not send its request body in time."""

    status = 408
    default_code = "request_timeout"


class ClientGone(Exception):
    """The client closed its connection: there is nobody to answer."""


def error_object(error: RoutingError) -> dict[str, Any]:
    """``{"error": {...}}`` of an error raised on purpose."""
    return _nested(error.message, error.kind, error.param, error.code)


def error_event(error: RoutingError) -> bytes:
    """The event that ends a stream which cannot be finished; no ``[DONE]`` follows it."""
    return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n"


def error_response(error: RoutingError) -> JSONResponse:
    """The response that carries ``error``."""
    headers = {}
    if error.status in {429, 503}:
        headers["retry-after"] = RETRY_AFTER_SECONDS
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_object(error), status_code=error.status, headers=headers)


def install_error_handlers(app: FastAPI) -> None:
    """Have every exception of ``app`` answered with the nested object."""
    app.add_exception_handler(RoutingError, _routing_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _unexpected)


async def _routing_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RoutingError)
    return error_response(error)


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"Unknown route: {request.method} {request.url.path}.",
        405: f"{request.method} is not allowed on {request.url.path}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    kind = "invalid_request_error" if error.status_code < 500 else "internal_error"
    return JSONResponse(
        _nested(message, kind), status_code=error.status_code, headers=error.headers
    )


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"][1:])
    message = f"Invalid value for '{where}': {first['msg']}."
    return JSONResponse(_nested(message, "invalid_request_error", where), status_code=400)


async def _client_gone(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse(_nested("The client left.", "invalid_request_error"), status_code=499)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # Starlette re-raises it once this is sent, and uvicorn logs it with its stack.
    phrase = HTTPStatus.INTERNAL_SERVER_ERROR.phrase
    return JSONResponse(_nested(f"{phrase}.", "internal_error"), status_code=500)


def _nested(
    message: str, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
