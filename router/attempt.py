"""One attempt at a call: both legs at once, one fate.

The legs run as two tasks. Only decode's events reach the consumer; prefill's are read for what
they say about its fate. The leg that fails first of its own accord is charged; the other is
cancelled, told to abort, and not charged. Three refinements:

* A leg that reports a failed KV transfer is a witness as often as the culprit. The other leg gets
  a moment (``settle``) to turn out dead, and is then the one that is charged. It is charged as
  well where the report says that its worker is gone.
* An error with which a living worker answers before the KV has landed may be the request's own
  fault. The dispatcher charges it once another pair has served the request.
* Decode's first event proves that the KV has landed and was verified. From then on a prefill
  worker that dies is charged, but the request lives on; one that *says* that the request failed
  still ends it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Protocol

import structlog

from tpla.core.config.router import LegTimeouts
from tpla.core.phases import Phase, Timeline
from tpla.router import failures
from tpla.router.background import Background
from tpla.router.breaker import Verdict
from tpla.router.failures import LOST, LegFailure, Reason
from tpla.router.legs import Call, Event, Leg
from tpla.router.registry import Lease, Pair, Worker

log = structlog.get_logger("tpla.router.attempt")

BUFFERED_EVENTS = 64
"""Events of decode that may wait for a slow client before its leg is read no further."""

PROVEN_EVENTS = 3
"""Events of decode that show it at work: a chat's role and prefill's first token come before."""


class Host(Protocol):
    """What an attempt needs of the dispatcher that runs it."""

    limits: LegTimeouts
    background: Background

    def leg_failed(self, lease: Lease, failure: LegFailure) -> None:
        """A leg failed of its own accord."""

    def abort(self, leg: Leg, request_id: str) -> None:
        """Have the worker of ``leg`` told to drop the request."""

    def prefill_done(self, seconds: float) -> None:
        """A prefill leg ended well."""

    def closed(self, attempt: Attempt) -> None:
        """An attempt is over."""


class Attempt:
    """Both legs of one call, from dispatch to the verdict on both workers."""

    def __init__(
        self,
        call: Call,
        pair: Pair,
        content: bytes,
        request_id: str,
        timeline: Timeline,
        host: Host,
    ) -> None:
        self._request_id = request_id
        self._timeline = timeline
        self._host = host
        self._pair = pair
        self._events: list[Event] = []
        self._delivered = 0
        self._changed = asyncio.Condition()
        self._failure: LegFailure | None = None
        self._decode_ended = False
        self._landed = False
        self._ending: asyncio.Task[None] | None = None
        self._prefill = Leg(pair.prefill.worker, call, content, host.limits)
        self._decode = Leg(pair.decode.worker, call, content, host.limits)
        timeline.mark(Phase.DISPATCHED)
        timeline.mark(Phase.PREFILL_BEGIN)
        self._prefill_task = asyncio.create_task(self._run_prefill())
        self._decode_task = asyncio.create_task(self._run_decode())

    async def started(self) -> None:
        """Wait until decode's first event is here: the KV has landed.

        Raises:
            LegFailure: a leg failed first.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._landed or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    async def next(self) -> list[Event]:
        """Decode's events since the last call, at least one; none at the end.

        A consumer that falls behind gets many at once, and so catches up.

        Raises:
            LegFailure: a leg failed, and all events before that have been returned.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._events or self._decode_ended or self._failure is not None
            )
            events = list(self._events)
            self._events.clear()
            self._changed.notify_all()
        if not events and self._failure is not None:
            raise self._failure
        return events

    async def give_up(self, failure: LegFailure) -> None:
        """End the attempt from outside, with ``failure`` as what its consumer sees."""
        await self._fail(failure)

    async def worker_lost(self, worker: Worker, reason: Reason) -> None:
        """Do without a worker that its health check found dead or silent."""
        detail = "has stopped answering" if reason is Reason.TIMEOUT else "has gone away"
        for lease, leg, task, other in (
            (self._pair.prefill, self._prefill, self._prefill_task, self._decode_task),
            (self._pair.decode, self._decode, self._decode_task, self._prefill_task),
        ):
            if leg.worker is worker and not task.done():
                failure = failures.lost(reason, leg.role, detail)
                await self._leg_failed(lease, failure, other)
                task.cancel()

    def close(self) -> asyncio.Future[None]:
        """Leave no leg running: neither as a task here nor as a request on a worker.

        The end begins at once and comes even if nobody waits for it: a caller that is cancelled
        while it waits leaves nothing half closed. After a complete answer, prefill's leg is left to
        finish by itself, within its time-outs.
        """
        self._host.closed(self)
        if self._decode_ended and self._failure is None:
            self._host.background.adopt(self._prefill_task)
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        return asyncio.shield(self._end_legs())

    def _end_legs(self) -> asyncio.Task[None]:
        """Begin to end both legs, once."""
        if self._ending is None:
            self._ending = asyncio.create_task(self._end())
            self._host.background.adopt(self._ending)
        return self._ending

    async def _end(self) -> None:
        legs = (self._prefill_task, self._decode_task)
        for task in legs:
            task.cancel()
        await asyncio.gather(*legs, return_exceptions=True)
        # A task cancelled before its first step has not run its own ending.
        for lease, leg in ((self._pair.prefill, self._prefill), (self._pair.decode, self._decode)):
            lease.finish(Verdict.NEUTRAL)
            if leg.delivered and not leg.complete:
                self._host.abort(leg, self._request_id)

    async def _run_prefill(self) -> None:
        begin = time.monotonic()
        try:
            async with aclosing(self._prefill.events()) as events:
                async for _ in events:
                    pass
        except LegFailure as failure:
            await self._leg_failed(self._pair.prefill, failure, self._decode_task)
        except Exception as error:
            await self._leg_failed(self._pair.prefill, _crashed(error), self._decode_task)
        else:
            self._timeline.mark(Phase.PREFILL_END)
            self._host.prefill_done(time.monotonic() - begin)
            self._pair.prefill.finish(Verdict.SUCCESS)

    async def _run_decode(self) -> None:
        try:
            async with aclosing(self._decode.events()) as events:
                async for event in events:
                    await self._deliver(event)
        except LegFailure as failure:
            await self._leg_failed(self._pair.decode, failure, self._prefill_task)
        except Exception as error:
            await self._leg_failed(self._pair.decode, _crashed(error), self._prefill_task)
        else:
            self._pair.decode.finish(Verdict.SUCCESS)
            async with self._changed:
                self._decode_ended = True
                self._changed.notify_all()

    async def _deliver(self, event: Event) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._events) < BUFFERED_EVENTS)
            self._events.append(event)
            self._landed = True
            self._delivered += 1
            if self._delivered == PROVEN_EVENTS:
                self._pair.decode.proven()
            self._changed.notify_all()

    async def _leg_failed(
        self, lease: Lease, failure: LegFailure, other: asyncio.Task[None]
    ) -> None:
        """Charge a failure, and end the attempt with it unless the KV has already landed."""
        if failure.reason is Reason.KV_TRANSFER:
            # If the other leg turns out dead meanwhile, it ends the attempt and cancels us here.
            await asyncio.wait({other}, timeout=self._host.limits.settle)
        if self._failure is not None:
            return
        if failure.peer_gone:
            lease = self._pair.decode if lease is self._pair.prefill else self._pair.prefill
        if not self._landed:
            failure.doubt()
        lease.finish(failure.verdict)
        self._host.leg_failed(lease, failure)
        survivable = lease is self._pair.prefill and failure.reason in LOST and self._landed
        if survivable:
            self._host.abort(self._prefill, self._request_id)
        else:
            await self._fail(failure)
            self._end_legs()

    async def _fail(self, failure: LegFailure) -> None:
        async with self._changed:
            if self._failure is None and not self._decode_ended:
                self._failure = failure
            if self._failure is not None and self._failure.reason is Reason.REFUSED:
                # Both workers did their part: the request itself was at fault.
                self._pair.prefill.finish(Verdict.SUCCESS)
                self._pair.decode.finish(Verdict.SUCCESS)
            self._changed.notify_all()


def _crashed(error: Exception) -> LegFailure:
    log.exception("leg_crashed", error=repr(error))
    return failures.lost(Reason.MALFORMED, "upstream", "sent an answer that cannot be read")
