"""Prefill's and decode's pools as the transfer sees them: torch buffers, no SGLang.

Shape suffixes: Y layers of a run, N pages, T tokens, R elements of a cached row, L latent elements
of a rank, B bytes.

:func:`prefill_pages` and :func:`decode_pages` choose by the pool's device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tpla.core.errors import ConfigError
from tpla.core.latent_layout import CacheLayout, LatentLayout
from tpla.kernels.ref.latent_rows import pack_rows
from tpla.workers.transfer.protocol import (
    IncomingStaging,
    OutgoingStaging,
    Pages,
    PageSink,
    PageSource,
    Rows,
)
from tpla.workers.transfer.staging import HostIncoming, HostOutgoing

# Received frames are read-only; torch warns about that once, but rows are only read here.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


def prefill_pages(pool: Any) -> PageSource:
    """SGLang's MLA pool, read in the layout of whichever decode rank asks.

    Raises:
        ConfigError: its elements are not those that attention computes with, but bytes of FP8.
    """
    dtype = pool.kv_buffer[0].dtype
    if not dtype.is_floating_point or dtype.itemsize == 1:
        raise ConfigError(
            f"prefill caches {dtype}, and decode's rows are made of exact latents; give prefill "
            "--kv-cache-dtype bf16 where the checkpoint asks for another"
        )
    if pool.kv_buffer[0].is_cuda:
        from tpla.workers.transfer.cuda_pool_access import CudaPrefillPages

        return CudaPrefillPages(pool)
    return PrefillPages(pool)


def decode_pages(pool: Any) -> PageSink:
    """The decode pool (``LatentKVPool``), written in its own layout."""
    if pool.kv_buffer[0].is_cuda:
        from tpla.workers.transfer.cuda_pool_access import CudaDecodePages

        return CudaDecodePages(pool)
    return DecodePages(pool)


def _by_page(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[slots, 1, elements]`` as ``[pages, page_size * elements]``: whole pages move."""
    return buffer.view(-1, page_size * buffer.shape[-1])


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """Bytes as 32-bit words, which every row is a multiple of: copied several times as fast."""
    return rows.view(torch.int32)


class PrefillPages:
    """Prefill's pool in host memory."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.num_layers: int = pool.layer_num
        self.page_size: int = pool.page_size
        self.device = torch.device("cpu")

    def read(self, pages: Pages, layout: CacheLayout) -> Rows:
        """Slice and quantise before sending: ``[bytes]``, run after run."""
        rows = np.empty(len(pages) * self.page_size * layout.token_bytes, dtype=np.uint8)
        self._pack(pages, layout, torch.from_numpy(rows))
        return rows

    def staging(self, layout: CacheLayout, nbytes: int) -> OutgoingStaging:
        """As the protocol's."""
        return HostOutgoing(nbytes, lambda pages: self.read(pages, layout))

    def _pack(self, pages: Pages, layout: CacheLayout, rows_B: torch.Tensor) -> None:
        tokens, index = len(pages) * self.page_size, torch.from_numpy(pages)
        for run, part in layout.parts(tokens):
            rows_YTB = rows_B[part].view(run.shape(tokens))
            for layer, rows_TB in zip(run.layers, rows_YTB, strict=True):
                self._pack_layer(layer, index, run.layout, rows_TB)

    def _pack_layer(
        self, layer: int, page_N: torch.Tensor, layout: LatentLayout, rows_TB: torch.Tensor
    ) -> None:
        width, core = self._pool.kv_lora_rank, layout.plan.core_dims
        start, stop = layout.plan.slice_bounds(layout.group)
        cached_NR = _by_page(self._pool.kv_buffer[layer], self.page_size).index_select(0, page_N)
        cached_TR = cached_NR.view(len(rows_TB), -1)
        latent_TL = cached_TR[:, start:stop]
        if core:
            latent_TL = torch.cat([cached_TR[:, :core], latent_TL], -1)
        rows_TB.copy_(pack_rows(latent_TL, cached_TR[:, width:], layout))


class DecodePages:
    """The decode pool in host memory."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.page_size: int = pool.page_size
        self.layout: CacheLayout = pool.layout
        self.device = torch.device("cpu")

    def follow(self, event: torch.cuda.Event) -> None:
        """As the protocol's: what the engine asks of host memory is done when the call returns."""

    def write(self, pages: Pages, rows: Rows, intact: Callable[[], bool]) -> bool:
        """As the protocol's."""
        if not intact():
            return False
        rows_B = torch.from_numpy(rows)
        tokens, index = len(pages) * self.page_size, torch.from_numpy(pages.astype(np.int64))
        for run, part in self.layout.parts(tokens):
            rows_YTB = rows_B[part].view(run.shape(tokens))
            for layer, rows_TB in zip(run.layers, rows_YTB, strict=True):
                target = _by_page(self._pool.kv_buffer[layer], self.page_size)
                source = rows_TB.view(len(pages), -1)
                _as_words(target).index_copy_(0, index, _as_words(source))
        return True

    def staging(self, nbytes: int) -> IncomingStaging:
        """As the protocol's."""
        return HostIncoming(nbytes, self.write)
