"""Torch reference of :mod:`tpla.kernels.prepare_queries`.

Shape suffixes: T query tokens, H heads of this rank, N nope dims, L latent elements of this rank,
D RoPE dims, P positions.
"""

from __future__ import annotations

import torch

from tpla.kernels.ref.latent_rows import quantize_latent
from tpla.kernels.ref.rotary import rotate


def prepare_queries(
    q_nope_THN: torch.Tensor,
    q_rope_THD: torch.Tensor,
    w_kc_HNL: torch.Tensor,
    position_T: torch.Tensor | None,
    cos_sin_PD: torch.Tensor | None,
    q_latent_THL: torch.Tensor,
    q_scale_TH: torch.Tensor | None,
    q_rope_out_THD: torch.Tensor,
    interleaved: bool = True,
) -> None:
    """Same arguments and results as the kernel's wrapper."""
    tokens, heads, width = q_latent_THL.shape
    absorbed_THL = torch.einsum("thn,hnl->thl", q_nope_THN.float(), w_kc_HNL.float())
    rope_THD = rotate(q_rope_THD, position_T, cos_sin_PD, interleaved)
    if q_scale_TH is None:
        q_latent_THL.copy_(absorbed_THL)
    else:
        values, scale = quantize_latent(absorbed_THL.reshape(tokens * heads, width))
        q_latent_THL.copy_(values.view_as(q_latent_THL))
        q_scale_TH.copy_(scale.view_as(q_scale_TH))
        rope_THD = rope_THD / q_scale_TH[..., None]
    q_rope_out_THD.copy_(rope_THD)
