"""Staging memory on a GPU, and a little pinned host memory that the GPU's kernels read and write.

::

    device    rows | digest
    prefill   place | pages     read: what the digest begins with, and where to gather
    decode    found | pages     written: the place that the digest was made for; where to scatter

Nothing here waits for the device but :meth:`CudaIncoming.intact`. A chunk is one launch a layout of
rows and one of the digest, on a stream of the transfer's own, and nothing is copied beside it: the
host must be done with a chunk before the wire is. Launches are prepared once for chunks of as many
pages. What they run is compiled when the memory is made, not for the first rows.

Shape suffixes: N pages, B bytes, W 64-bit words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from tpla.core.errors import ConfigError
from tpla.kernels.prepared_launch import PreparedLaunch
from tpla.kernels.row_digest import prepare_row_digest
from tpla.workers.transfer.protocol import Pages
from tpla.workers.transfer.staging import DAMAGED_BIT, WORD_BYTES, signed, wire_bytes

Prepare = Callable[[torch.Tensor, torch.Tensor], Sequence[PreparedLaunch]]
"""Launches that gather or scatter pages ``[N]``, wherever they lie, to or from rows ``[bytes]``."""

_PREPARED_SIZES = 64
"""Chunks of so many different sizes are prepared at a time; most of them are whole ones."""


T = TypeVar("T")


def of_size(prepared: dict[int, T], count: int, prepare: Callable[[int], T]) -> T:
    """What moves ``count`` pages, prepared when as many come for the first time."""
    if count not in prepared:
        if len(prepared) == _PREPARED_SIZES:
            prepared.clear()
        prepared[count] = prepare(count)
    return prepared[count]


@dataclass(frozen=True, eq=False)
class _Chunk:
    """A number of pages in staging memory.

    Attributes:
        wire_W: rows and their digest on the device.
        pages: the pages in host memory, as the host writes them.
        launches: what moves the rows, and makes or verifies the digest.
    """

    wire_W: torch.Tensor
    pages: npt.NDArray[np.int64]
    launches: tuple[PreparedLaunch, ...]


class _CudaStaging:
    """Memory of a chunk, and what is launched for it; ``verifies`` a digest or else makes one."""

    def __init__(
        self,
        nbytes: int,
        page_bytes: int,
        prepare: Prepare,
        stream: torch.cuda.Stream,
        verifies: bool,
    ) -> None:
        if page_bytes % WORD_BYTES:
            raise ConfigError(
                f"a page of {page_bytes} bytes is not a whole number of {WORD_BYTES}-byte words; "
                "on GPUs choose an even --page-size"
            )
        pages = nbytes // page_bytes
        with torch.cuda.stream(stream):  # else the memory may be in use by another stream's work
            self._word_W = torch.empty(
                wire_bytes(nbytes) // WORD_BYTES, dtype=torch.int64, device=stream.device
            )
            self._tally_2 = torch.zeros(2, dtype=torch.int64, device=stream.device)
        self._host_W = torch.empty(1 + pages, dtype=torch.int64, pin_memory=True)
        self._host = self._host_W.numpy()
        self._page_words = page_bytes // WORD_BYTES
        self._prepare, self._stream, self._verifies = prepare, stream, verifies
        self._moved = torch.cuda.Event()
        self._chunks: dict[int, _Chunk] = {}
        with torch.cuda.stream(stream):  # whose device the kernels are compiled for
            for launch in self._chunk(pages).launches:
                launch.compile()

    def _chunk(self, count: int) -> _Chunk:
        return of_size(self._chunks, count, self._prepare_chunk)

    def _prepare_chunk(self, count: int) -> _Chunk:
        rows = count * self._page_words
        row_W, digest_1 = self._word_W[:rows], self._word_W[rows : rows + 1]
        place_1, page_N = self._host_W[:1], self._host_W[1 : 1 + count]
        moves = self._prepare(page_N, row_W.view(torch.uint8))
        start_1, result_1 = (digest_1, place_1) if self._verifies else (place_1, digest_1)
        digest = prepare_row_digest(row_W, start_1, self._tally_2, result_1, self._verifies)
        return _Chunk(
            wire_W=self._word_W[: rows + 1],
            pages=self._host[1 : 1 + count],
            launches=(*moves, digest),
        )

    def _next(self, pages: Pages) -> _Chunk:
        """With ``pages`` in place, when the kernels of the chunk before have read theirs."""
        self._moved.synchronize()
        chunk = self._chunk(len(pages))
        chunk.pages[:] = pages
        return chunk

    def _launch(self, chunk: _Chunk) -> None:
        with torch.cuda.stream(self._stream):
            for launch in chunk.launches:
                launch()
            self._moved.record()


class CudaOutgoing(_CudaStaging):
    """Implements :class:`~tpla.workers.transfer.protocol.OutgoingStaging`."""

    def __init__(
        self, nbytes: int, page_bytes: int, prepare: Prepare, stream: torch.cuda.Stream
    ) -> None:
        super().__init__(nbytes, page_bytes, prepare, stream, verifies=False)
        self.ready: torch.cuda.Event | None = self._moved

    def pack(self, pages: Pages, seed: int) -> torch.Tensor:
        """As the protocol's."""
        chunk = self._next(pages)
        self._host[0] = signed(seed)
        self._launch(chunk)
        return chunk.wire_W.view(torch.uint8)

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
        super().__init__(nbytes, page_bytes, prepare, stream, verifies=True)
        self._place = 0

    def wire(self, nbytes: int) -> torch.Tensor:
        """As the protocol's."""
        return self._word_W.view(torch.uint8)[: wire_bytes(nbytes)]

    def store(self, pages: Pages, nbytes: int, seed: int) -> None:
        """As the protocol's."""
        chunk = self._next(pages)
        self._place = signed(seed)
        self._launch(chunk)

    def stored(self) -> bool:
        """As the protocol's."""
        return self._moved.query()

    def intact(self) -> bool:
        """As the protocol's."""
        self._moved.synchronize()
        return bool(self._host[0] == self._place)
