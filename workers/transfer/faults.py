"""Faults for tests and drills, as a decorator around a link."""

from __future__ import annotations

import logging
import os
import threading
import time

import numpy as np
import numpy.typing as npt

from tpla.core.config import FaultPlan
from tpla.core.messages import Chunk, Message
from tpla.workers.transfer.protocol import Link, LinkHandler

logger = logging.getLogger(__name__)


class FaultyLink:
    """Passes everything through, except that some chunks are hit by the plan's fault.

    ``flip`` changes one byte of the payload after its digest was taken, ``drop`` loses the chunk,
    ``delay`` holds it back, ``exit`` kills the process as a crash would.
    """

    def __init__(self, link: Link, plan: FaultPlan) -> None:
        self._link = link
        self._plan = plan
        self._seen = 0
        self._lock = threading.Lock()

    def start(self, handler: LinkHandler) -> None:
        """As the link's."""
        self._link.start(handler)

    def connect(self, endpoint: str) -> str:
        """As the link's."""
        return self._link.connect(endpoint)

    def disconnect(self, peer: str) -> None:
        """As the link's."""
        self._link.disconnect(peer)

    def close(self) -> None:
        """As the link's."""
        self._link.close()

    def send(
        self, peer: str, message: Message, payload: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """As the link's, with the fault applied to chunks that the plan names."""
        if not isinstance(message, Chunk) or payload is None or not self._hits():
            self._link.send(peer, message, payload)
            return
        logger.warning("fault injection: %s on %s", self._plan.kind, message)
        if self._plan.kind == "flip":
            damaged = payload.reshape(-1).copy()
            damaged[damaged.size // 2] ^= 0x40
            self._link.send(peer, message, damaged)
        elif self._plan.kind == "delay":
            time.sleep(self._plan.delay_seconds)
            self._link.send(peer, message, payload)
        elif self._plan.kind == "exit":
            os._exit(70)

    def _hits(self) -> bool:
        with self._lock:
            self._seen += 1
            return self._plan.after < self._seen <= self._plan.after + self._plan.count
