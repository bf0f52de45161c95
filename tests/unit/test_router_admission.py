"""Places, the queue, and waits that end early."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tpla.core.config.router import AdmissionPolicy
from tpla.core.errors import BadRequest, NoWorker, QueueFull
from tpla.router.admission import Admission


def make(limit: int = 2, queue: int = 2, timeout: float = 5.0) -> Admission:
    return Admission(
        AdmissionPolicy(max_concurrent_requests=limit, queue_size=queue, queue_timeout_secs=timeout)
    )


async def hold(admission: Admission, weight: int, order: list[int], release: asyncio.Event) -> None:
    async with admission.slot(weight):
        order.append(weight)
        await release.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_first_come_first_served_by_weight() -> None:
    admission, order, release = make(limit=3, queue=9), list[int](), asyncio.Event()
    tasks = []
    for weight in (2, 3, 1):
        tasks.append(asyncio.create_task(hold(admission, weight, order, release)))
        await settle()
    # The light one must not overtake the heavy one, or that would starve.
    assert order == [2]
    assert (admission.active, admission.queued) == (2, 2)
    release.set()
    await asyncio.gather(*tasks)
    assert order == [2, 3, 1]
    assert (admission.active, admission.queued) == (0, 0)


async def test_a_full_queue() -> None:
    admission = make(limit=1, queue=0)
    async with admission.slot():
        with pytest.raises(QueueFull) as caught:
            async with admission.slot():
                pass
    assert caught.value.code == "queue_full" and caught.value.status == 429
    async with admission.slot():
        pass


async def test_a_wait_that_times_out_leaves_no_trace() -> None:
    admission = make(limit=1, timeout=0.01)
    async with admission.slot():
        with pytest.raises(QueueFull) as caught:
            async with admission.slot():
                pass
        assert caught.value.code == "queue_timeout"
        assert admission.queued == 0
    assert admission.active == 0


async def test_a_cancelled_wait_lets_the_next_one_in() -> None:
    admission, order, release = make(limit=2), list[int](), asyncio.Event()
    async with AsyncExitStack() as held:
        await held.enter_async_context(admission.slot(1))
        heavy = asyncio.create_task(hold(admission, 2, order, release))
        await settle()
        light = asyncio.create_task(hold(admission, 1, order, release))
        await settle()
        heavy.cancel()
        await settle()
        assert order == [1]
    release.set()
    await light
    assert (admission.active, admission.queued) == (0, 0)


async def test_cancelled_in_the_moment_of_admission() -> None:
    admission, order, release = make(limit=1), list[int](), asyncio.Event()
    async with admission.slot():
        waiting = asyncio.create_task(hold(admission, 1, order, release))
        await settle()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (admission.active, order) == (0, [])


async def test_more_than_there_will_ever_be() -> None:
    with pytest.raises(BadRequest, match="5 samples"):
        async with make(limit=4).slot(5):
            pass


async def test_refusing_those_who_wait() -> None:
    admission = make(limit=1)
    async with admission.slot():
        waiting = asyncio.create_task(hold(admission, 1, [], asyncio.Event()))
        await settle()
        admission.refuse_waiting()
        with pytest.raises(NoWorker, match="shutting down"):
            await waiting
    assert admission.active == 0
