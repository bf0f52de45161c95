"""Prefill's and decode's pools as the transfer sees them: torch buffers, no SGLang."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.ref.latent_rows import pack_rows
from tpla.workers.transfer.protocol import Pages, Rows

# Received frames are read-only; torch warns about that once, but rows are only read here.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


def _by_page(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[slots, 1, elements]`` as ``[pages, page_size * elements]``: whole pages move."""
    return buffer.view(-1, page_size * buffer.shape[-1])


def _as_words(rows: torch.Tensor) -> torch.Tensor:
    """Bytes as 32-bit words, which every row is a multiple of: copied several times as fast."""
    return rows.view(torch.int32)


class PrefillPages:
    """SGLang's MLA pool, read in the layout of whichever decode rank asks."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.num_layers: int = pool.layer_num
        self.page_size: int = pool.page_size

    def read(self, pages: Pages, layout: LatentLayout) -> Rows:
        """Slice and quantise before sending: ``[layers, pages * page_size, row_bytes]``."""
        width, core = self._pool.kv_lora_rank, layout.plan.core_dims
        start, stop = layout.plan.slice_bounds(layout.group)
        tokens = len(pages) * self.page_size
        rows = np.empty((self.num_layers, tokens, layout.row_bytes), dtype=np.uint8)
        for layer, buffer in enumerate(self._pool.kv_buffer):
            index = torch.from_numpy(pages).to(buffer.device)
            cached_TR = _by_page(buffer, self.page_size).index_select(0, index).view(tokens, -1)
            latent_TL = cached_TR[:, start:stop]
            if core:
                latent_TL = torch.cat([cached_TR[:, :core], latent_TL], -1)
            rows[layer] = pack_rows(latent_TL, cached_TR[:, width:], layout).cpu().numpy()
        return rows


class DecodePages:
    """The decode pool (``LatentKVPool``), written in its own layout."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.num_layers: int = pool.layer_num
        self.page_size: int = pool.page_size
        self.layout: LatentLayout = pool.layout

    def write(self, pages: Pages, rows: Rows) -> None:
        """Store ``[layers, pages * page_size, row_bytes]`` rows at ``pages``."""
        for buffer, layer_rows in zip(self._pool.kv_buffer, rows, strict=True):
            index = torch.from_numpy(pages.astype(np.int64)).to(buffer.device)
            source = torch.from_numpy(layer_rows).view(len(pages), -1).to(buffer.device)
            _as_words(_by_page(buffer, self.page_size)).index_copy_(0, index, _as_words(source))
