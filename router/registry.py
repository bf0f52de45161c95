"""The workers that the router knows, their state, and the legs that each is serving."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from enum import Enum
from itertools import count

import aiohttp

from tpla.core.config.router import (
    DEFAULT_BOOTSTRAP_PORT,
    Policy,
    RouterConfig,
    WorkerAddress,
)
from tpla.core.config.worker import Role
from tpla.core.errors import BadRequest, NotFound
from tpla.router.breaker import Breaker, BreakerState, Verdict
from tpla.router.policy import Snapshot, WorkerView, choose
from tpla.router.prefix_tree import PrefixTree

Clock = Callable[[], float]

# Below the 5 s after which SGLang's uvicorn closes an idle connection: never reuse a dying one.
KEEP_ALIVE_SECONDS = 2.0


@dataclass(eq=False)
class Worker:
    """One worker. The health monitor sets the fields below ``breaker``; leases move ``active``."""

    id: str
    address: WorkerAddress
    session: aiohttp.ClientSession
    breaker: Breaker
    active: int = 0
    draining: bool = False
    healthy: bool = False
    reason: str = "not checked yet"
    failed_checks: int = 0
    last_check: float | None = None
    """Wall-clock time of the last check."""
    last_answer: float = float("-inf")
    """Monotonic time at which its scheduler was last asked for its load and told it; where none is
    asked for, of the last check that found nothing wrong."""
    last_contact: float = float("-inf")
    """Monotonic time of the last byte received from it."""
    identified: bool = False
    """Whether it has told what it is since it last came up."""
    instance_id: str | None = None
    model: str | None = None
    reported_bootstrap_port: int | None = None
    load: object = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to have it checked now."""

    @property
    def role(self) -> Role:
        """Prefill or decode."""
        return self.address.role

    def well_since(self, moment: float) -> bool:
        """Whether its scheduler answered what was asked since then, and no check failed."""
        return self.failed_checks == 0 and self.last_answer > moment

    @property
    def bootstrap_port(self) -> int:
        """Where decode asks for this worker's KV."""
        return self.address.bootstrap_port or self.reported_bootstrap_port or DEFAULT_BOOTSTRAP_PORT


@dataclass(frozen=True)
class WorkerReport:
    """What /workers and the metrics show of a worker."""

    id: str
    url: str
    role: Role
    bootstrap_port: int | None
    healthy: bool
    reason: str
    draining: bool
    active: int
    breaker: BreakerState
    failed_checks: int
    last_check: float | None
    instance_id: str | None
    model: str | None
    load: object = field(repr=False)

    def as_json(self) -> dict[str, object]:
        """Plain values."""
        values = asdict(self)
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values.items()
        }


class Lease:
    """One leg's hold on a worker, from dispatch until its verdict."""

    def __init__(self, registry: Registry, worker: Worker, *, trial: bool) -> None:
        self.worker = worker
        self._registry = registry
        self._trial = trial
        self._open = True

    def proven(self) -> None:
        """The worker works: where this leg is its trial, others need not wait for a long answer."""
        if self._open and self._trial:
            self._trial = False
            self._registry.trial_succeeded(self.worker)

    def finish(self, verdict: Verdict) -> None:
        """Give the worker back and tell its breaker; only the first call counts."""
        if self._open:
            self._open = False
            self._registry.returned(self.worker, verdict, trial=self._trial)


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode worker, both leased."""

    prefill: Lease
    decode: Lease


class Registry:
    """Adds, removes, reports and leases workers. All methods run on one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        clock: Clock = time.monotonic,
        rng: random.Random | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._rng = rng or random.Random()
        self._numbers = count(1)
        self._turn = 0
        self._prefixes = PrefixTree(config.cache_aware.max_entries)
        self._retired: set[aiohttp.ClientSession] = set()
        self.workers: dict[str, Worker] = {}

    @property
    def served_model(self) -> str | None:
        """The model's name: as configured, else as the first worker reports it, healthy ones first.

        An unhealthy worker may be so because it serves another model.
        """
        if self._config.model is not None:
            return self._config.model
        named = [worker for worker in self.workers.values() if worker.model]
        return next((w.model for w in sorted(named, key=lambda w: not w.healthy)), None)

    @property
    def ready(self) -> bool:
        """Whether a worker of each role is healthy."""
        usable = {w.role for w in self.workers.values() if w.healthy and not w.draining}
        return usable == {Role.PREFILL, Role.DECODE}

    def model_beside(self, worker: Worker) -> str | None:
        """What the other workers serve, by the name that they report; None where none is healthy.

        Not the configured name, which may be an alias, nor that of workers that are to leave: a
        fleet can change its model by adding new workers and draining the old.
        """
        others = (w for w in self.workers.values() if w is not worker and not w.draining)
        return next((other.model for other in others if other.healthy and other.model), None)

    def add(self, address: WorkerAddress) -> Worker:
        """Know a worker; it is dispatched to after its first good health check.

        Raises:
            BadRequest: a worker at this address is known already.
        """
        if any(worker.address.url == address.url for worker in self.workers.values()):
            raise BadRequest(
                f"Worker {address.url} is known already; DELETE it first.",
                param="url",
                code="worker_exists",
            )
        worker = Worker(
            id=f"{address.role.value}-{next(self._numbers)}",
            address=address,
            session=_session(address.url, self._config),
            breaker=Breaker(self._config.breaker),
        )
        self.workers[worker.id] = worker
        return worker

    def get(self, worker_id: str) -> Worker:
        """The worker of this id.

        Raises:
            NotFound: there is none.
        """
        if worker_id not in self.workers:
            raise NotFound(f"No worker {worker_id!r}; see GET /workers.", code="worker_not_found")
        return self.workers[worker_id]

    def drain(self, worker_id: str) -> Worker:
        """Send a worker nothing new, and forget it once it has finished what it has.

        Raises:
            NotFound: there is no such worker.
        """
        worker = self.get(worker_id)
        worker.draining = True
        self._forget_if_drained(worker)
        return worker

    def lease_pair(self, prompt: str, excluded: Collection[str] = ()) -> Pair:
        """Choose a prefill and a decode worker for ``prompt``, and lease both.

        Raises:
            NoWorker: no worker of one role is eligible.
        """
        config = self._config
        snapshot = self.snapshot(prompt)
        prefill = choose(config.prefill_policy, Role.PREFILL, snapshot, self._rng, excluded)
        decode = choose(config.decode_policy, Role.DECODE, snapshot, self._rng, excluded)
        self._turn += 1
        for worker_id, policy in ((prefill, config.prefill_policy), (decode, config.decode_policy)):
            if policy is Policy.CACHE_AWARE:
                self._prefixes.insert(prompt, worker_id)
        return Pair(self._lease(prefill), self._lease(decode))

    def snapshot(self, prompt: str = "") -> Snapshot:
        """What the policies see now."""
        now = self._clock()
        views = [
            WorkerView(
                id=worker.id,
                role=worker.role,
                active=worker.active,
                healthy=worker.healthy,
                draining=worker.draining,
                admitted=worker.breaker.allows(now),
            )
            for worker in self.workers.values()
        ]
        wanted = Policy.CACHE_AWARE in (self._config.prefill_policy, self._config.decode_policy)
        matches = self._prefixes.matches(prompt) if wanted else {}
        return Snapshot(views, self._turn, matches, self._config.cache_aware)

    def returned(self, worker: Worker, verdict: Verdict, *, trial: bool) -> None:
        """A lease ended; called by :class:`Lease`."""
        worker.active -= 1
        worker.breaker.report(verdict, self._clock(), trial=trial)
        self._forget_if_drained(worker)

    def trial_succeeded(self, worker: Worker) -> None:
        """The trial of a half-open breaker went well so far; called by :class:`Lease`."""
        worker.breaker.report(Verdict.SUCCESS, self._clock(), trial=True)

    def accuse(self, worker_ids: Collection[str]) -> None:
        """Charge workers that failed a request which another pair has then served.

        Their legs have ended neutrally. One may have been the trial of a half-open breaker, which
        then opens again. Workers that have been forgotten meanwhile are passed over.
        """
        now = self._clock()
        for worker in [self.workers[name] for name in worker_ids if name in self.workers]:
            trial = worker.breaker.state(now) is BreakerState.HALF_OPEN
            worker.breaker.report(Verdict.FAILURE, now, trial=trial)

    def unreachable(self, worker: Worker, why: str) -> None:
        """Nothing listens at a worker's address: leave it alone until a check succeeds."""
        worker.healthy = False
        worker.reason = why
        worker.wake.set()

    def replaced(self, worker: Worker) -> None:
        """Another process answers at this address: its cache is empty, its failures are not."""
        worker.breaker.reset()
        self._prefixes.forget(worker.id)

    def report(self) -> list[WorkerReport]:
        """State of each worker."""
        return [self.describe(worker) for worker in self.workers.values()]

    def describe(self, worker: Worker) -> WorkerReport:
        """State of one worker."""
        return WorkerReport(
            id=worker.id,
            url=worker.address.url,
            role=worker.role,
            bootstrap_port=worker.bootstrap_port if worker.role is Role.PREFILL else None,
            healthy=worker.healthy,
            reason=worker.reason,
            draining=worker.draining,
            active=worker.active,
            breaker=worker.breaker.state(self._clock()),
            failed_checks=worker.failed_checks,
            last_check=worker.last_check,
            instance_id=worker.instance_id,
            model=worker.model,
            load=worker.load,
        )

    async def close(self) -> None:
        """Close all connections."""
        for session in [*(worker.session for worker in self.workers.values()), *self._retired]:
            await session.close()
        self._retired.clear()

    async def close_retired(self, worker: Worker) -> None:
        """Close the connections of a worker that has been forgotten."""
        self._retired.discard(worker.session)
        await worker.session.close()

    def _lease(self, worker_id: str) -> Lease:
        worker = self.workers[worker_id]
        worker.active += 1
        return Lease(self, worker, trial=worker.breaker.dispatched(self._clock()))

    def _forget_if_drained(self, worker: Worker) -> None:
        if worker.draining and worker.active == 0 and worker.id in self.workers:
            del self.workers[worker.id]
            self._prefixes.forget(worker.id)
            # Aborts to it may still be under way: the health monitor closes the session later.
            self._retired.add(worker.session)
            worker.wake.set()


def _session(url: str, config: RouterConfig) -> aiohttp.ClientSession:
    """Keep-alive connections to one worker.

    aiohttp rather than httpx, because legs are cancelled all the time: a cancelled request of
    httpx 0.28 may leave its connection open, with the worker still at work, and its pool with an
    entry that is never removed. It also costs a third of the time per event.
    """
    key = config.worker_api_key
    return aiohttp.ClientSession(
        base_url=url,
        headers={
            "accept-encoding": "identity",
            **({"authorization": f"Bearer {key}"} if key else {}),
        },
        # Reads are bounded by the legs themselves, which know what they wait for.
        timeout=aiohttp.ClientTimeout(total=None, connect=config.leg.connect),
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )
