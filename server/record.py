"""What is noted of each request: its phases, its end, its line in the log."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping

import structlog

from tpla.core.errors import RoutingError
from tpla.core.phases import Phase, Timeline
from tpla.router.metrics import RouterMetrics

log = structlog.get_logger("tpla.server")

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

CLIENT_GONE_STATUS = 499


class InFlight:
    """Counts requests that are being served, so that a drain can wait for the last."""

    def __init__(self) -> None:
        self.count = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self) -> None:
        """A request begins."""
        self.count += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request has ended."""
        self.count -= 1
        if self.count == 0:
            self._idle.set()

    async def idle(self, timeout: float) -> bool:
        """Wait until none is left; False when ``timeout`` seconds were not enough."""
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class RequestRecord:
    """One request, from its first byte to its end."""

    def __init__(
        self, route: str, request_id: str, metrics: RouterMetrics, in_flight: InFlight
    ) -> None:
        self.route = route
        self.request_id = request_id
        self.timeline = Timeline()
        self.samples = 1
        self.stream = False
        self._metrics = metrics
        self._in_flight = in_flight
        self._open = True
        self._held = True
        in_flight.enter()

    def first_token(self) -> None:
        """The first token is on its way to the client."""
        self.timeline.mark_once(Phase.FIRST_TOKEN)

    def finished(self) -> None:
        """The client has its whole answer."""
        self._end(Phase.FINISHED, 200)

    def failed(self, error: RoutingError) -> None:
        """The client was told of ``error``."""
        self._end(Phase.FAILED, error.status, error=error.code, message=error.message)

    def crashed(self, error: BaseException) -> None:
        """A bug of ours."""
        self._end(Phase.FAILED, 500, error="internal_error", message=repr(error))

    def client_gone(self) -> None:
        """The client left before the end."""
        when = "before_first_token" if self._seconds(Phase.FIRST_TOKEN) is None else "mid_stream"
        if self._open:
            self._metrics.client_disconnects.labels(when).inc()
        self._end(Phase.ABORTED, CLIENT_GONE_STATUS)

    def release(self) -> None:
        """Nothing of the request is left: a drain need not wait for it."""
        if self._held:
            self._held = False
            self._in_flight.leave()

    def _end(self, phase: Phase, status: int, **details: object) -> None:
        if not self._open:
            return
        self._open = False
        self.timeline.mark(phase)
        self._metrics.requests.labels(self.route, str(status)).inc()
        self._metrics.duration.labels(self.route).observe(self._seconds(phase) or 0.0)
        ttft = self._seconds(Phase.FIRST_TOKEN)
        if ttft is not None:
            self._metrics.ttft.labels(self.route).observe(ttft)
        log.info("request", request_id=self.request_id, route=self.route, status=status,
                 stream=self.stream, samples=self.samples,
                 phases_ms=self.timeline.since_received(), **details)  # fmt: skip

    def _seconds(self, phase: Phase) -> float | None:
        return self.timeline.seconds(Phase.RECEIVED, phase)


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's ``x-request-id`` where it is fit to be logged and passed on, else a new one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def forwarded_headers(headers: Mapping[str, str], request_id: str) -> dict[str, str]:
    """What workers are told about the request beside its body."""
    forwarded = {"x-request-id": request_id, "content-type": "application/json"}
    traceparent = headers.get("traceparent", "")
    if _TRACEPARENT.fullmatch(traceparent):
        forwarded["traceparent"] = traceparent
        if (state := headers.get("tracestate", "")) and state.isascii():
            forwarded["tracestate"] = state
    return forwarded
