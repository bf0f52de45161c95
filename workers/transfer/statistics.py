"""Totals of one rank's transfers."""

from __future__ import annotations

import threading
from typing import Any

from tpla.core.errors import TransferError


class TransferStatistics:
    """Counters; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._payload_bytes = 0
        self._tokens = 0
        self._failures: dict[str, int] = {}

    def count_bytes(self, payload_bytes: int, tokens: int) -> None:
        """Rows of ``tokens`` slots, all layers, took ``payload_bytes`` on the wire."""
        with self._lock:
            self._payload_bytes += payload_bytes
            self._tokens += tokens

    def count_failure(self, error: TransferError) -> None:
        """A room failed."""
        kind = type(error).__name__
        with self._lock:
            self._failures[kind] = self._failures.get(kind, 0) + 1

    def snapshot(self) -> dict[str, Any]:
        """Plain values: ``payload_bytes``, ``tokens``, ``failures`` by kind."""
        with self._lock:
            return {
                "payload_bytes": self._payload_bytes,
                "tokens": self._tokens,
                "failures": dict(self._failures),
            }
