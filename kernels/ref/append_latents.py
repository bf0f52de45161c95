"""Torch reference of :mod:`tpla.kernels.append_latents`.

Shape suffixes: T tokens, C whole latent, D RoPE dims, P positions, S token slots, B bytes of a row.
"""

from __future__ import annotations

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.ref.latent_rows import pack_rows
from tpla.kernels.ref.rotary import rotate


def append_latents(
    latent_TC: torch.Tensor,
    rope_TD: torch.Tensor,
    gamma_C: torch.Tensor | None,
    eps: float,
    position_T: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    slot_T: torch.Tensor,
    layout: LatentLayout,
    rows_SB: torch.Tensor,
    interleaved: bool = True,
) -> None:
    """Same arguments and results as the kernel's wrapper."""
    normal_TC = rms_norm(latent_TC.float(), gamma_C, eps)
    rope = rotate(rope_TD, position_T, cos_sin_PD, interleaved)
    stored = slot_T >= 0
    rows_TB = pack_rows(rank_part(normal_TC, layout), rope, layout)
    rows_SB[slot_T[stored]] = rows_TB[stored]


def rms_norm(latent_TC: torch.Tensor, gamma_C: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Root-mean-square norm in the latent's own precision."""
    normal_TC = latent_TC * torch.rsqrt(latent_TC.square().mean(-1, keepdim=True) + eps)
    return normal_TC if gamma_C is None else normal_TC * gamma_C.to(latent_TC.dtype)


def rank_part(latent_TC: torch.Tensor, layout: LatentLayout) -> torch.Tensor:
    """The core and the rank's slice of whole latents."""
    start, stop = layout.plan.slice_bounds(layout.group)
    return torch.cat([latent_TC[..., : layout.plan.core_dims], latent_TC[..., start:stop]], -1)
