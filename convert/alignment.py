"""Decode-only alignment: value projections fitted to what sliced attention really reads.

On decode, group j reads f_j = softmax(l_j) [c_core, c_j] with logits l_j that lack the other
slices, so the sum over groups of f_j W_UV,j is not the exact output o = softmax(l) c W_UV. Prefill
stays exact and uses the checkpoint as it is; decode alone may use other W_UV,j. Per head, over
sampled queries of the calibration text, ridge regression towards the sliced projection W0::

    W = argmin sum_q |f W - o|^2 + lambda |W - W0|^2,      f = [f_0 ... f_g-1]

It learns how much to trust each slice, predicts what a slice reads badly from what another reads
well, and decides how the core's values, which every group reads, are shared. lambda is chosen head
by head on queries that the fit did not see; one of its choices is W0 itself.

Shape suffixes: H heads, Q sampled queries, N nope dims, R latent dims, W latent dims of one rank,
D latent dims of all ranks together (groups W), V value dims, L choices of lambda.
"""

from __future__ import annotations

from enum import Enum

import torch

from tpla.convert.logit_scale import sampled_queries
from tpla.convert.sliced_attention import (
    CoreValues,
    Projected,
    mask_future,
    query_blocks,
    rank_dims,
)
from tpla.core.checkpoint import KEYED, UNALIGNED
from tpla.core.latent_layout import ShardPlan

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Choices of lambda, as shares of the features' mean energy."""

_FOLDS = 4
"""Every fourth sampled query is held out while lambda is chosen."""


class Alignment(str, Enum):
    """Which decode weights are fitted; keys are learned together with a learned basis."""

    NONE = UNALIGNED
    VALUES = "values"
    KEYS_AND_VALUES = KEYED


def sliced_keys(w_uk_HNR: torch.Tensor, plan: ShardPlan, scales_HG: torch.Tensor) -> torch.Tensor:
    """Every group's slice of W_UK with its logit scales, ``[G, H, N, W]``; no scale on the core."""
    scales_HG = scales_HG.to(w_uk_HNR)
    parts = []
    for group in range(plan.groups):
        part = w_uk_HNR[..., rank_dims(plan, group).to(w_uk_HNR.device)]
        part[..., plan.core_dims :] *= scales_HG[:, group, None, None]
        parts.append(part)
    return torch.stack(parts)


def sliced_values(
    w_uv_HVR: torch.Tensor, plan: ShardPlan, core_values: CoreValues = CoreValues.COUNTED
) -> torch.Tensor:
    """W0: every group's slice of W_UV, ``[H, D, V]``, with its share of the core's values."""
    parts = []
    for group in range(plan.groups):
        part = w_uv_HVR[..., rank_dims(plan, group)].transpose(1, 2).clone()
        part[:, : plan.core_dims] *= core_values.share(plan.groups, group)
        parts.append(part)
    return torch.cat(parts, 1)


class ValueStatistics:
    """Sums over the calibration text of one layer, float64, for the fit and for its check."""

    def __init__(self, heads: int, value_dims: int, plan: ShardPlan, device: torch.device) -> None:
        self.plan = plan
        dims = plan.groups * plan.latent_width
        gram_HDD = torch.zeros(heads, dims, dims, dtype=torch.float64, device=device)
        cross_HDV = torch.zeros(heads, dims, value_dims, dtype=torch.float64, device=device)
        self._gram = [gram_HDD, gram_HDD.clone()]
        self._cross = [cross_HDV, cross_HDV.clone()]

    def update(
        self,
        seen: Projected,
        w_uk_HNR: torch.Tensor,
        w_uv_HVR: torch.Tensor,
        keys_GHNW: torch.Tensor,
        scaling: float,
    ) -> None:
        """Add one sequence, whose latents are in the rotated basis, read with decode's keys."""
        tokens = seen.latent_TR.shape[0]
        positions = sampled_queries(tokens, w_uk_HNR.device)
        held_out = torch.arange(len(positions), device=positions.device) % _FOLDS == _FOLDS - 1
        for fold, chosen in enumerate((positions[~held_out], positions[held_out])):
            for block in query_blocks(w_uk_HNR.shape[0] * 3, len(chosen), tokens):
                features_HQD, output_HQV = self._read(
                    seen, w_uk_HNR, w_uv_HVR, keys_GHNW, scaling, chosen[block]
                )
                self._gram[fold] += features_HQD.transpose(1, 2) @ features_HQD
                self._cross[fold] += features_HQD.transpose(1, 2) @ output_HQV

    def solve(self, start_HDV: torch.Tensor) -> torch.Tensor:
        """Fitted projections ``[H, D, V]`` float64, each head at the lambda that checks best."""
        start_HDV = start_HDV.double()
        tried = [start_HDV] + [_ridge(self._gram[0], self._cross[0], start_HDV, r) for r in RIDGES]
        errors_LH = torch.stack([self._held_out_error(choice) for choice in tried])
        gram, cross = self._gram[0] + self._gram[1], self._cross[0] + self._cross[1]
        best_H = errors_LH.argmin(0)
        fitted_HDV = start_HDV.clone()
        for number, ridge in enumerate(RIDGES, start=1):
            mine_H = best_H == number
            if mine_H.any():
                fitted_HDV[mine_H] = _ridge(gram[mine_H], cross[mine_H], start_HDV[mine_H], ridge)
        return fitted_HDV

    def _read(
        self,
        seen: Projected,
        w_uk_HNR: torch.Tensor,
        w_uv_HVR: torch.Tensor,
        keys_GHNW: torch.Tensor,
        scaling: float,
        positions_Q: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What all groups read ``[H, Q, D]``, and the exact output ``[H, Q, V]``."""
        nope_HQN = seen.q_nope_HTN[:, positions_Q]
        rope_HQK = seen.q_rope_HTD[:, positions_Q] @ seen.rope_TD.T

        def read(query: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
            logits = (query @ latent.T + rope_HQK) * scaling
            return mask_future(logits.float(), positions_Q).softmax(-1).to(latent) @ latent

        parts = []
        for group in range(self.plan.groups):
            dims = rank_dims(self.plan, group).to(nope_HQN.device)
            parts.append(read(nope_HQN @ keys_GHNW[group], seen.latent_TR[:, dims]))
        output_HQV = read(nope_HQN @ w_uk_HNR, seen.latent_TR) @ w_uv_HVR.transpose(1, 2)
        return torch.cat(parts, -1).double(), output_HQV.double()

    def _held_out_error(self, values_HDV: torch.Tensor) -> torch.Tensor:
        """Squared error of each head on the held-out queries, less a constant: ``[H]``."""
        quadratic = (values_HDV * (self._gram[1] @ values_HDV)).sum((1, 2))
        return quadratic - 2 * (values_HDV * self._cross[1]).sum((1, 2))


def _ridge(
    gram_HDD: torch.Tensor, cross_HDV: torch.Tensor, start_HDV: torch.Tensor, ridge: float
) -> torch.Tensor:
    energy_H = gram_HDD.diagonal(dim1=1, dim2=2).mean(1).clamp_min(torch.finfo(torch.float32).tiny)
    pull_HDD = torch.diag_embed((ridge * energy_H)[:, None].expand(-1, gram_HDD.shape[1]))
    factor_HDD = torch.linalg.cholesky(gram_HDD + pull_HDD)
    return torch.cholesky_solve(cross_HDV + pull_HDD @ start_HDV, factor_HDD)
