"""Rows of one chunk on their way: bytes in host memory, or a staging buffer of the pool's device.

Shape suffixes: B bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from tpla.workers.transfer.digest import Place, chunk_digest, staged_digest
from tpla.workers.transfer.protocol import Pages, PageSink, Rows

WORD_BYTES = 8
"""The device digests whole words, so a buffer on the wire is a multiple of them."""

_ONE_BIT = 0x40


def wire_bytes(nbytes: int) -> int:
    """Bytes on the wire of ``nbytes`` bytes of rows; the padding is zero."""
    return -(-nbytes // WORD_BYTES) * WORD_BYTES


class HostRows:
    """Rows that travel as a message's payload, on both sides."""

    def __init__(self, rows: Rows) -> None:
        self.payload: Rows = rows.reshape(-1)
        self.nbytes: int = rows.nbytes

    @classmethod
    def received(cls, payload: memoryview | None) -> HostRows:
        """Of a message's payload; a message without has no rows."""
        return cls(np.frombuffer(payload if payload is not None else b"", np.uint8))

    def digest(self, place: Place) -> int:
        """As the protocol's; xxh3 of every byte."""
        return chunk_digest(place, self.payload.data)

    def damage(self) -> None:
        """As the protocol's."""
        self.payload[self.nbytes // 2] ^= _ONE_BIT

    def store(self, sink: PageSink, pages: Pages, place: Place, digest: int) -> bool:
        """As the protocol's; nothing is written unless the digest is right."""
        if self.digest(place) != digest:
            return False
        sink.write(pages, self.payload)
        return True


class StagedRows:
    """Rows that a prefill rank packs into a staging buffer; ``settle`` waits for their digest."""

    def __init__(self, wire_B: torch.Tensor, nbytes: int, settle: Callable[[], int]) -> None:
        self.wire_B = wire_B
        self.nbytes = nbytes
        self._settle = settle

    def digest(self, place: Place) -> int:
        """As the protocol's; made on the device."""
        return staged_digest(place, self._settle())

    def damage(self) -> None:
        """As the protocol's."""
        self.wire_B[self.nbytes // 2] ^= _ONE_BIT
        if self.wire_B.is_cuda:
            torch.cuda.current_stream(self.wire_B.device).synchronize()


class ReceivedRows:
    """Rows that a decode rank has received into a staging buffer."""

    def __init__(self, wire_B: torch.Tensor, nbytes: int) -> None:
        self.nbytes = nbytes
        self._wire_B = wire_B

    def store(self, sink: PageSink, pages: Pages, place: Place, digest: int) -> bool:
        """As the protocol's; written and verified in one go, since the room owns its pages."""
        return staged_digest(place, sink.store(pages, self._wire_B)) == digest
