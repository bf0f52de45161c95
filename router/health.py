"""Active health checks: one task for each worker, which also learns what the worker is.

SGLang 0.5.16 answers ``/health`` in one of two ways. With
``SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION=0`` it is cheap and says whether the server has started
and is not shutting down. By default it generates a token and takes at least one second; under
load it may take longer than the time-out, so a worker from which bytes arrived meanwhile counts
as alive.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import structlog

from tpla.core.config.router import HealthPolicy
from tpla.router.failures import Reason, refused_by_host
from tpla.router.registry import Registry, Worker

log = structlog.get_logger("tpla.router.health")

SERVER_INFO_PATH = "/server_info"
PING_PATH = "/model_info"
"""Answered by a worker's HTTP process alone, however long its scheduler is busy."""

RETIRE_SECONDS = 10.0
"""A forgotten worker's connections stay open this long, for aborts on their way."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with a worker."""

    text: str
    decisive: bool = False
    """One such finding is enough to call it unhealthy."""
    loss: Reason | None = None
    """What to charge its legs with where it did not answer at all: nothing more will come."""


class HealthMonitor:
    """Keeps ``healthy`` and the descriptive fields of every worker up to date.

    ``on_lost`` is called whenever a worker that is not healthy is found dead or silent, whoever
    noticed first that it is not healthy. Without it, a request that does not stream would wait for
    a stopped worker until its deadline.
    """

    def __init__(
        self,
        registry: Registry,
        policy: HealthPolicy,
        on_lost: Callable[[Worker, Reason], Awaitable[None]],
    ) -> None:
        self._registry = registry
        self._policy = policy
        self._on_lost = on_lost
        self._tasks: set[asyncio.Task[None]] = set()

    def watch(self, worker: Worker) -> None:
        """Check ``worker`` now and from now on, until the registry has forgotten it."""
        task = asyncio.create_task(self._watch(worker), name=f"health {worker.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop checking."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def check(self, worker: Worker) -> None:
        """Check ``worker`` once."""
        was_healthy = worker.healthy
        loss: Reason | None = None
        problem = await self._probe(worker)
        worker.last_check = time.time()
        if problem is None and not (was_healthy and worker.identified):
            problem = await self._identify(worker)
        if problem is None:
            worker.failed_checks = 0
            worker.healthy, worker.reason = True, "healthy"
            worker.load = await self._load(worker)
        else:
            worker.failed_checks += 1
            worker.reason = problem.text
            if problem.decisive or worker.failed_checks >= self._policy.failure_threshold:
                worker.healthy, loss = False, problem.loss
        if worker.healthy != was_healthy:
            log.info("worker_health", worker=worker.id, url=worker.address.url,
                     healthy=worker.healthy, reason=worker.reason)  # fmt: skip
        if loss is not None:
            await self._on_lost(worker, loss)

    async def _watch(self, worker: Worker) -> None:
        while worker.id in self._registry.workers:
            worker.wake.clear()
            try:
                await self.check(worker)
            except Exception:
                log.exception("health_check_crashed", worker=worker.id)
            await self._pause(worker)
        await asyncio.sleep(RETIRE_SECONDS)
        await self._registry.close_retired(worker)

    async def _pause(self, worker: Worker) -> None:
        """Until the next check is due; spread, so that checks of many workers do not align."""
        seconds = self._policy.interval_secs * random.uniform(0.9, 1.1)
        try:
            async with asyncio.timeout(seconds):
                await worker.wake.wait()
        except TimeoutError:
            pass

    async def _probe(self, worker: Worker) -> Problem | None:
        path, limit = self._policy.path, self._policy.timeout_secs
        started = time.monotonic()
        try:
            status, _ = await self._get(worker, path)
        except TimeoutError:
            if worker.last_contact > started:
                return None
            silent = await self._json(worker, PING_PATH) is None
            loss = Reason.TIMEOUT if silent else None
            return Problem(f"no answer to {path} in {limit:g} s", loss=loss)
        except aiohttp.ClientConnectorError as error:
            text = f"cannot connect: {error.strerror or error}"
            if not refused_by_host(error):
                return Problem(text)
            # Its legs are about to notice the same: whoever is first, the charge must be one.
            return Problem(text, decisive=True, loss=Reason.DISCONNECTED)
        except aiohttp.ClientError as error:
            return Problem(f"{type(error).__name__}: {error}")
        return None if status == 200 else Problem(f"{path} answers {status}")

    async def _identify(self, worker: Worker) -> Problem | None:
        """Learn what the worker is, once it comes up; what is wrong with that, if anything.

        Its scheduler may be too busy to say: what was known before holds until a later check.
        """
        info = await self._json(worker, SERVER_INFO_PATH)
        worker.identified = isinstance(info, Mapping)
        problem = self._learn(worker, info) if worker.identified else None
        if problem is not None:
            return problem
        name = info.get("served_model_name") if worker.identified else None
        name = name or _first_model(await self._json(worker, "/v1/models"))
        if isinstance(name, str):
            worker.model = name
        return self._foreign(worker)

    def _foreign(self, worker: Worker) -> Problem | None:
        """Whether it serves another model than the others: it would answer under their name."""
        common = self._registry.model_beside(worker)
        if worker.model is None or common is None or worker.model == common:
            return None
        text = (
            f"serves the model {worker.model!r}, the other workers {common!r}; start all with one "
            "--served-model-name, or DELETE the others first"
        )
        return Problem(text, decisive=True)

    def _learn(self, worker: Worker, info: Mapping[str, Any]) -> Problem | None:
        """Keep what the worker says of itself; what is wrong with that, if anything."""
        mode = info.get("disaggregation_mode")
        if mode is not None and mode != worker.role.value:
            listed = worker.role.value
            text = f"is a worker of --disaggregation-mode {mode}, listed as {listed}"
            return Problem(text, decisive=True)
        port = info.get("disaggregation_bootstrap_port")
        worker.reported_bootstrap_port = port if isinstance(port, int) else None
        instance = next(iter(_accountings(info)), {}).get("instance_id")
        if isinstance(instance, str) and instance != worker.instance_id:
            if worker.instance_id is not None:
                self._registry.replaced(worker)
            worker.instance_id = instance
        return None

    async def _load(self, worker: Worker) -> object:
        path, asked = self._policy.load_path, time.monotonic()
        told = await self._json(worker, path) if path else None
        if told is not None or not path:
            worker.last_answer = asked
        if path == SERVER_INFO_PATH:
            return _load_of(_accountings(told))  # the rest names files and keys of the worker
        return told

    async def _json(self, worker: Worker, path: str) -> Any:
        """The JSON at ``path``, or None: what it tells is useful, not needed."""
        try:
            status, content = await self._get(worker, path)
            return json.loads(content) if status == 200 else None
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return None

    async def _get(self, worker: Worker, path: str) -> tuple[int, bytes]:
        async with (
            asyncio.timeout(self._policy.timeout_secs),
            worker.session.get(path, allow_redirects=False) as response,
        ):
            return response.status, await response.read()


def _accountings(info: Any) -> list[dict[str, Any]]:
    """What our plug-in adds to a worker's ``/server_info``: who it is, and all that it holds; one
    entry for each data-parallel rank."""
    try:
        return [dict(state["tpla"]) for state in info["internal_states"]]
    except (KeyError, TypeError, ValueError):
        return []


def _load_of(accountings: list[dict[str, Any]]) -> object:
    if len(accountings) > 1:
        return {"dp_ranks": accountings}
    return next(iter(accountings), None)


def _first_model(models: Any) -> object:
    try:
        return models["data"][0]["id"]
    except (KeyError, IndexError, TypeError):
        return None
