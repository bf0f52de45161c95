"""Many requests, random faults and impatient clients: every 200 is whole, and nothing leaks."""

from __future__ import annotations

import asyncio
import json
import random

import httpx

from tests.fakes.cluster import Cluster, cluster
from tests.fakes.sglang_worker import FakeWorker, Faults, wait_until
from tpla.router.registry import Worker

REQUESTS = 150
AT_ONCE = 16
WORDS = 5


def some_fault(chance: random.Random) -> Faults:
    """Often none; else one that SGLang is known for."""
    after = chance.randrange(WORDS)
    return chance.choice(
        [
            Faults(),
            Faults(),
            Faults(token_delay=0.02),
            Faults(delay=0.05),
            Faults(status=500),
            Faults(status=503),
            Faults(truncate_after=after, token_delay=0.005),
            Faults(abort_after=after, token_delay=0.005),
            Faults(error_after=after, token_delay=0.005),
            Faults(lose_kv=True),
            Faults(hang=True, only=1),
        ]
    )


async def one_request(client: httpx.AsyncClient, number: int, chance: random.Random) -> str:
    """Send a request and judge its answer; how it ended."""
    stream = chance.random() < 0.6
    patience = chance.choice([30, 30, 30, 30, 30, 30, 0.02, 0.1])
    samples = chance.choice([1, 1, 1, 3])
    body = {"prompt": f"w{number}", "max_tokens": WORDS, "stream": stream, "n": samples}
    try:
        async with asyncio.timeout(patience):
            answer = await client.post("/v1/completions", json=body)
    except TimeoutError:
        return "left"
    if answer.status_code != 200:
        assert set(answer.json()) == {"error"}
        assert answer.status_code in {502, 503, 504}, answer.text
        return "refused"
    texts = dict.fromkeys(range(samples), "")
    if not stream:
        texts = {choice["index"]: choice["text"] for choice in answer.json()["choices"]}
    else:
        events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
        if events[-1] != "[DONE]":
            assert set(json.loads(events[-1])) == {"error"}, events
            return "error event"
        for chunk in map(json.loads, events[:-1]):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == dict.fromkeys(range(samples), f"w{number} " * WORDS)
    return "whole"


async def storm(system: Cluster, chance: random.Random) -> list[str]:
    places = asyncio.Semaphore(AT_ONCE)

    async def guarded(number: int) -> str:
        async with places:
            if number % 10 == 0:
                for worker in system.workers:
                    worker.faults = some_fault(chance) if chance.random() < 0.5 else Faults()
            return await one_request(client, number, chance)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=system.url, timeout=30, limits=limits, trust_env=False
    ) as client:
        return list(await asyncio.gather(*(guarded(number) for number in range(REQUESTS))))


def test_a_storm_of_faults_leaves_nothing_behind() -> None:
    chance = random.Random(20260101)
    with cluster(
        prefill=2,
        decode=2,
        retry={"max_retries": 2},
        breaker={"failure_threshold": 5, "timeout_secs": 0.2},
        leg={"first_byte": 1.0, "idle": 1.0, "connect": 5.0},
        request_timeout_secs=4.0,
    ) as system:
        ends = asyncio.run(storm(system, chance))
        assert REQUESTS / 5 < ends.count("whole") < REQUESTS, ends
        system.wait_quiet()
        wait_until(lambda: not any(map(busy_connections, system.service.registry.workers.values())))
        for worker in system.workers:
            worker.faults = Faults()
            wait_until(lambda worker=worker: dropped(worker) <= set(worker.aborted))
        assert asyncio.run(calm(system)) == ["whole"] * 20


def busy_connections(worker: Worker) -> int:
    """Connections that the router holds for a request to ``worker``."""
    assert worker.session.connector is not None
    return len(worker.session.connector._acquired)


def dropped(worker: FakeWorker) -> set[str]:
    """Requests that ``worker`` did not finish, so that it must have been told to drop them."""
    return {item.body["rid"] for item in worker.seen if item.outcome == "disconnected"}


async def calm(system: Cluster) -> list[str]:
    """After the storm the same workers serve as if nothing had been."""
    await asyncio.sleep(0.5)  # open breakers close again
    async with httpx.AsyncClient(base_url=system.url, timeout=30, trust_env=False) as client:
        patient = random.Random(1)
        patient.choice = lambda options: options[0]  # type: ignore[method-assign]
        return [await one_request(client, number, patient) for number in range(20)]
