"""Attention over FP8 rows with P V as the Hopper kernels round it, in torch.

Shape suffixes: Q query tokens, K cached tokens, H heads of this rank, L latent elements of this
rank, D RoPE dims, B bytes of a row.

Source: SnapMLA, dynamic P quantisation; the recursion of :mod:`tpla.kernels.hopper_decode`.
"""

from __future__ import annotations

import math

import torch

from tpla.core.latent_layout import FP8_MAX, LatentLayout
from tpla.kernels.ref.latent_rows import stored_values

LOG2E = 1.4426950408889634
_BLOCK_TOKENS = 64
_QUERY_BLOCK = 256
_REF_FLOOR = 40.0
_REF_HEADROOM = 3.0
_REF_HOLD = 10.0
_SIGMA_FLOOR = 2.0**-50


def blockwise_attention(
    q_latent_QHL: torch.Tensor,
    q_rope_QHD: torch.Tensor,
    rows_KB: torch.Tensor,
    layout: LatentLayout,
    scale: float,
) -> torch.Tensor:
    """As :func:`tpla.kernels.ref.latent_attention.latent_attention`, with P V in FP8.

    Each query is a decode step of its own: of the tokens after it not even the scales are seen. Of
    the kernel's roundings there are only those of P; queries and sums are in float32.

    Args:
        q_latent_QHL: queries absorbed into the latent (logit scales folded in), not quantised.
        q_rope_QHD: RoPE parts of the queries.
        rows_KB: the sequence's FP8 rows in order, uint8.
        scale: softmax scale.

    Returns:
        out ``[Q, H, L]``, float32.
    """
    values_KL, rope_KD, scale_K = stored_values(rows_KB, layout)
    queries, cached = len(q_latent_QHL), len(rows_KB)
    out_QHL = values_KL.new_zeros(q_latent_QHL.shape)
    for start in range(0, queries, _QUERY_BLOCK):  # bounds the score matrix of a long text
        block = slice(start, min(start + _QUERY_BLOCK, queries))
        before = cached - queries + block.stop
        logits_QHK = q_latent_QHL[block].float() @ values_KL[:before].T
        logits_QHK += q_rope_QHD[block].float() @ rope_KD[:before].T
        logits_QHK *= scale * LOG2E * scale_K[:before]
        last_Q = cached - queries + torch.arange(block.start, block.stop, device=rows_KB.device)
        hidden_QK = torch.arange(before, device=rows_KB.device) > last_Q[:, None]
        out_QHL[block] = weigh_blocks(
            logits_QHK.masked_fill_(hidden_QK[:, None], float("-inf")),
            scale_K[:before].expand_as(hidden_QK).masked_fill(hidden_QK, 0.0),
            values_KL[:before],
            torch.float8_e4m3fn,
            FP8_MAX,
        )
    return out_QHL


def weigh_blocks(
    logits_QHK: torch.Tensor,
    scale_QK: torch.Tensor,
    values_KL: torch.Tensor,
    weight_dtype: torch.dtype,
    weight_range: float,
) -> torch.Tensor:
    """The recursion itself, in the dtype of the logits: only P' is rounded, block by block.

    References are held in FP8 alone: FP16 rounds alike wherever a reference lies.

    A kernel's parts begin it anew. That moves a weight's rounding where the floor of the reference
    holds, 2^-40 below the largest, and in FP8 where the reference is an earlier block's.

    Args:
        logits_QHK: to base two, minus infinity where a token is hidden.
        scale_QK: scales of the tokens; a first dim of one where all queries see the same.
        values_KL: latents as stored, without their scales.
        weight_dtype: what P' is rounded to.
        weight_range: the largest P' that a block may reach.

    Returns:
        out ``[Q, H, L]``.
    """
    out_QHL = logits_QHK.new_zeros(*logits_QHK.shape[:2], values_KL.shape[1])
    total_QH = torch.zeros_like(logits_QHK[..., 0])
    top_QH = torch.full_like(total_QH, -1e30)
    ref_QH = top_QH
    holds = weight_dtype == torch.float8_e4m3fn
    headroom = _REF_HEADROOM if holds else 0.0
    for start in range(0, len(values_KL), _BLOCK_TOKENS):
        block = slice(start, start + _BLOCK_TOKENS)
        logits, scale = logits_QHK[..., block], scale_QK[:, None, block]
        sigma_Q1 = scale.amax(-1).clamp_min(_SIGMA_FLOOR)
        level_QH = logits.amax(-1) + torch.log2(sigma_Q1) - math.log2(weight_range)
        top_QH = torch.maximum(top_QH, level_QH)
        new_ref_QH = torch.maximum(level_QH + headroom, top_QH - _REF_FLOOR)
        if holds:
            held_QH = (level_QH <= ref_QH) & (level_QH >= ref_QH - _REF_HOLD)
            new_ref_QH = torch.where(held_QH, ref_QH, new_ref_QH)
        decay_QH = torch.exp2(ref_QH - new_ref_QH)
        p_QHK = torch.exp2(logits - new_ref_QH[..., None])
        weight_QHK = (p_QHK * scale).float().to(weight_dtype).to(values_KL)
        total_QH = total_QH * decay_QH + p_QHK.sum(-1)
        out_QHL = out_QHL * decay_QH[..., None] + weight_QHK @ values_KL[block]
        ref_QH = new_ref_QH
    return out_QHL / torch.where(total_QH > 0, total_QH, 1.0)[..., None]
