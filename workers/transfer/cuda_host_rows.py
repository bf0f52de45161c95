"""Rows between a pool on a GPU and host memory, from where messages carry them.

Kernels read the pages from pinned host memory, and what moves a number of pages is prepared once: a
launch that is looked up anew takes the host longer than a chunk of rows takes to be moved.

Shape suffixes: N pages, B bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from tpla.kernels.prepared_launch import PreparedLaunch
from tpla.workers.transfer.cuda_staging import Prepare, of_size
from tpla.workers.transfer.protocol import Pages, Rows


class _Chunk:
    """Memory of one chunk on a device, as large as the largest that came, and its pages.

    Whoever uses it holds :attr:`lock`, and waits for the stream before it lets go.
    """

    def __init__(self, page_bytes: int, prepare: Prepare, stream: torch.cuda.Stream) -> None:
        self.lock = threading.Lock()
        self.stream = stream
        self.page_bytes = page_bytes
        self._prepare = prepare
        self._launches: dict[int, Sequence[PreparedLaunch]] = {}
        self._hold(1)

    def rows(self, nbytes: int) -> torch.Tensor:
        """The first ``[nbytes]`` of the memory."""
        return self._row_B[:nbytes]

    def take(self, pages: Pages) -> Sequence[PreparedLaunch]:
        """What moves the rows of these pages, with memory for them."""
        count = len(pages)
        if count > len(self._page_N):
            self._hold(count)
        self._page_N[:count] = torch.from_numpy(pages)
        return of_size(self._launches, count, self._launches_of)

    def _launches_of(self, count: int) -> Sequence[PreparedLaunch]:
        return self._prepare(self._page_N[:count], self.rows(count * self.page_bytes))

    def _hold(self, count: int) -> None:
        """Have memory for so many pages; what was prepared was for other memory."""
        self._launches.clear()
        with torch.cuda.stream(self.stream):  # else another stream may still use the memory
            self._row_B = torch.empty(
                count * self.page_bytes, dtype=torch.uint8, device=self.stream.device
            )
        self._page_N = torch.empty(count, dtype=torch.int64, pin_memory=True)


class CudaReader:
    """Gathers pages to host memory; from any thread."""

    def __init__(self, page_bytes: int, prepare: Prepare, stream: torch.cuda.Stream) -> None:
        self._chunk = _Chunk(page_bytes, prepare, stream)

    def read(self, pages: Pages) -> Rows:
        """Rows in pinned memory of torch's own cache, which gets it back with the array."""
        chunk = self._chunk
        nbytes = len(pages) * chunk.page_bytes
        host_B = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        with chunk.lock, torch.cuda.stream(chunk.stream):
            for launch in chunk.take(pages):
                launch()
            host_B.copy_(chunk.rows(nbytes), non_blocking=True)
            chunk.stream.synchronize()
        return host_B.numpy()


class CudaWriter:
    """Scatters rows of host memory to pages; from any thread."""

    def __init__(self, page_bytes: int, prepare: Prepare, stream: torch.cuda.Stream) -> None:
        self._chunk = _Chunk(page_bytes, prepare, stream)
        self._host_B = torch.empty(0, dtype=torch.uint8, pin_memory=True)
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="tpla-verify")

    def write(self, pages: Pages, rows: Rows, intact: Callable[[], bool]) -> bool:
        """As the protocol's; ``intact`` is asked while the rows are on their way to the device."""
        verdict = self._asking.submit(intact)
        chunk, nbytes = self._chunk, rows.nbytes
        with chunk.lock, torch.cuda.stream(chunk.stream):
            launches = chunk.take(pages)
            if nbytes > len(self._host_B):
                self._host_B = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            # Left to copy from memory that is not pinned, the driver is half as fast.
            self._host_B[:nbytes].copy_(torch.from_numpy(rows))
            chunk.rows(nbytes).copy_(self._host_B[:nbytes], non_blocking=True)
            if stored := verdict.result():
                for launch in launches:
                    launch()
            chunk.stream.synchronize()
        return stored
