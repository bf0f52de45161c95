"""What went wrong in a leg, whose fault it is, and what the client is told.

SGLang reports errors in four shapes: an HTTP status with a flat ``{"object": "error", ...}`` or a
nested ``{"error": {...}}`` body, an ``{"error": ...}`` event inside a stream that began with 200,
and a 200 whose ``finish_reason`` is ``abort``. All become one :class:`LegFailure`.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from enum import Enum
from http import HTTPStatus
from typing import Any

import aiohttp

from tpla.core.errors import (
    BadRequest,
    NoWorker,
    RoutingError,
    TooLarge,
    UpstreamError,
    UpstreamTimeout,
)
from tpla.router.breaker import Verdict


class Reason(str, Enum):
    """Why a leg failed; the label of the metric ``leg_failures``."""

    CONNECT = "connect"
    """The host refuses connections."""
    LOCAL = "local"
    """No host was asked: its name was not found, or this process is out of something."""
    DISCONNECTED = "disconnected"
    TIMEOUT = "timeout"
    OVERDUE = "overdue"
    """No answer in time from a worker whose scheduler answers its checks: it has a long queue."""
    DEADLINE = "deadline"
    STATUS = "status"
    BUSY = "busy"
    REFUSED = "refused"
    """The request itself was refused (4xx)."""
    KV_TRANSFER = "kv_transfer"
    ABORTED = "aborted"
    TRUNCATED = "truncated"
    MALFORMED = "malformed"
    STOPPED = "stopped"
    """The router gave the request up."""


LOST = frozenset(
    {Reason.CONNECT, Reason.DISCONNECTED, Reason.TIMEOUT, Reason.OVERDUE, Reason.TRUNCATED}
)
"""The worker itself is gone or silent, as opposed to one that answers with an error."""

WENT_AWAY = frozenset({Reason.DISCONNECTED, Reason.TIMEOUT, Reason.TRUNCATED})
"""It was given the request, and its connection ended or it fell silent."""

ANSWERED_WITH_ERROR = frozenset({Reason.ABORTED, Reason.STATUS})
"""A living worker says that the request failed. Until the KV has landed, the request itself may be
why, and would fail on every worker: none is charged before another pair has served it."""

_NEUTRAL = frozenset({Reason.LOCAL, Reason.BUSY, Reason.OVERDUE, Reason.DEADLINE, Reason.STOPPED})
_REFUSED_BY_HOST = frozenset(
    {errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH}
)
_TOO_LONG = ("context length", "maximum allowed length", "maximum number of tokens")
# Overdue is final: the queues of other workers are as long, and a retry would only lengthen them.
_FINAL = frozenset({Reason.REFUSED, Reason.OVERDUE, Reason.DEADLINE, Reason.STOPPED})


class LegFailure(Exception):
    """One leg ended without the answer it owed.

    ``error`` is what the client is told when no further attempt is made.
    """

    def __init__(
        self,
        reason: Reason,
        error: RoutingError,
        *,
        neutral: bool = False,
        peer_gone: bool = False,
    ) -> None:
        super().__init__(error.message)
        self.reason = reason
        self.error = error
        self.charged: str | None = None
        """Id of the worker that is charged, once that is settled."""
        self.in_doubt = False
        """Whether the charge waits until another pair has served the request."""
        self.peer_gone = peer_gone
        """Whether the leg saw the other leg's worker go away, which is the one at fault."""
        self._neutral = neutral

    def doubt(self) -> None:
        """The KV has not landed: charge no worker yet for what may be the request's own fault."""
        self.in_doubt = self.reason in ANSWERED_WITH_ERROR and self.verdict is Verdict.FAILURE

    @property
    def verdict(self) -> Verdict:
        """What the failure says about the worker."""
        if self.reason is Reason.REFUSED:
            return Verdict.SUCCESS
        if self.reason in _NEUTRAL or self._neutral or self.in_doubt:
            return Verdict.NEUTRAL
        return Verdict.FAILURE

    @property
    def costs_a_worker(self) -> bool:
        """Whether a worker went away, fell silent or failed, maybe because of the request."""
        return self.reason in WENT_AWAY or self.peer_gone or self.in_doubt

    @property
    def retryable(self) -> bool:
        """Whether another pair of workers might do better."""
        return self.reason not in _FINAL


def refused_by_host(error: aiohttp.ClientConnectorError) -> bool:
    """Whether a failed connection says that nothing listens there.

    A name server that is away for a moment, or a router that is out of descriptors, says nothing
    about the worker: it may be serving streams meanwhile.
    """
    return (
        not isinstance(error, aiohttp.ClientConnectorDNSError) and error.errno in _REFUSED_BY_HOST
    )


def lost(reason: Reason, where: str, detail: str) -> LegFailure:
    """The worker could not be reached, went away, or answered nonsense."""
    return LegFailure(reason, UpstreamError(f"The {where} worker {detail}."))


def timed_out(where: str, what: str, seconds: float) -> LegFailure:
    """A wait on the worker ran out."""
    message = f"The {where} worker sent no {what} within {seconds:g} s."
    return LegFailure(Reason.TIMEOUT, UpstreamTimeout(message))


def overdue(where: str, seconds: float) -> LegFailure:
    """A worker that is well has not come to the request in time, which is no worker's fault."""
    message = (
        f"The {where} worker sent no answer within {seconds:g} s, though its health checks answer: "
        "too many requests wait for it. Send fewer at once, add workers or raise "
        "--leg-first-byte-timeout-secs."
    )
    return LegFailure(Reason.OVERDUE, UpstreamTimeout(message))


def deadline_passed(seconds: float) -> LegFailure:
    """The request as a whole took too long, which is no worker's fault."""
    error = UpstreamTimeout(
        f"The request did not finish within {seconds:g} s.", code="request_timeout"
    )
    return LegFailure(Reason.DEADLINE, error)


def stopped(message: str) -> LegFailure:
    """The router gives the request up."""
    return LegFailure(Reason.STOPPED, NoWorker(message, code="shutting_down"))


def from_answer(where: str, status: int, content: bytes) -> LegFailure:
    """A worker answered with an HTTP status other than 200."""
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    return from_error(where, status, _error_object(body))


def from_event(where: str, error: object) -> LegFailure:
    """A worker sent an ``error`` event inside a stream that began with status 200."""
    fields = _error_object({"error": error})
    code = fields.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    return from_error(where, status, fields)


def aborted(where: str, message: str | None) -> LegFailure:
    """A worker ended a choice with ``finish_reason: abort``; SGLang may add no reason."""
    text = message or "gave the request up"
    if _about_transfer(text):
        return _transfer_failed(where, text)
    error = UpstreamError(f"The {where} worker {text}.", code="request_aborted")
    return LegFailure(Reason.ABORTED, error)


def from_error(where: str, status: int, fields: Mapping[str, Any]) -> LegFailure:
    """Judge a worker's error by its HTTP status and its (normalised) error object."""
    message = str(fields.get("message") or HTTPStatus(status).phrase)
    if status in {429, 503}:
        busy = NoWorker(f"The {where} worker is full: {message}", code="engine_full")
        return LegFailure(Reason.BUSY, busy)
    if status in {401, 403, 404, 405}:
        # The router's own request was wrong (key, path): not the client's fault, nor a sick worker.
        error = UpstreamError(f"The {where} worker refused the router ({status}): {message}")
        return LegFailure(Reason.STATUS, error, neutral=True)
    if 400 <= status < 500:
        return LegFailure(Reason.REFUSED, _client_error(status, message, fields))
    if _about_transfer(message):
        return _transfer_failed(where, message)
    return LegFailure(Reason.STATUS, UpstreamError(f"The {where} worker failed: {message}"))


def _transfer_failed(where: str, message: str) -> LegFailure:
    error = UpstreamError(
        f"The KV transfer failed, says the {where} worker: {message}", code="kv_transfer_failed"
    )
    return LegFailure(Reason.KV_TRANSFER, error, peer_gone=_about_a_lost_peer(where, message))


def _client_error(status: int, message: str, fields: Mapping[str, Any]) -> RoutingError:
    if status == 413:
        return TooLarge(message)
    param = fields.get("param")
    code = fields.get("code")
    if any(mark in message for mark in _TOO_LONG):
        code = "context_length_exceeded"
    return BadRequest(
        message,
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )


def _about_a_lost_peer(where: str, message: str) -> bool:
    """Whether a rank of the other leg's worker is gone, as the KV transfer puts it."""
    peer = "prefill" if where == "decode" else "decode"
    return f"{peer} rank" in message and " is gone" in message


def _about_transfer(message: str) -> bool:
    text = message.lower()
    return any(
        mark in text
        for mark in (
            "kvtransfer",
            "kv transfer",
            "transfer failed",
            "handshake failed",
            "bootstrap",
        )
    )


def _error_object(body: object) -> Mapping[str, Any]:
    """The error of a nested, flat or FastAPI-made body; of anything else, nothing."""
    if not isinstance(body, dict):
        return {}
    error = body.get("error", body)
    if isinstance(error, str):
        return {"message": error}
    if not isinstance(error, dict):
        return {}
    if "message" not in error and "detail" in error:
        return {"message": json.dumps(error["detail"])}
    return error
