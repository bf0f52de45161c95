"""Sending a call to a pair of workers, and to another pair if that fails early enough."""

from __future__ import annotations

import asyncio
import random
import uuid

import aiohttp
import structlog

from tpla.core.config.router import RouterConfig
from tpla.core.errors import NoWorker
from tpla.core.phases import Timeline
from tpla.router import failures
from tpla.router.attempt import Attempt
from tpla.router.background import Background
from tpla.router.breaker import Verdict
from tpla.router.failures import LegFailure, Reason
from tpla.router.legs import Call, Leg, joined, members
from tpla.router.metrics import RouterMetrics
from tpla.router.registry import Lease, Pair, Registry, Worker

log = structlog.get_logger("tpla.router.dispatch")

ABORT_TRIES = 3

_ID_PREFIX = {"/v1/chat/completions": "chatcmpl-", "/v1/completions": "cmpl-"}


class Dispatcher:
    """Runs attempts until one has its first event, and aborts what is left of the others."""

    def __init__(
        self,
        registry: Registry,
        config: RouterConfig,
        metrics: RouterMetrics,
        rng: random.Random | None = None,
    ) -> None:
        self.limits = config.leg
        self.background = Background()
        self._registry = registry
        self._retry = config.retry
        self._metrics = metrics
        self._rng = rng or random.SystemRandom()
        self._attempts: set[Attempt] = set()
        self._stopped: LegFailure | None = None

    async def open(self, call: Call, timeline: Timeline) -> Attempt:
        """An attempt whose KV has landed (for a stream) or whose answer is here.

        The caller closes it. Nothing has been sent to the client yet, so a failure is retried on
        another pair, ``max_retries`` times at most and within the call's deadline, unless
        ``max_lost_workers`` went away, fell silent or failed under it.

        Raises:
            RoutingError: no worker, or the last attempt failed; the error of that attempt.
        """
        excluded: set[str] = set()
        doubted: set[str] = set()
        failure: LegFailure | None = None
        lost_workers = 0
        for number in range(self._retry.max_retries + 1):
            if failure is not None:
                await self._pause(number, call, failure)
            pair = self._lease(call, excluded, failure)
            attempt = self._start(call, pair, timeline)
            try:
                await attempt.started()
            except LegFailure as failed:
                await attempt.close()
                failure = failed
                excluded |= _suspects(failed, pair)
                if failed.in_doubt and failed.charged is not None:
                    doubted.add(failed.charged)
                lost_workers += failed.costs_a_worker
                if not failure.retryable or lost_workers == self._retry.max_lost_workers:
                    break
            except BaseException:
                await attempt.close()
                raise
            else:
                self._registry.accuse(doubted)
                return attempt
        assert failure is not None
        raise failure.error

    async def give_up(self, message: str) -> None:
        """End every attempt, and each that is yet to start, with an error."""
        self._stopped = failures.stopped(message)
        for attempt in list(self._attempts):
            await attempt.give_up(self._stopped)

    async def worker_lost(self, worker: Worker, reason: Reason) -> None:
        """Fail the legs of a worker that died or stopped answering; attempts may start over."""
        for attempt in list(self._attempts):
            await attempt.worker_lost(worker, reason)

    async def close(self, timeout: float) -> None:
        """Wait for aborts under way and for prefill legs that still finish."""
        await self.background.close(timeout)

    def leg_failed(self, lease: Lease, failure: LegFailure) -> None:
        """Count a failure, and leave a worker alone at which nothing listens."""
        worker = lease.worker
        failure.charged = worker.id
        if failure.reason is Reason.REFUSED:
            return
        self._metrics.leg_failures.labels(worker.role.value, failure.reason.value).inc()
        if failure.reason is Reason.KV_TRANSFER:
            self._metrics.kv_transfer_failures.inc()
        if failure.reason is Reason.CONNECT:
            self._registry.unreachable(worker, "cannot connect")
        elif failure.reason in failures.LOST or failure.peer_gone:
            worker.wake.set()
        log.warning("leg_failed", worker=worker.id, role=worker.role.value,
                    reason=failure.reason.value, message=failure.error.message)  # fmt: skip

    def abort(self, leg: Leg, request_id: str) -> None:
        """Tell the worker of ``leg`` to drop the request, in the background."""
        self.background.spawn(self._send_abort(leg.worker, request_id))

    def prefill_done(self, seconds: float) -> None:
        """Observe how long a prefill leg took."""
        self._metrics.prefill.observe(seconds)

    def closed(self, attempt: Attempt) -> None:
        """Forget an attempt that is over."""
        self._attempts.discard(attempt)

    def _lease(self, call: Call, excluded: set[str], failure: LegFailure | None) -> Pair:
        try:
            return self._registry.lease_pair(call.prompt, excluded)
        except NoWorker:
            if failure is not None:
                raise failure.error from None
            raise

    def _start(self, call: Call, pair: Pair, timeline: Timeline) -> Attempt:
        if self._stopped is not None:
            _give_back(pair)
            raise self._stopped.error
        # All ids have one length: SGLang aborts every request whose id begins with the given one.
        request_id = _ID_PREFIX.get(call.path, "req-") + uuid.uuid4().hex
        content = self._content(call, pair.prefill.worker, request_id)
        attempt = Attempt(call, pair, content, request_id, timeline, self)
        self._attempts.add(attempt)
        return attempt

    def _content(self, call: Call, prefill: Worker, request_id: str) -> bytes:
        """The body that both workers receive."""
        own = {
            "rid": request_id,
            "bootstrap_host": prefill.address.host,
            "bootstrap_port": prefill.bootstrap_port,
            "bootstrap_room": self._rng.randrange(1, 2**63),
        }
        return joined((*call.body, members(own)))

    async def _pause(self, number: int, call: Call, failure: LegFailure) -> None:
        """Back off before a further attempt.

        Raises:
            RoutingError: the last attempt's error, when no time is left for another.
        """
        ceiling = min(self._retry.max_delay, self._retry.base_delay * 2.0 ** (number - 1))
        delay = self._rng.uniform(ceiling / 2, ceiling)
        if asyncio.get_running_loop().time() + delay >= call.deadline:
            raise failure.error
        self._metrics.retries.inc()
        await asyncio.sleep(delay)

    async def _send_abort(self, worker: Worker, request_id: str) -> None:
        # Worth some tries: SGLang notices closed connections by itself, but only seconds later.
        result = "failed"
        for _ in range(ABORT_TRIES):
            try:
                async with (
                    asyncio.timeout(self.limits.abort),
                    worker.session.post("/abort_request", json={"rid": request_id}) as response,
                ):
                    result = "sent" if response.status == 200 else "refused"
                    break
            except (aiohttp.ClientConnectorError, RuntimeError):
                break  # The worker is gone, or it is forgotten and its session closed.
            except (TimeoutError, aiohttp.ClientError):
                continue
        self._metrics.aborts.labels(worker.role.value, result).inc()


def _suspects(failure: LegFailure, pair: Pair) -> set[str]:
    """Workers to avoid in the next attempt; a failed transfer may be either one's fault."""
    either = failure.reason in {Reason.KV_TRANSFER, Reason.ABORTED} and not failure.peer_gone
    if either or failure.charged is None:
        return {pair.prefill.worker.id, pair.decode.worker.id}
    return {failure.charged}


def _give_back(pair: Pair) -> None:
    pair.prefill.finish(Verdict.NEUTRAL)
    pair.decode.finish(Verdict.NEUTRAL)
