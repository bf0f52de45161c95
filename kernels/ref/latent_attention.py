"""Attention over cached latents in torch: the reference of the decode kernels.

Shape suffixes: Q query tokens, K cached tokens, H heads of this rank, L latent elements of this
rank, D RoPE dims.

Source: TPLA, absorbed decoding of one shard,
``softmax(scale (Q_h c^T + q^PE k^PE^T)) c``; the projection by W_UV and the sum over shards
are the caller's.
"""

from __future__ import annotations

import torch

_QUERY_BLOCK = 256


def latent_attention(
    q_latent_QHL: torch.Tensor,
    q_rope_QHD: torch.Tensor,
    latent_KL: torch.Tensor,
    rope_KD: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from the last ``Q`` positions of one sequence to all of its ``K`` positions.

    Query ``i`` stands at position ``K - Q + i`` and sees positions up to its own, so ``Q = 1`` is
    decoding and ``Q > 1`` a (chunk of) prefill. Scores are accumulated in float32.

    Args:
        q_latent_QHL: queries absorbed into the latent (logit scales folded in).
        q_rope_QHD: RoPE parts of the queries.
        latent_KL: float32 latents, read as keys and as values.
        rope_KD: float32 RoPE keys.
        scale: softmax scale.

    Returns:
        out ``[Q, H, L]`` and lse ``[Q, H]`` (natural logarithm), both float32. For ``K = 0`` the
        output is zero and the lse minus infinity.
    """
    queries, heads, latent_width = q_latent_QHL.shape
    cached = latent_KL.shape[0]
    out_QHL = torch.zeros(queries, heads, latent_width, device=latent_KL.device)
    lse_QH = torch.full((queries, heads), float("-inf"), device=latent_KL.device)
    if cached == 0:
        return out_QHL, lse_QH
    key_position_K = torch.arange(cached, device=latent_KL.device)
    for start in range(0, queries, _QUERY_BLOCK):  # bounds the score matrix of a long prefill
        block = slice(start, min(start + _QUERY_BLOCK, queries))
        logits_QHK = torch.matmul(q_latent_QHL[block].float(), latent_KL.T)
        logits_QHK += torch.matmul(q_rope_QHD[block].float(), rope_KD.T)
        logits_QHK *= scale
        if queries > 1:
            position_Q = torch.arange(block.start, block.stop, device=latent_KL.device)
            hidden_QK = key_position_K[None] > (cached - queries + position_Q)[:, None]
            logits_QHK.masked_fill_(hidden_QK[:, None], float("-inf"))
        lse_QH[block] = logits_QHK.logsumexp(-1)
        out_QHL[block] = torch.matmul((logits_QHK - lse_QH[block][..., None]).exp_(), latent_KL)
    return out_QHL, lse_QH
