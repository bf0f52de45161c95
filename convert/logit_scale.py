"""The factor mu of a slice's logits, for each head and latent group.

A decode rank sees, of the logit's part that comes from the non-core latent dims, only its slice:
t = sum_j s_j is replaced by mu_j s_j. Three ways to choose mu:

``one``
    mu = 1. Right when the slices that a rank lacks carry little (PCA).
``energy``
    mu = E[t^2] / E[s_j^2], which restores the lost energy as the paper's equation 25 does; about
    the number of groups when the slices are alike (identity, Hadamard), far too large for the weak
    slices of PCA. With calibration text, E is the mean over sampled queries and all their keys.
    Without, E[s_S^2] = sum_n w_n,S Sigma_SS w_n,S^T over the rows w of W_UK, which takes queries to
    be isotropic; Sigma is then itself estimated from W_DKV, see :func:`weight_covariance`.
``fit``
    Weighted least squares on the calibration text. To second order, KL(softmax(l) || softmax(l'))
    is half the variance of l - l' under softmax(l); so for each query the error t - mu s is centred
    and weighted by the exact attention probabilities p:
    mu = sum_q Cov_p(s, t) / sum_q Var_p(s). On that text its error is at most that of mu = 1.

Shape suffixes: T tokens, Q sampled queries, K keys, H heads, G groups, N nope dims, R latent dims.
"""

from __future__ import annotations

from enum import Enum

import torch

from tpla.convert.sliced_attention import Projected, mask_future, query_blocks
from tpla.core.latent_layout import ShardPlan

QUERIES_PER_SEQUENCE = 256
"""Queries, evenly spaced over a sequence, that statistics are taken from."""


class LogitScale(str, Enum):
    """How logit scales are chosen."""

    FIT = "fit"
    ONE = "one"
    ENERGY = "energy"


class LogitStatistics:
    """Sums over the calibration text of one layer, float64, ``[H, G]`` each.

    Attributes:
        cross: sum over queries of Cov_p(s_j, t).
        square: sum over queries of Var_p(s_j).
        target: sum over queries of Var_p(t), the same for every group.
        slice_energy: sum of s_j^2.
        whole_energy: sum of t^2, the same for every group.
    """

    def __init__(self, heads: int, plan: ShardPlan, device: torch.device) -> None:
        self.plan = plan
        shape = (heads, plan.groups)
        zeros = torch.zeros(shape, dtype=torch.float64, device=device)
        self.cross, self.square, self.target = zeros, zeros.clone(), zeros.clone()
        self.slice_energy, self.whole_energy = zeros.clone(), zeros.clone()

    def update(self, seen: Projected, w_uk_HNR: torch.Tensor, scaling: float) -> None:
        """Add one sequence, whose latents are in the rotated basis."""
        tokens = seen.latent_TR.shape[0]
        positions_Q = sampled_queries(tokens, w_uk_HNR.device)
        heads = w_uk_HNR.shape[0] * (self.plan.groups + 3)
        for block in query_blocks(heads, len(positions_Q), tokens):
            self._add(seen, w_uk_HNR, scaling, positions_Q[block])

    def _add(
        self, seen: Projected, w_uk_HNR: torch.Tensor, scaling: float, positions_Q: torch.Tensor
    ) -> None:
        query_HQR = seen.q_nope_HTN[:, positions_Q] @ w_uk_HNR
        slices = []
        for group in range(self.plan.groups):
            dims = slice(*self.plan.slice_bounds(group))
            slices.append((query_HQR[..., dims] @ seen.latent_TR[:, dims].T).float() * scaling)
        target = torch.stack(slices).sum(0)
        core = slice(0, self.plan.core_dims)
        rest = query_HQR[..., core] @ seen.latent_TR[:, core].T
        rest = rest + seen.q_rope_HTD[:, positions_Q] @ seen.rope_TD.T
        probs = mask_future(target + rest * scaling, positions_Q).softmax(-1)
        past_QK = torch.arange(target.shape[-1], device=probs.device) <= positions_Q[:, None]
        centred_target = target - (probs * target).sum(-1, keepdim=True)
        self.target += _sum(probs * centred_target**2)[:, None]
        self.whole_energy += _sum(target**2 * past_QK)[:, None]
        for group, logits in enumerate(slices):
            centred = logits - (probs * logits).sum(-1, keepdim=True)
            self.cross[:, group] += _sum(probs * centred * centred_target)
            self.square[:, group] += _sum(probs * centred**2)
            self.slice_energy[:, group] += _sum(logits**2 * past_QK)

    def fit(self) -> torch.Tensor:
        """Least-squares scales ``[H, G]``; 1 for a slice that is constant."""
        return _ratio(self.cross, self.square)

    def energy(self) -> torch.Tensor:
        """Energy-restoring scales ``[H, G]``; 1 for a slice that is zero."""
        return _ratio(self.whole_energy, self.slice_energy)

    def error(self, scales_HG: torch.Tensor) -> torch.Tensor:
        """Weighted squared error ``[H, G]`` that ``scales_HG`` leave; ``fit`` minimises it."""
        return self.target - 2 * scales_HG * self.cross + scales_HG**2 * self.square


def sampled_queries(tokens: int, device: torch.device) -> torch.Tensor:
    """Positions ``[Q]`` in a sequence of ``tokens`` whose queries statistics are taken from."""
    samples = min(tokens, QUERIES_PER_SEQUENCE)
    return torch.linspace(0, tokens - 1, samples, device=device).round().long()


def weight_covariance(
    down_RE: torch.Tensor, bias_R: torch.Tensor | None, norm_E: torch.Tensor
) -> torch.Tensor:
    """Estimate of the normalised latent's second moment without text, ``[R, R]`` with trace R.

    Takes the layer's input, after its RMSNorm of weight ``norm_E``, to be isotropic otherwise.
    """
    scaled = down_RE.double() * norm_E.double()
    covariance = scaled @ scaled.T
    if bias_R is not None:
        covariance = covariance + torch.outer(bias_R.double(), bias_R.double())
    return covariance * (covariance.shape[0] / covariance.trace())


def energy_from_weights(
    w_uk_HNR: torch.Tensor, covariance_RR: torch.Tensor, plan: ShardPlan
) -> torch.Tensor:
    """Energy-restoring scales ``[H, G]`` for isotropic queries, all in the rotated basis."""

    def energy(start: int, stop: int) -> torch.Tensor:
        part = w_uk_HNR[..., start:stop].double()
        return ((part @ covariance_RR[start:stop, start:stop]) * part).sum((1, 2))

    whole_H1 = energy(plan.core_dims, plan.kv_lora_rank)[:, None]
    slices_HG = torch.stack([energy(*plan.slice_bounds(g)) for g in range(plan.groups)], 1)
    return _ratio(whole_H1.expand_as(slices_HG), slices_HG)


def _sum(values_HQK: torch.Tensor) -> torch.Tensor:
    return values_HQK.sum((1, 2), dtype=torch.float64)


def _ratio(numerator: torch.Tensor, denominator: torch.Tensor) -> torch.Tensor:
    usable = denominator > torch.finfo(torch.float32).tiny
    return torch.where(usable, numerator / denominator.where(usable, 1.0), 1.0)
