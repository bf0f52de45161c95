"""The life of a request, as one enum whose names appear in logs, metrics and traces alike.

::

    received ─ queued ─ dispatched ─┬─ prefill_begin ─ prefill_end           (prefill leg)
                                    └─ transfer_begin ─ transfer_end         (decode leg)
                                                            └─ first_token ─┬─ finished
                                                                            ├─ failed
                                                     (client left)          └─ aborted

The router sees HTTP alone: it marks every phase but ``transfer_*``, which the workers mark.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum


class Phase(str, Enum):
    """A point in the life of a request."""

    RECEIVED = "received"
    QUEUED = "queued"
    DISPATCHED = "dispatched"
    PREFILL_BEGIN = "prefill_begin"
    PREFILL_END = "prefill_end"
    TRANSFER_BEGIN = "transfer_begin"
    TRANSFER_END = "transfer_end"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"
    FAILED = "failed"
    ABORTED = "aborted"


class Timeline:
    """When a request entered each phase, on one monotonic clock.

    A phase entered again (a retry) keeps its latest time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[Phase, float] = {Phase.RECEIVED: clock()}

    def mark(self, phase: Phase) -> None:
        """Note that ``phase`` begins now."""
        self._times[phase] = self._clock()

    def mark_once(self, phase: Phase) -> None:
        """Note that ``phase`` begins now, unless it has begun before."""
        self._times.setdefault(phase, self._clock())

    def seconds(self, begin: Phase, end: Phase) -> float | None:
        """Time from ``begin`` to ``end``; None when either was not entered."""
        if begin not in self._times or end not in self._times:
            return None
        return self._times[end] - self._times[begin]

    def since_received(self) -> dict[str, float]:
        """Each phase entered, in milliseconds since the request was received, in order of time."""
        start = self._times[Phase.RECEIVED]
        ordered = sorted(self._times.items(), key=lambda item: item[1])
        return {phase.value: round((at - start) * 1000, 3) for phase, at in ordered}
