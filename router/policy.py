"""Choosing a worker: filter, score, pick, as pure functions over a snapshot.

Nothing here holds state or reads a clock. What a policy needs to remember (the turn, the prefixes
that each worker has seen) is kept by the registry and comes with the snapshot; chance comes as an
argument.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tpla.core.config.router import CacheAwarePolicy, Policy
from tpla.core.config.worker import Role
from tpla.core.errors import NoWorker


@dataclass(frozen=True, slots=True)
class WorkerView:
    """What a policy may know of a worker."""

    id: str
    role: Role
    active: int = 0
    healthy: bool = True
    draining: bool = False
    admitted: bool = True
    """Whether its circuit breaker lets a request through."""

    @property
    def eligible(self) -> bool:
        """Whether it may be sent a request."""
        return self.healthy and self.admitted and not self.draining


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The fleet at one moment, as seen by one request."""

    workers: Sequence[WorkerView]
    turn: int = 0
    """Counts choices; the state of round robin."""
    matches: Mapping[str, float] = field(default_factory=dict)
    """Share of this request's prompt that each worker has seen."""
    cache_aware: CacheAwarePolicy = field(default_factory=CacheAwarePolicy)


Scorer = Callable[[Snapshot, Sequence[WorkerView], random.Random], Sequence[float]]
"""One score for each candidate; the highest is picked, the first among equals."""


def choose(
    policy: Policy,
    role: Role,
    snapshot: Snapshot,
    rng: random.Random,
    excluded: Collection[str] = (),
) -> str:
    """Id of the worker to send a request to.

    ``excluded`` workers have just failed this request; they are taken only if no other is left.

    Raises:
        NoWorker: no worker of ``role`` is eligible.
    """
    candidates = eligible(snapshot, role)
    if not candidates:
        raise NoWorker(_why_none(snapshot, role))
    candidates = [worker for worker in candidates if worker.id not in excluded] or candidates
    return pick(candidates, SCORERS[policy](snapshot, candidates, rng))


def eligible(snapshot: Snapshot, role: Role) -> list[WorkerView]:
    """Filter: the workers of ``role`` that may be sent a request."""
    return [worker for worker in snapshot.workers if worker.role is role and worker.eligible]


def pick(candidates: Sequence[WorkerView], scores: Sequence[float]) -> str:
    """Pick: the candidate with the highest score, the first among equals."""
    return max(zip(scores, candidates, strict=True), key=lambda pair: pair[0])[1].id


def round_robin(
    snapshot: Snapshot, candidates: Sequence[WorkerView], rng: random.Random
) -> Sequence[float]:
    """Each in turn."""
    chosen = snapshot.turn % len(candidates)
    return [float(index == chosen) for index in range(len(candidates))]


def at_random(
    snapshot: Snapshot, candidates: Sequence[WorkerView], rng: random.Random
) -> Sequence[float]:
    """Any, with equal chances."""
    return [rng.random() for _ in candidates]


def power_of_two(
    snapshot: Snapshot, candidates: Sequence[WorkerView], rng: random.Random
) -> Sequence[float]:
    """The less loaded of two drawn at random."""
    drawn = set(rng.sample(range(len(candidates)), k=min(2, len(candidates))))
    return [
        -float(worker.active) if index in drawn else float("-inf")
        for index, worker in enumerate(candidates)
    ]


def least_loaded(
    snapshot: Snapshot, candidates: Sequence[WorkerView], rng: random.Random
) -> Sequence[float]:
    """The one with fewest active requests; equals take turns."""
    return [
        -worker.active - ((index - snapshot.turn) % len(candidates)) / len(candidates)
        for index, worker in enumerate(candidates)
    ]


def cache_aware(
    snapshot: Snapshot, candidates: Sequence[WorkerView], rng: random.Random
) -> Sequence[float]:
    """The one that knows most of the prompt, unless the load is unbalanced or none knows enough."""
    limits = snapshot.cache_aware
    loads = [worker.active for worker in candidates]
    unbalanced = max(loads) - min(loads) > limits.balance_abs_threshold and max(
        loads
    ) > limits.balance_rel_threshold * min(loads)
    known = [snapshot.matches.get(worker.id, 0.0) for worker in candidates]
    if unbalanced or max(known) < limits.match_threshold or max(known) == 0:
        return least_loaded(snapshot, candidates, rng)
    # Load decides among equal matches, and is too small to outweigh a chunk.
    return [share - worker.active * 1e-9 for share, worker in zip(known, candidates, strict=True)]


SCORERS: Mapping[Policy, Scorer] = {
    Policy.ROUND_ROBIN: round_robin,
    Policy.RANDOM: at_random,
    Policy.POWER_OF_TWO: power_of_two,
    Policy.LEAST_LOADED: least_loaded,
    Policy.CACHE_AWARE: cache_aware,
}


def _why_none(snapshot: Snapshot, role: Role) -> str:
    workers = [worker for worker in snapshot.workers if worker.role is role]
    if not workers:
        return f"No {role.value} worker is known; add one with --{role.value} or POST /workers."
    unhealthy = sum(not worker.healthy for worker in workers)
    draining = sum(worker.draining for worker in workers)
    blocked = sum(not worker.admitted for worker in workers)
    return (
        f"No {role.value} worker is available: of {len(workers)}, {unhealthy} unhealthy, "
        f"{draining} draining, {blocked} with an open circuit breaker. Try again later."
    )
