"""Rows of one chunk that came from a prefill rank: with a message, or into staging memory."""

from __future__ import annotations

import numpy as np

from tpla.workers.transfer.digest import Place, chunk_digest, place_digest
from tpla.workers.transfer.protocol import IncomingStaging, Pages, PageSink, Rows


class HostRows:
    """Rows that travelled as a message's payload."""

    def __init__(self, payload: memoryview | None) -> None:
        self._rows: Rows = np.frombuffer(payload if payload is not None else b"", np.uint8)
        self._intact = False
        self.nbytes: int = self._rows.nbytes

    def begin(self, sink: PageSink, pages: Pages, place: Place, digest: int) -> None:
        """As the protocol's; nothing is written unless the digest is right."""
        self._intact = sink.write(
            pages, self._rows, lambda: chunk_digest(place, self._rows.data) == digest
        )

    def intact(self) -> bool:
        """As the protocol's."""
        return self._intact


class StagedRows:
    """Rows that were received into staging memory, and are digested while they are stored."""

    def __init__(self, staging: IncomingStaging, nbytes: int) -> None:
        self.nbytes = nbytes
        self._staging = staging
        self._in_place = False

    def begin(self, sink: PageSink, pages: Pages, place: Place, digest: int) -> None:
        """As the protocol's; the room owns its pages, so what is wrong does no harm there."""
        seed = place_digest(place)
        self._in_place = seed == digest
        if self._in_place:
            self._staging.store(pages, self.nbytes, seed)

    def intact(self) -> bool:
        """As the protocol's."""
        return self._in_place and self._staging.intact()
