"""Circuit breaker of one worker: a state machine over time that its caller passes in.

::

    closed ── threshold failures in a row ──> open ── timeout ──> half_open
      ^                                         ^                    │
      └──────────── trial succeeds ─────────────┼────────────────────┤
                                                └──── trial fails ───┘

An open breaker is never dispatched to; a half-open one takes one trial at a time. A stream has
succeeded as one once it shows decode at work, however long it goes on.
"""

from __future__ import annotations

from enum import Enum

from tpla.core.config.router import BreakerPolicy


class BreakerState(str, Enum):
    """Whether a worker may be sent requests."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Verdict(str, Enum):
    """What one leg says about its worker."""

    SUCCESS = "success"
    """It served the request, or rightly refused it (4xx)."""
    FAILURE = "failure"
    NEUTRAL = "neutral"
    """Nothing: it was full (429, 503), we cancelled the leg, or the request may be at fault."""


class Breaker:
    """Counts failures in a row; all times are readings of one monotonic clock."""

    def __init__(self, policy: BreakerPolicy) -> None:
        self._policy = policy
        self._failures = 0
        self._opened_at: float | None = None
        self._trial_running = False

    def state(self, now: float) -> BreakerState:
        """Current state."""
        if self._opened_at is None:
            return BreakerState.CLOSED
        if now - self._opened_at < self._policy.timeout_secs:
            return BreakerState.OPEN
        return BreakerState.HALF_OPEN

    def allows(self, now: float) -> bool:
        """Whether a request may be dispatched now."""
        state = self.state(now)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and not self._trial_running
        )

    def dispatched(self, now: float) -> bool:
        """Note a dispatch; True when it is the trial of a half-open breaker."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return False
        self._trial_running = True
        return True

    def report(self, verdict: Verdict, now: float, *, trial: bool) -> None:
        """Note how a dispatched leg ended; ``trial`` is what :meth:`dispatched` returned.

        A leg sent before the breaker opened says nothing new about it and is ignored.
        """
        if trial:
            self._trial_running = False
        if self._opened_at is not None and not trial:
            return
        if verdict is Verdict.SUCCESS:
            self._failures = 0
            self._opened_at = None
        elif verdict is Verdict.FAILURE:
            self._failures += 1
            if trial or self._failures >= self._policy.failure_threshold:
                self._opened_at = now

    def reset(self) -> None:
        """Forget everything: another process now answers at this address."""
        self._failures = 0
        self._opened_at = None
