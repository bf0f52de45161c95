"""A bounded number of requests at once, and a bounded queue before them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from tpla.core.config.router import AdmissionPolicy
from tpla.core.errors import BadRequest, NoWorker, QueueFull


def refuse_too_many(samples: int, limit: int) -> None:
    """Refuse a request of so many samples that it could never be admitted.

    Raises:
        BadRequest: ``samples`` exceed ``limit``.
    """
    if samples > limit:
        raise BadRequest(
            f"{samples} samples in one request exceed the {limit} that this router serves at "
            "once; ask for fewer.",
            param="n",
        )


@dataclass(eq=False, slots=True)
class _Waiter:
    weight: int
    turn: asyncio.Future[None]


class Admission:
    """First come, first served; a request of n samples weighs n."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self._active = 0
        self._waiting: deque[_Waiter] = deque()

    @property
    def active(self) -> int:
        """Samples being served."""
        return self._active

    @property
    def queued(self) -> int:
        """Requests waiting."""
        return len(self._waiting)

    @asynccontextmanager
    async def slot(self, weight: int = 1) -> AsyncIterator[None]:
        """Hold ``weight`` places while the block runs.

        Raises:
            QueueFull: the queue is full (code ``queue_full``), or the wait in it was too long
                (code ``queue_timeout``); both are overload, hence both 429.
            BadRequest: ``weight`` can never be admitted.
        """
        await self._enter(weight)
        try:
            yield
        finally:
            self._active -= weight
            self._admit_waiting()

    def refuse_waiting(self) -> None:
        """Turn away all who still wait: the router is shutting down."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.turn.done():
                waiter.turn.set_exception(
                    NoWorker("The router is shutting down.", code="shutting_down")
                )

    async def _enter(self, weight: int) -> None:
        limit = self._policy.max_concurrent_requests
        refuse_too_many(weight, limit)
        if not self._waiting and self._active + weight <= limit:
            self._active += weight
            return
        if len(self._waiting) >= self._policy.queue_size:
            raise QueueFull(
                f"{limit} requests are active and {self._policy.queue_size} are waiting; "
                "try again later."
            )
        await self._wait(weight)

    async def _wait(self, weight: int) -> None:
        waiter = _Waiter(weight, asyncio.get_running_loop().create_future())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._policy.queue_timeout_secs):
                await waiter.turn
        except BaseException as error:
            self._leave(waiter)
            if isinstance(error, TimeoutError):
                raise QueueFull(
                    f"Waited {self._policy.queue_timeout_secs:g} s for a free place; "
                    "try again later.",
                    code="queue_timeout",
                ) from None
            raise

    def _leave(self, waiter: _Waiter) -> None:
        """Undo a wait that ended early, also one that was admitted in the same moment."""
        admitted = (
            waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None
        )
        if admitted:
            self._active -= waiter.weight
        elif waiter in self._waiting:
            self._waiting.remove(waiter)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        limit = self._policy.max_concurrent_requests
        while self._waiting and self._active + self._waiting[0].weight <= limit:
            waiter = self._waiting.popleft()
            if not waiter.turn.done():
                self._active += waiter.weight
                waiter.turn.set_result(None)
