"""Every error that TPLA raises on purpose.

::

    TplaError
    ├── ConfigError            a flag, variable or file holds a bad value        (also a ValueError)
    ├── CheckpointError        a checkpoint cannot be read, converted or served  (also a ValueError)
    ├── HookError              SGLang is not the pinned release, or a hook did not take
    ├── TransferError          KV pages did not arrive
    │   ├── LayoutMismatch     the two sides describe different caches
    │   ├── ChecksumMismatch   bytes changed between the two pools
    │   ├── TransferTimeout    a wait ran out
    │   └── TransferAborted    one side gave the request up
    └── RoutingError           a request could not be served
        ├── BadRequest         the client's fault (HTTP 400)
        ├── NotFound           no such model or route (404)
        ├── TooLarge           the body exceeds the limit (413)
        ├── Unauthorized       missing or wrong API key (401)
        ├── QueueFull          the router's queue is full (429)
        ├── NoWorker           no healthy worker of a role (503)
        ├── UpstreamError      a worker failed (502)
        └── UpstreamTimeout    a worker did not answer in time (504)

A message names the value, the limit and the remedy.
"""

from __future__ import annotations

__all__ = [
    "BadRequest",
    "CheckpointError",
    "ChecksumMismatch",
    "ConfigError",
    "HookError",
    "LayoutMismatch",
    "NoWorker",
    "NotFound",
    "QueueFull",
    "RoutingError",
    "TooLarge",
    "TplaError",
    "TransferAborted",
    "TransferError",
    "TransferTimeout",
    "Unauthorized",
    "UpstreamError",
    "UpstreamTimeout",
]


class TplaError(Exception):
    """Base of every error raised on purpose by this project."""


class ConfigError(TplaError, ValueError):
    """A flag, environment variable or file holds a value that cannot be used."""


class CheckpointError(TplaError, ValueError):
    """A checkpoint cannot be read, converted or served as asked."""


class HookError(TplaError):
    """A hook into SGLang is missing, or SGLang is not the release it was written for."""


class TransferError(TplaError):
    """KV pages of a request did not arrive whole on the decode side."""


class LayoutMismatch(TransferError):
    """Prefill and decode disagree on model, rotation, protocol version or row layout."""


class ChecksumMismatch(TransferError):
    """The bytes in the decode pool are not those that prefill sent."""


class TransferTimeout(TransferError):
    """A peer did not answer within the configured time."""


class TransferAborted(TransferError):
    """One side gave the request up."""


MAX_MESSAGE_CHARS = 2000
"""Of a message or field name in an error object. What is at fault may be a name or number of
megabytes, or a worker may quote the prompt; both would go to the client and into the log."""


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE_CHARS else text[: MAX_MESSAGE_CHARS - 3] + "..."


class RoutingError(TplaError):
    """A request could not be served; the fields follow OpenAI's error object.

    ``status`` is the HTTP status, ``kind`` OpenAI's ``type``, ``param`` the offending request
    field and ``code`` a machine-readable reason.
    """

    status = 500
    kind = "internal_error"
    default_code: str | None = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.message = _shortened(message)
        super().__init__(self.message)
        self.param = None if param is None else _shortened(param)
        self.code = code if code is not None else self.default_code


class BadRequest(RoutingError):
    """The request is malformed or asks for something that cannot be done."""

    status = 400
    kind = "invalid_request_error"


class NotFound(RoutingError):
    """The model or the route does not exist."""

    status = 404
    kind = "invalid_request_error"


class TooLarge(RoutingError):
    """The request body is larger than the configured limit."""

    status = 413
    kind = "invalid_request_error"
    default_code = "request_too_large"


class Unauthorized(RoutingError):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    default_code = "invalid_api_key"


class QueueFull(RoutingError):
    """More requests are waiting than the queue may hold."""

    status = 429
    kind = "rate_limit_error"
    default_code = "queue_full"


class NoWorker(RoutingError):
    """No healthy worker of a needed role is known."""

    status = 503
    kind = "service_unavailable_error"
    default_code = "no_worker"


class UpstreamError(RoutingError):
    """A worker failed while serving the request."""

    status = 502
    kind = "upstream_error"
    default_code = "worker_failed"


class UpstreamTimeout(UpstreamError):
    """A worker did not answer in time."""

    status = 504
    default_code = "worker_timeout"
