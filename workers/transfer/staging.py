"""Memory of one chunk between a pool and the wire, in host memory.

On the wire the rows of a chunk are followed by one 64-bit word, their digest. It begins with the
place of the chunk, so that rows which arrive in another chunk's place are not taken for its own.
:mod:`~tpla.workers.transfer.cuda_staging` does the same on a GPU.

Shape suffixes: B bytes, W 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpla.kernels.ref.row_digest import row_digest
from tpla.workers.transfer.protocol import Pages, Rows

WORD_BYTES = 8
"""Digests are made of whole words; rows that end within one are followed by zeros."""

DAMAGED_BIT = 0x40
_SIGN, _RANGE = 1 << 63, 1 << 64


Write = Callable[[Pages, Rows, Callable[[], bool]], bool]
"""As :meth:`~tpla.workers.transfer.protocol.PageSink.write`."""


def wire_bytes(nbytes: int) -> int:
    """Bytes on the wire of ``nbytes`` bytes of rows."""
    return (-(-nbytes // WORD_BYTES) + 1) * WORD_BYTES


def signed(word: int) -> int:
    """An unsigned 64-bit integer as torch shows the same bits."""
    return word - _RANGE if word >= _SIGN else word


class HostOutgoing:
    """Implements :class:`~tpla.workers.transfer.protocol.OutgoingStaging`."""

    ready: torch.cuda.Event | None = None

    def __init__(self, nbytes: int, read: Callable[[Pages], Rows]) -> None:
        self._word_W = torch.empty(wire_bytes(nbytes) // WORD_BYTES, dtype=torch.int64)
        self._read = read

    def pack(self, pages: Pages, seed: int) -> torch.Tensor:
        """As the protocol's; complete on return."""
        rows = self._read(pages)
        word_W = self._word_W[: wire_bytes(rows.nbytes) // WORD_BYTES]
        word_W[-2:] = 0
        word_W.view(torch.uint8)[: rows.nbytes] = torch.from_numpy(rows)
        word_W[-1] = row_digest(word_W[:-1]) + signed(seed)
        return word_W.view(torch.uint8)

    def damage(self) -> None:
        """As the protocol's."""
        self._word_W.view(torch.uint8)[0] ^= DAMAGED_BIT


class HostIncoming:
    """Implements :class:`~tpla.workers.transfer.protocol.IncomingStaging`."""

    def __init__(self, nbytes: int, write: Write) -> None:
        self._word_W = torch.empty(wire_bytes(nbytes) // WORD_BYTES, dtype=torch.int64)
        self._write = write
        self._intact = False

    def wire(self, nbytes: int) -> torch.Tensor:
        """As the protocol's."""
        return self._word_W.view(torch.uint8)[: wire_bytes(nbytes)]

    def store(self, pages: Pages, nbytes: int, seed: int) -> None:
        """As the protocol's; complete on return."""
        word_W = self.wire(nbytes).view(torch.int64)
        rows = self.wire(nbytes)[:nbytes].numpy()
        self._intact = self._write(
            pages, rows, lambda: bool(word_W[-1] == row_digest(word_W[:-1]) + signed(seed))
        )

    def stored(self) -> bool:
        """As the protocol's."""
        return True

    def intact(self) -> bool:
        """As the protocol's."""
        return self._intact
