"""Pools on a GPU: kernels on a stream of the transfer's own, so that the engine's never waits.

SGLang hands pages to the transfer when the host has seen the results that were computed with them,
so what it wrote is complete. What is stored here is complete on return, before the engine is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.gather_pages import gather_pages
from tpla.kernels.row_digest import row_digest
from tpla.kernels.scatter_pages import scatter_pages
from tpla.workers.transfer.pool_access import unsigned
from tpla.workers.transfer.protocol import Pages, Rows


class CudaPrefillPages:
    """SGLang's MLA pool on a GPU."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool  # kernels get addresses, which keep nothing alive
        self.num_layers: int = pool.layer_num
        self.page_size: int = pool.page_size
        self.device: torch.device = pool.kv_buffer[0].device
        self._dtype: torch.dtype = pool.kv_buffer[0].dtype
        self._stream = torch.cuda.Stream(self.device)
        self._pointer_Y = _pointers(pool.kv_buffer, self._stream)

    def read(self, pages: Pages, layout: LatentLayout) -> Rows:
        """Rows in pinned host memory, of torch's own cache, which gets it back with the array."""
        shape = (self.num_layers, len(pages) * self.page_size, layout.row_bytes)
        with torch.cuda.stream(self._stream):
            staging_YTB = torch.empty(shape, dtype=torch.uint8, device=self.device)
            self._gather(pages, layout, staging_YTB)
            rows_YTB = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
            rows_YTB.copy_(staging_YTB, non_blocking=True)
        self._stream.synchronize()
        return rows_YTB.numpy()

    def pack(self, pages: Pages, layout: LatentLayout, wire_B: torch.Tensor) -> Callable[[], int]:
        """Begin to write rows into a buffer of 64-bit words; what is returned waits for them."""
        tokens = len(pages) * self.page_size
        nbytes = self.num_layers * tokens * layout.row_bytes
        with torch.cuda.stream(self._stream):
            wire_B[nbytes:] = 0
            staging_YTB = wire_B[:nbytes].view(self.num_layers, tokens, layout.row_bytes)
            self._gather(pages, layout, staging_YTB)
            digest = torch.empty((), dtype=torch.int64, pin_memory=True)
            digest.copy_(row_digest(wire_B.view(torch.int64)), non_blocking=True)
            packed = self._stream.record_event()

        def settle() -> int:
            packed.synchronize()
            return unsigned(digest)

        return settle

    def _gather(self, pages: Pages, layout: LatentLayout, staging_YTB: torch.Tensor) -> None:
        page_N = _upload(pages, self.device)
        gather_pages(self._pointer_Y, self._dtype, page_N, self.page_size, layout, staging_YTB)


class CudaDecodePages:
    """The decode pool on a GPU."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.num_layers: int = pool.layer_num
        self.page_size: int = pool.page_size
        self.layout: LatentLayout = pool.layout
        self.device: torch.device = pool.kv_buffer[0].device
        self._stream = torch.cuda.Stream(self.device)
        self._pointer_Y = _pointers(pool.kv_buffer, self._stream)

    def write(self, pages: Pages, rows: Rows) -> None:
        """Store rows of host memory at ``pages``; complete on return."""
        with torch.cuda.stream(self._stream):
            self._scatter(pages, torch.from_numpy(rows).to(self.device))
        self._stream.synchronize()

    def store(self, pages: Pages, rows_YTB: torch.Tensor, wire_B: torch.Tensor) -> int:
        """Store rows of a buffer of 64-bit words at ``pages``; the digest waits for both."""
        with torch.cuda.stream(self._stream):
            self._scatter(pages, rows_YTB)
            return unsigned(row_digest(wire_B.view(torch.int64)))

    def _scatter(self, pages: Pages, rows_YTB: torch.Tensor) -> None:
        page_N = _upload(pages, self.device)
        scatter_pages(rows_YTB, self._pointer_Y, page_N, self.page_size, self.layout)


def _upload(pages: Pages, device: torch.device) -> torch.Tensor:
    """Pages on the device; from pageable memory this would wait for all that is under way."""
    return torch.from_numpy(pages).pin_memory().to(device, non_blocking=True)


def _pointers(buffers: Sequence[torch.Tensor], stream: torch.cuda.Stream) -> torch.Tensor:
    """Address of each layer's buffer, on its device."""
    with torch.cuda.stream(stream):
        return torch.tensor(
            [buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=stream.device
        )
