"""Rows of one chunk on their way: bytes in host memory, or a staging buffer of the pool's device.

Shape suffixes: Y layers, T tokens, B bytes.
"""

from __future__ import annotations

import numpy as np
import torch

from tpla.workers.transfer.digest import Place, chunk_digest, staged_digest
from tpla.workers.transfer.protocol import Rows

WORD_BYTES = 8
"""The device digests whole words, so a buffer on the wire is a multiple of them."""

_ONE_BIT = 0x40


def wire_bytes(nbytes: int) -> int:
    """Bytes on the wire of ``nbytes`` bytes of rows; the padding is zero."""
    return -(-nbytes // WORD_BYTES) * WORD_BYTES


class HostRows:
    """Rows that travel as a message's payload."""

    def __init__(self, rows: Rows) -> None:
        self._flat_B = rows.reshape(-1)
        self.nbytes: int = rows.nbytes

    @classmethod
    def received(cls, payload: memoryview | None) -> HostRows:
        """Of a message's payload; a message without has no rows."""
        return cls(np.frombuffer(payload if payload is not None else b"", np.uint8))

    @property
    def payload(self) -> Rows:
        """Every byte, in order."""
        return self._flat_B

    def digest(self, place: Place) -> int:
        """64 bits over the place and every byte."""
        return chunk_digest(place, self._flat_B.data)

    def shaped(self, shape: tuple[int, int, int]) -> Rows:
        """``[layers, tokens, row_bytes]``; the sizes must agree."""
        return self._flat_B.reshape(shape)

    def damage(self) -> None:
        """Flip one bit, after the digest was taken (a drill)."""
        self._flat_B[self.nbytes // 2] ^= _ONE_BIT


class StagedRows:
    """Rows in a staging buffer, of which ``row_digest`` was made on the device."""

    def __init__(self, wire_B: torch.Tensor, nbytes: int, row_digest: int) -> None:
        self.wire_B = wire_B
        self.nbytes = nbytes
        self._row_digest = row_digest

    def digest(self, place: Place) -> int:
        """64 bits over the place and every byte."""
        return staged_digest(place, self._row_digest)

    def shaped(self, shape: tuple[int, int, int]) -> torch.Tensor:
        """``[layers, tokens, row_bytes]``; the sizes must agree."""
        return self.wire_B[: self.nbytes].view(shape)

    def damage(self) -> None:
        """Flip one bit, after the digest was taken (a drill)."""
        self.wire_B[self.nbytes // 2] ^= _ONE_BIT
        if self.wire_B.is_cuda:
            torch.cuda.current_stream(self.wire_B.device).synchronize()
