"""Torch reference of :mod:`tpla.kernels.scatter_pages`.

Shape suffixes: Y layers, N pages, T tokens (N page_size), B bytes of a row.
"""

from __future__ import annotations

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.ref.pointed_memory import page_slots, pointed_rows


def scatter_pages(
    staging_YTB: torch.Tensor,
    layer_pointer_Y: torch.Tensor,
    pages_N: torch.Tensor,
    page_size: int,
    layout: LatentLayout,
) -> None:
    """Same arguments and results as the kernel's wrapper."""
    if len(pages_N) == 0:
        return
    slot_T = page_slots(pages_N, page_size)
    pools = pointed_rows(layer_pointer_Y, int(slot_T.max()) + 1, layout.row_bytes)
    for pool_SB, rows_TB in zip(pools, staging_YTB, strict=True):
        pool_SB[slot_T] = rows_TB
