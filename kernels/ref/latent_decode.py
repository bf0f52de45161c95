"""Torch reference of :mod:`tpla.kernels.latent_decode`: exact arithmetic on the stored values.

Shape suffixes: B requests, Q query tokens, H heads of this rank, L latent elements of this rank,
D RoPE dims, N block-table entries, S token slots, K cached tokens.
"""

from __future__ import annotations

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.ref.blockwise_attention import LOG2E, weigh_blocks
from tpla.kernels.ref.latent_attention import latent_attention
from tpla.kernels.ref.latent_rows import stored_values, unpack_rows


def latent_decode(
    q_latent_BQHL: torch.Tensor,
    q_rope_BQHD: torch.Tensor,
    q_scale_BQH: torch.Tensor | None,
    rows_SB: torch.Tensor,
    table_BN: torch.Tensor,
    length_B: torch.Tensor,
    layout: LatentLayout,
    page_size: int,
    softmax_scale: float,
    workspace: object,
    out_BQHL: torch.Tensor,
    lse_BQH: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Same arguments and results as the kernel's wrapper; ``workspace`` is not used."""
    queries = q_latent_BQHL.shape[1]
    for request, length in enumerate(length_B.tolist()):
        q_latent_QHL, q_rope_QHD = q_latent_BQHL[request].float(), q_rope_BQHD[request].float()
        if q_scale_BQH is not None:
            q_latent_QHL = q_latent_QHL * q_scale_BQH[request][..., None]
            q_rope_QHD = q_rope_QHD * q_scale_BQH[request][..., None]
        token_K = torch.arange(length, device=table_BN.device)
        slot_K = table_BN[request][token_K // page_size].long() * page_size + token_K % page_size
        latent_KL, rope_KD = unpack_rows(rows_SB[slot_K], layout)
        seeing = slice(max(queries - length, 0), queries)  # earlier queries stand before token 0
        out_BQHL[request] = 0
        lse_BQH[request] = float("-inf")
        out, lse = latent_attention(
            q_latent_QHL[seeing], q_rope_QHD[seeing], latent_KL, rope_KD, softmax_scale
        )
        out_BQHL[request, seeing] = out.to(out_BQHL.dtype)
        lse_BQH[request, seeing] = lse
    return out_BQHL, lse_BQH


def exact_decode(
    q_latent_BQHL: torch.Tensor,
    q_rope_BQHD: torch.Tensor,
    q_scale_BQH: torch.Tensor | None,
    rows_SB: torch.Tensor,
    table_BN: torch.Tensor,
    length_B: torch.Tensor,
    layout: LatentLayout,
    page_size: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same in float64, written down naively: what a kernel's error is measured against.

    Returns:
        out ``[B, Q, H, L]`` and lse ``[B, Q, H]``, float64.
    """
    queries = q_latent_BQHL.shape[1]
    out_BQHL = torch.zeros_like(q_latent_BQHL, dtype=torch.float64)
    lse_BQH = torch.full_like(out_BQHL[..., 0], float("-inf"))
    for request, length in enumerate(length_B.tolist()):
        token_K = torch.arange(length, device=table_BN.device)
        slot_K = table_BN[request][token_K // page_size].long() * page_size + token_K % page_size
        latent_KL, rope_KD = (part.double() for part in unpack_rows(rows_SB[slot_K], layout))
        for query in range(max(queries - length, 0), queries):
            seen = length - queries + query + 1
            logits_HK = q_latent_BQHL[request, query].double() @ latent_KL[:seen].T
            logits_HK += q_rope_BQHD[request, query].double() @ rope_KD[:seen].T
            if q_scale_BQH is not None:
                logits_HK *= q_scale_BQH[request, query].double()[:, None]
            logits_HK *= softmax_scale
            lse_BQH[request, query] = logits_HK.logsumexp(-1)
            out_BQHL[request, query] = logits_HK.softmax(-1) @ latent_KL[:seen]
    return out_BQHL, lse_BQH


def blockwise_decode(
    q_latent_QHL: torch.Tensor,
    q_rope_QHD: torch.Tensor,
    q_scale_QH: torch.Tensor,
    rows_KB: torch.Tensor,
    layout: LatentLayout,
    softmax_scale: float,
    weight_dtype: torch.dtype,
    weight_range: float,
) -> torch.Tensor:
    """The recursion of :mod:`tpla.kernels.hopper_decode` for one request, in float64.

    Only P' is rounded, block by block, as the kernel rounds it (SnapMLA, dynamic P quantisation).

    Args:
        q_latent_QHL: float8_e4m3fn queries, with ``q_rope_QHD`` divided by ``q_scale_QH``.
        rows_KB: the request's rows in order.
        weight_dtype: what P' is rounded to.
        weight_range: the largest P' that a block may reach.

    Returns:
        out ``[Q, H, L]``, float64.
    """
    values_KL, rope_KD, scale_K = (part.double() for part in stored_values(rows_KB, layout))
    queries = len(q_latent_QHL)
    logits_QHK = q_latent_QHL.double() @ values_KL.T + q_rope_QHD.double() @ rope_KD.T
    logits_QHK *= (softmax_scale * LOG2E) * q_scale_QH.double()[..., None] * scale_K
    position = torch.arange(len(rows_KB), device=rows_KB.device)
    last_Q = len(rows_KB) - queries + torch.arange(queries, device=rows_KB.device)
    hidden_QK = position[None] > last_Q[:, None]
    logits_QHK.masked_fill_(hidden_QK[:, None], float("-inf"))
    return weigh_blocks(logits_QHK, scale_K[None], values_KL, weight_dtype, weight_range)
