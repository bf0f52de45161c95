"""Faults for tests and drills, as a decorator around a data plane's outboxes."""

from __future__ import annotations

import logging
import os
import threading
import time

from tpla.core.config import FaultPlan
from tpla.core.latent_layout import CacheLayout
from tpla.core.messages import Done
from tpla.workers.transfer.digest import Place, place_digest
from tpla.workers.transfer.protocol import Outbox, OutboxHandler, Pages, SendingPlane

logger = logging.getLogger(__name__)


class FaultySendingPlane:
    """Passes everything through, except that some chunks are hit by the plan's fault.

    ``flip`` changes one bit of the rows after their digest was taken, ``drop`` loses the chunk,
    ``delay`` holds it back, ``exit`` kills the process as a crash would.
    """

    def __init__(self, plane: SendingPlane, plan: FaultPlan) -> None:
        self.name = plane.name
        self.source = plane.source
        self.plan = plan
        self._plane = plane
        self._seen = 0
        self._lock = threading.Lock()

    def outbox(self, peer: str, layout: CacheLayout) -> FaultyOutbox:
        """As the plane's, hit by the plan that all outboxes share."""
        return FaultyOutbox(self._plane.outbox(peer, layout), self)

    def hits(self) -> bool:
        """Whether the plan names the chunk that is sent now."""
        with self._lock:
            self._seen += 1
            return self.plan.after < self._seen <= self.plan.after + self.plan.count


class FaultyOutbox:
    """Everything but :meth:`send` is the outbox's own."""

    def __init__(self, outbox: Outbox, plane: FaultySendingPlane) -> None:
        self.chunk_bytes, self.first_bytes = outbox.chunk_bytes, outbox.first_bytes
        self.window_bytes = outbox.window_bytes
        self.port = outbox.port
        self._outbox = outbox
        self._plane = plane

    def connect(self, handler: OutboxHandler) -> None:
        """As the outbox's."""
        self._outbox.connect(handler)

    def send(self, place: Place, pages: Pages, damaged: bool = False) -> int:
        """As the outbox's, with the fault applied to chunks that the plan names."""
        plan = self._plane.plan
        if not self._plane.hits():
            return self._outbox.send(place, pages, damaged)
        logger.warning("fault injection: %s on chunk %s", plan.kind, place)
        if plan.kind == "exit":
            os._exit(70)
        if plan.kind == "drop":
            return place_digest(place)
        if plan.kind == "delay":
            time.sleep(plan.delay_seconds)
        return self._outbox.send(place, pages, damaged or plan.kind == "flip")

    def finish(self, done: Done, metadata: bytes) -> None:
        """As the outbox's."""
        self._outbox.finish(done, metadata)

    def cancel(self) -> None:
        """As the outbox's."""
        self._outbox.cancel()

    def close(self) -> None:
        """As the outbox's."""
        self._outbox.close()
