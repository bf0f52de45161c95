"""Torch reference of :mod:`tpla.kernels.fetch_latents`.

Shape suffixes: T tokens, L latent elements of this rank, D RoPE dims, S token slots, B bytes of a
row.
"""

from __future__ import annotations

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.ref.latent_rows import unpack_rows


def fetch_latents(
    rows_SB: torch.Tensor,
    slot_T: torch.Tensor,
    layout: LatentLayout,
    latent_TL: torch.Tensor,
    rope_TD: torch.Tensor,
) -> None:
    """Same arguments and results as the kernel's wrapper."""
    latent, rope = unpack_rows(rows_SB[slot_T], layout)
    latent_TL.copy_(latent)
    rope_TD.copy_(rope)
