"""Staging memory on a GPU: what a chunk needs beside its rows lies behind them.

::

    prefill   rows | digest | pages           one upload of digest's first value and pages,
    decode    rows | digest | found | pages   one launch a layout of rows, one of the digest

Nothing here waits for the device but :meth:`CudaIncoming.intact`. All launches are made on a stream
of the transfer's own, and prepared once for chunks of as many pages: the host must be done with a
chunk before the wire is. What they run is compiled when the memory is made, not for the first rows.

Shape suffixes: N pages, B bytes, W 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tpla.core.errors import ConfigError
from tpla.kernels.prepared_launch import PreparedLaunch
from tpla.kernels.row_digest import prepare_row_digest
from tpla.workers.transfer.protocol import Pages
from tpla.workers.transfer.staging import DAMAGED_BIT, WORD_BYTES, signed, wire_bytes

Prepare = Callable[[torch.Tensor, torch.Tensor], Sequence[PreparedLaunch]]
"""Launches that gather or scatter pages ``[N]``, int64, to or from rows ``[bytes]``."""

_PREPARED_SIZES = 64
"""Chunks of so many different sizes are prepared at a time; most of them are whole ones."""


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A number of pages in staging memory.

    Attributes:
        wire_W: rows and their digests on the device.
        control_W: on the device, the value that the last digest begins with, and the pages.
        pinned_W: the same in host memory, to be copied from there.
        pinned: that memory as the host writes it.
        launches: what moves the rows, and adds to the last digest.
    """

    wire_W: torch.Tensor
    control_W: torch.Tensor
    pinned_W: torch.Tensor
    pinned: npt.NDArray[np.int64]
    launches: tuple[PreparedLaunch, ...]


class _CudaStaging:
    """Device words, and pinned ones that are copied behind a chunk's rows."""

    def __init__(
        self,
        nbytes: int,
        page_bytes: int,
        digests: int,
        prepare: Prepare,
        stream: torch.cuda.Stream,
    ) -> None:
        if page_bytes % WORD_BYTES:
            raise ConfigError(
                f"a page of {page_bytes} bytes is not a whole number of {WORD_BYTES}-byte words; "
                "on GPUs choose an even --page-size"
            )
        pages = nbytes // page_bytes
        words = nbytes // WORD_BYTES + digests + pages
        with torch.cuda.stream(stream):  # else the memory may be in use by another stream's work
            self._word_W = torch.empty(words, dtype=torch.int64, device=stream.device)
        self._pinned_W = torch.empty(1 + pages, dtype=torch.int64, pin_memory=True)
        self._page_words = page_bytes // WORD_BYTES
        self._digests, self._prepare, self._stream = digests, prepare, stream
        self._moved = torch.cuda.Event()
        self._chunks: dict[int, _Chunk] = {}
        with torch.cuda.stream(stream):  # whose device the kernels are compiled for
            for launch in self._chunk(pages).launches:
                launch.compile()

    def _chunk(self, count: int) -> _Chunk:
        """Of ``count`` pages, prepared when the first one comes."""
        if count not in self._chunks:
            if len(self._chunks) == _PREPARED_SIZES:
                self._chunks.clear()
            self._chunks[count] = self._prepare_chunk(count)
        return self._chunks[count]

    def _prepare_chunk(self, count: int) -> _Chunk:
        rows = count * self._page_words
        behind = rows + self._digests
        first = behind - 1
        row_W, page_N = self._word_W[:rows], self._word_W[behind : behind + count]
        moves = self._prepare(page_N, row_W.view(torch.uint8))
        digest = prepare_row_digest(row_W, self._word_W[first:behind])
        pinned_W = self._pinned_W[: 1 + count]
        return _Chunk(
            wire_W=self._word_W[:behind],
            control_W=self._word_W[first : behind + count],
            pinned_W=pinned_W,
            pinned=pinned_W.numpy(),
            launches=(*moves, digest),
        )

    def _begin(self, pages: Pages, seed: int) -> torch.Tensor:
        """Upload and launch; returns the rows and their digests. On the staging's stream."""
        self._moved.synchronize()  # of a chunk before, whose upload may not have begun
        chunk = self._chunk(len(pages))
        chunk.pinned[0], chunk.pinned[1:] = signed(seed), pages
        chunk.control_W.copy_(chunk.pinned_W, non_blocking=True)
        for launch in chunk.launches:
            launch()
        return chunk.wire_W


class CudaOutgoing(_CudaStaging):
    """Implements :class:`~tpla.workers.transfer.protocol.OutgoingStaging`."""

    def __init__(
        self, nbytes: int, page_bytes: int, prepare: Prepare, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(nbytes, page_bytes, 1, prepare, stream)
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

    def __init__(
        self, nbytes: int, page_bytes: int, prepare: Prepare, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(nbytes, page_bytes, 2, prepare, stream)
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
