"""Staging memory on a GPU: what a chunk needs beside its rows lies behind them.

::

    prefill   rows | digest | pages           one upload of digest's first value and pages,
    decode    rows | digest | found | pages   one launch a layout of rows, one of the digest

Nothing here waits for the device but :meth:`CudaIncoming.intact`. All launches are made on a stream
of the transfer's own.

Shape suffixes: N pages, B bytes, W 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tpla.core.errors import ConfigError
from tpla.kernels.row_digest import add_row_digest
from tpla.workers.transfer.protocol import Pages
from tpla.workers.transfer.staging import DAMAGED_BIT, WORD_BYTES, signed, wire_bytes

Move = Callable[[torch.Tensor, torch.Tensor], None]
"""Begins to gather or scatter pages ``[N]`` to or from rows ``[bytes]``."""


class _CudaStaging:
    """Device words, and pinned ones that are copied behind a chunk's rows."""

    def __init__(
        self, nbytes: int, page_bytes: int, digests: int, move: Move, stream: torch.cuda.Stream
    ) -> None:
        if page_bytes % WORD_BYTES:
            raise ConfigError(
                f"a page of {page_bytes} bytes is not a whole number of {WORD_BYTES}-byte words; "
                "on GPUs choose an even --page-size"
            )
        pages = nbytes // page_bytes
        words = nbytes // WORD_BYTES + digests + pages
        self._word_W = torch.empty(words, dtype=torch.int64, device=stream.device)
        self._control_W = torch.empty(1 + pages, dtype=torch.int64, pin_memory=True)
        self._control = self._control_W.numpy()
        self._page_words = page_bytes // WORD_BYTES
        self._digests, self._move, self._stream = digests, move, stream
        self._moved = torch.cuda.Event()

    def _begin(self, pages: Pages, seed: int) -> torch.Tensor:
        """Upload and launch; returns the rows and their digests. On the staging's stream."""
        self._moved.synchronize()  # of a chunk before, whose upload may not have begun
        rows, count = len(pages) * self._page_words, len(pages)
        behind, first = rows + self._digests, rows + self._digests - 1
        self._control[0], self._control[1 : 1 + count] = signed(seed), pages
        control_W = self._word_W[first : behind + count]
        control_W.copy_(self._control_W[: 1 + count], non_blocking=True)
        row_W = self._word_W[:rows]
        self._move(self._word_W[behind : behind + count], row_W.view(torch.uint8))
        add_row_digest(row_W, self._word_W[first:behind])
        return self._word_W[:behind]


class CudaOutgoing(_CudaStaging):
    """Implements :class:`~tpla.workers.transfer.protocol.OutgoingStaging`."""

    def __init__(self, nbytes: int, page_bytes: int, move: Move, stream: torch.cuda.Stream) -> None:
        super().__init__(nbytes, page_bytes, 1, move, stream)
        self.ready: torch.cuda.Event | None = self._moved

    def pack(self, pages: Pages, seed: int) -> torch.Tensor:
        """As the protocol's."""
        with torch.cuda.stream(self._stream):
            word_W = self._begin(pages, seed)
            self._moved.record()
        return word_W.view(torch.uint8)

    def damage(self) -> None:
        """As the protocol's."""
        with torch.cuda.stream(self._stream):
            self._word_W.view(torch.uint8)[0] ^= DAMAGED_BIT
            self._moved.record()


class CudaIncoming(_CudaStaging):
    """Implements :class:`~tpla.workers.transfer.protocol.IncomingStaging`."""

    def __init__(self, nbytes: int, page_bytes: int, move: Move, stream: torch.cuda.Stream) -> None:
        super().__init__(nbytes, page_bytes, 2, move, stream)
        self._digest_2 = torch.empty(2, dtype=torch.int64, pin_memory=True)
        self._digest = self._digest_2.numpy()

    def wire(self, nbytes: int) -> torch.Tensor:
        """As the protocol's."""
        return self._word_W.view(torch.uint8)[: wire_bytes(nbytes)]

    def store(self, pages: Pages, nbytes: int, seed: int) -> None:
        """As the protocol's."""
        with torch.cuda.stream(self._stream):
            self._digest_2.copy_(self._begin(pages, seed)[-2:], non_blocking=True)
            self._moved.record()

    def stored(self) -> bool:
        """As the protocol's."""
        return self._moved.query()

    def intact(self) -> bool:
        """As the protocol's."""
        self._moved.synchronize()
        return bool(self._digest[0] == self._digest[1])
