"""Second moments of the latent whose eigenvectors are a basis, summed over the calibration text.

All are of c, the latent after RMSNorm without the norm's weight, whose basis is what is chosen:

``pca``
    E[c c^T] over tokens. Not centred: the mean of the latent is part of what a logit is made of.
``centered``
    The same about the mean of c.
``attended``
    The covariance of c under the attention of a query, mean over queries and heads. Tokens count by
    the attention they receive, and what all that a query attends to have in common does not count.
    Both follow from what slicing loses: a rank that lacks the part e of its logits turns the exact
    probabilities p into p (1 + E_p[e] - e) to first order, so what it reads of its dims is wrong by
    Cov_p(c, e), in which a token without attention and a constant count nothing.
``queries``
    ``attended``, A, seen by what reads it: S^(1/4) A S^(1/4), where S is the second moment of
    the absorbed queries and that of W_O W_UV, each weighted so that it sees half of A's energy.
    S^(1/2) A S^(1/2) would order dims by the energy of logits and outputs alone; that the fourth
    root loses less is measured, not derived (convert/README.md).

Shape suffixes: T tokens, Q sampled queries, K keys, H heads, N nope dims, V value dims, R latent
dims, E hidden size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tpla.convert.logit_scale import sampled_queries
from tpla.convert.sliced_attention import Projected, mask_future, query_blocks, up_projections


class LatentMoments:
    """Sums over tokens of a layer's normalised latent, float64 on the CPU.

    Args:
        rank: R.
    """

    def __init__(self, rank: int) -> None:
        self._squares_RR = torch.zeros(rank, rank, dtype=torch.float64)
        self._sum_R = torch.zeros(rank, dtype=torch.float64)
        self._tokens = 0

    def update(self, latent_TR: torch.Tensor) -> None:
        """Add the latents of one sequence."""
        latent_TR = latent_TR.double()
        self._squares_RR += (latent_TR.T @ latent_TR).cpu()
        self._sum_R += latent_TR.sum(0).cpu()
        self._tokens += latent_TR.shape[0]

    def second(self) -> torch.Tensor:
        """E[c c^T], ``[R, R]``."""
        return self._squares_RR / self._tokens

    def centered(self) -> torch.Tensor:
        """The covariance of c, ``[R, R]``."""
        mean_R = self._sum_R / self._tokens
        return self.second() - torch.outer(mean_R, mean_R)


class Readers(NamedTuple):
    """What a layer's attention reads the normalised latent with, its norm's weight folded in.

    Attributes:
        w_uk_HNR: turns a head's query without RoPE into its absorbed query; float32.
        output_RR: sum over heads of W^T W, where W = W_O W_UV turns what a head reads into the
            layer's output; float64.
        scaling: of logits.
    """

    w_uk_HNR: torch.Tensor
    output_RR: torch.Tensor
    scaling: float

    @classmethod
    def of(cls, attention: Any) -> Readers:
        """Of a HuggingFace attention module."""
        gamma_R = attention.kv_a_layernorm.weight
        w_uk_HNR, w_uv_HVR = (part.float() * gamma_R for part in up_projections(attention))
        o_proj_EHV = attention.o_proj.weight.unflatten(1, w_uv_HVR.shape[:2]).double()
        output_RR = gamma_R.new_zeros(gamma_R.shape[0], gamma_R.shape[0], dtype=torch.float64)
        for head, w_uv_VR in enumerate(w_uv_HVR.double()):
            gram_VV = o_proj_EHV[:, head].T @ o_proj_EHV[:, head]
            output_RR += w_uv_VR.T @ gram_VV @ w_uv_VR
        return cls(w_uk_HNR, output_RR, attention.scaling)


class AttentionMoments:
    """Sums over sampled queries and heads of what attention reads, float64.

    Args:
        readers: of the layer.
    """

    def __init__(self, readers: Readers) -> None:
        self._readers = readers
        self._covariance_RR = torch.zeros_like(readers.output_RR)
        self._queries_RR = torch.zeros_like(readers.output_RR)
        self._samples = 0

    def update(self, latent_TR: torch.Tensor, seen: Projected) -> None:
        """Add one sequence.

        Args:
            latent_TR: its normalised latents, float32.
            seen: what attention reads of it.
        """
        # A covariance is the small difference of large sums: nothing narrower than float32.
        seen = Projected(*(part.float() for part in seen))
        tokens, heads = latent_TR.shape[0], seen.q_nope_HTN.shape[0]
        positions_Q = sampled_queries(tokens, latent_TR.device)
        for block in query_blocks(3 * heads, len(positions_Q), tokens):
            self._add(latent_TR, seen, positions_Q[block])
        self._samples += heads * len(positions_Q)

    def attended(self) -> torch.Tensor:
        """Mean covariance of c under a query's attention, ``[R, R]`` on the CPU."""
        return (self._covariance_RR / self._samples).cpu()

    def queries(self) -> torch.Tensor:
        """The same, seen by queries and by the output, half each; ``[R, R]`` on the CPU."""
        attended_RR = self.attended()
        sight_RR = torch.zeros_like(attended_RR)
        for part_RR in (self._queries_RR.cpu(), self._readers.output_RR.cpu()):
            energy = (part_RR * attended_RR).sum().clamp_min(torch.finfo(torch.float64).tiny)
            sight_RR += part_RR / (2 * energy)
        root_RR = _power(sight_RR, 0.25)
        return root_RR @ attended_RR @ root_RR

    def _add(self, latent_KR: torch.Tensor, seen: Projected, positions_Q: torch.Tensor) -> None:
        query_HQR = seen.q_nope_HTN[:, positions_Q] @ self._readers.w_uk_HNR
        logits = query_HQR @ latent_KR.T + seen.q_rope_HTD[:, positions_Q] @ seen.rope_TD.T
        logits = mask_future(logits * self._readers.scaling, positions_Q)
        probs_HQK = logits.softmax(-1).double()
        keys_KR = latent_KR.double()
        context_XR = (probs_HQK @ keys_KR).flatten(0, 1)
        received_K1 = probs_HQK.sum((0, 1))[:, None]
        self._covariance_RR += keys_KR.T @ (keys_KR * received_K1) - context_XR.T @ context_XR
        query_XR = query_HQR.flatten(0, 1).double()
        self._queries_RR += query_XR.T @ query_XR


def _power(matrix_RR: torch.Tensor, exponent: float) -> torch.Tensor:
    """A power of a symmetric matrix without negative eigenvalues but for rounding."""
    values_R, vectors_RR = torch.linalg.eigh(matrix_RR)
    return (vectors_RR * values_R.clamp_min(0) ** exponent) @ vectors_RR.T
