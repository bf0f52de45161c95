"""Torch reference of :mod:`tpla.kernels.latent_decode`: exact arithmetic on the stored values.

Shape suffixes: B requests, Q query tokens, H heads of this rank, L latent elements of this rank,
D RoPE dims, N block-table entries, S token slots, K cached tokens.
"""

from __future__ import annotations

import math

import torch

from tpla.core.latent_layout import LatentLayout
from tpla.kernels.ref.latent_attention import latent_attention
from tpla.kernels.ref.latent_rows import unpack_rows

_LOG2E = 1.4426950408889634


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
    block_tokens: int = 64,
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
    values_KL, rope_KD, scale_K = _stored_values(rows_KB, layout)
    queries, heads, width = q_latent_QHL.shape
    logits_QHK = q_latent_QHL.double() @ values_KL.T + q_rope_QHD.double() @ rope_KD.T
    logits_QHK *= (softmax_scale * _LOG2E) * q_scale_QH.double()[..., None] * scale_K
    position = torch.arange(len(rows_KB), device=rows_KB.device)
    last_Q = len(rows_KB) - queries + torch.arange(queries, device=rows_KB.device)
    hidden_QK = position[None] > last_Q[:, None]
    logits_QHK.masked_fill_(hidden_QK[:, None], float("-inf"))
    out_QHL = logits_QHK.new_zeros(queries, heads, width)
    total_QH = logits_QHK.new_zeros(queries, heads)
    top_QH = torch.full_like(total_QH, -1e30)
    ref_QH = top_QH.clone()
    for start in range(0, len(rows_KB), block_tokens):
        block = slice(start, start + block_tokens)
        sigma = max(float(scale_K[block].max()), 2.0**-50)
        block_QH = logits_QHK[..., block].amax(-1) + math.log2(sigma / weight_range)
        top_QH = torch.maximum(top_QH, block_QH)
        new_ref_QH = torch.maximum(block_QH, top_QH - 40.0)
        decay_QH = torch.exp2(ref_QH - new_ref_QH)
        p_QHK = torch.exp2(logits_QHK[..., block] - new_ref_QH[..., None])
        weight_QHK = (p_QHK * scale_K[block]).float().to(weight_dtype).double()
        total_QH = total_QH * decay_QH + p_QHK.sum(-1)
        out_QHL = out_QHL * decay_QH[..., None] + weight_QHK @ values_KL[block]
        ref_QH = new_ref_QH
    return out_QHL / torch.where(total_QH > 0, total_QH, 1.0)[..., None]


def _stored_values(
    rows_KB: torch.Tensor, layout: LatentLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 latents and RoPE keys as stored, not multiplied by the scale, and the scales; float64."""

    def field(start: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        return rows_KB[:, start : start + size].contiguous().view(dtype).double()

    latent_KL = field(0, layout.latent_bytes, torch.float8_e4m3fn)
    rope_KD = field(layout.rope_offset, layout.rope_bytes, torch.bfloat16)
    return latent_KL, rope_KD, field(layout.scale_offset, 4, torch.float32)[:, 0]
