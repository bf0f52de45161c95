"""Pools on a GPU: kernels on a stream of the transfer's own, so that the engine's never waits.

What SGLang wrote to the pages that are read is complete: the host has seen the results that were
computed with them, or the sender's pusher has waited for SGLang's event. What is stored here
follows what the engine had begun when it gave the pages away, and is complete before the engine is
told. Layers whose rows are alike take one launch together.

Shape suffixes: Y layers of a run, N pages, T tokens, B bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpla.core.latent_layout import CacheLayout
from tpla.kernels.gather_pages import prepare_gather_pages
from tpla.kernels.prepared_launch import PreparedLaunch
from tpla.kernels.scatter_pages import prepare_scatter_pages
from tpla.workers.transfer.cuda_host_rows import CudaReader, CudaWriter
from tpla.workers.transfer.cuda_staging import CudaIncoming, CudaOutgoing, Prepare
from tpla.workers.transfer.protocol import IncomingStaging, OutgoingStaging, Pages, Rows


class CudaPrefillPages:
    """SGLang's MLA pool on a GPU."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool  # kernels get addresses, which keep nothing alive
        self.num_layers: int = pool.layer_num
        self.page_size: int = pool.page_size
        self.device: torch.device = pool.kv_buffer[0].device
        self._dtype: torch.dtype = pool.kv_buffer[0].dtype
        self._stream = torch.cuda.Stream(self.device)
        self._lock = threading.Lock()
        self._pointers: dict[CacheLayout, list[torch.Tensor]] = {}
        self._readers: dict[CacheLayout, CudaReader] = {}

    def read(self, pages: Pages, layout: CacheLayout) -> Rows:
        """As the protocol's, in pinned host memory."""
        with self._lock:
            if layout not in self._readers:
                page_bytes = self.page_size * layout.token_bytes
                self._readers[layout] = CudaReader(page_bytes, self._preparer(layout), self._stream)
            reader = self._readers[layout]
        return reader.read(pages)

    def staging(self, layout: CacheLayout, nbytes: int) -> OutgoingStaging:
        """As the protocol's."""
        page_bytes = self.page_size * layout.token_bytes
        return CudaOutgoing(nbytes, page_bytes, self._preparer(layout), self._stream)

    def _preparer(self, layout: CacheLayout) -> Prepare:
        """Of launches that gather pages into rows of ``layout``."""
        if layout not in self._pointers:
            self._pointers[layout] = _run_pointers(self._pool.kv_buffer, layout, self._stream)
        pointers = self._pointers[layout]

        def prepare(page_N: torch.Tensor, rows_B: torch.Tensor) -> list[PreparedLaunch]:
            tokens, size = len(page_N) * self.page_size, self.page_size
            return [
                prepare_gather_pages(
                    *(pointer_Y, self._dtype, page_N, size, run.layout),
                    rows_B[part].view(run.shape(tokens)),
                )
                for pointer_Y, (run, part) in zip(pointers, layout.parts(tokens), strict=True)
            ]

        return prepare


class CudaDecodePages:
    """The decode pool on a GPU."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_size: int = pool.page_size
        self.layout: CacheLayout = pool.layout
        self.device: torch.device = pool.kv_buffer[0].device
        self._stream = torch.cuda.Stream(self.device)
        self._pointers = _run_pointers(pool.kv_buffer, self.layout, self._stream)
        self._page_bytes = self.page_size * self.layout.token_bytes
        self._writer = CudaWriter(self._page_bytes, self._prepare, self._stream)

    def follow(self, event: torch.cuda.Event) -> None:
        """As the protocol's."""
        self._stream.wait_event(event)

    def write(self, pages: Pages, rows: Rows, intact: Callable[[], bool]) -> bool:
        """As the protocol's."""
        return self._writer.write(pages, rows, intact)

    def staging(self, nbytes: int) -> IncomingStaging:
        """As the protocol's."""
        return CudaIncoming(nbytes, self._page_bytes, self._prepare, self._stream)

    def _prepare(self, page_N: torch.Tensor, rows_B: torch.Tensor) -> list[PreparedLaunch]:
        """Launches that scatter rows to pages."""
        tokens = len(page_N) * self.page_size
        parts = zip(self._pointers, self.layout.parts(tokens), strict=True)
        return [
            prepare_scatter_pages(
                *(rows_B[part].view(run.shape(tokens)), pointer_Y, page_N),
                *(self.page_size, run.layout),
            )
            for pointer_Y, (run, part) in parts
        ]


def _run_pointers(
    buffers: Sequence[torch.Tensor], layout: CacheLayout, stream: torch.cuda.Stream
) -> list[torch.Tensor]:
    """Addresses ``[Y]`` of the buffers of each run's layers, on their device."""
    with torch.cuda.stream(stream):
        return [
            torch.tensor(
                [buffers[layer].data_ptr() for layer in run.layers],
                dtype=torch.int64,
                device=stream.device,
            )
            for run in layout.runs
        ]
