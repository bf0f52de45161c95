"""Torch reference of :mod:`tpla.kernels.gather_pages`.

Shape suffixes: Y layers, N pages, T tokens (N page_size), B bytes of a row.
"""

from __future__ import annotations

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.ref.append_latents import rank_part
from tpla.kernels.ref.latent_rows import pack_rows
from tpla.kernels.ref.pointed_memory import page_slots, pointed_rows


def gather_pages(
    layer_pointer_Y: torch.Tensor,
    dtype: torch.dtype,
    pages_N: torch.Tensor,
    page_size: int,
    layout: LatentLayout,
    staging_YTB: torch.Tensor,
) -> None:
    """Same arguments and results as the kernel's wrapper."""
    if len(pages_N) == 0:
        return
    rank = layout.plan.kv_lora_rank
    row_bytes = (rank + layout.qk_rope_head_dim) * dtype.itemsize
    slot_T = page_slots(pages_N, page_size)
    pools = pointed_rows(layer_pointer_Y, int(slot_T.max()) + 1, row_bytes)
    for pool_SB, rows_TB in zip(pools, staging_YTB, strict=True):
        cached_TR = pool_SB[slot_T].view(dtype)
        latent_TL = rank_part(cached_TR[:, :rank], layout)
        rows_TB.copy_(pack_rows(latent_TL, cached_TR[:, rank:], layout))
