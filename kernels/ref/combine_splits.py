"""Torch reference of :mod:`tpla.kernels.combine_splits`.

Shape suffixes: B requests, S slots, M query rows (query token, head), L latent elements.
"""

from __future__ import annotations

import math

import torch


def combine_splits(
    partial_SML: torch.Tensor,
    partial_lse_SM: torch.Tensor,
    split_B2: torch.Tensor,
    out_BML: torch.Tensor,
    lse_BM: torch.Tensor,
) -> None:
    """Same arguments and results as the kernel's wrapper."""
    for request, (first, last) in enumerate(split_B2.tolist()):
        if first == last:
            continue
        slots = [2 * first + 1, *(2 * part for part in range(first + 1, last + 1))]
        lse_SM = partial_lse_SM[slots].double() * math.log(2)
        total_M = torch.logsumexp(lse_SM, 0)
        weight_SM = (lse_SM - total_M).exp().nan_to_num(0.0)
        out_ML = (weight_SM[..., None] * partial_SML[slots].double()).sum(0)
        out_BML[request] = out_ML.to(out_BML.dtype)
        lse_BM[request] = total_M.float()
