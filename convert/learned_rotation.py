"""A basis and decode's keys, learned from what sliced attention gets wrong.

PCA orders the latent's dims by energy. What a group loses depends on more: which dims queries ask
for, which keys compete, what the output projection passes on. So the principal basis is turned by
exp(S - S^T), orthogonal for every S, and S follows the gradient of the error of the attention
output, after o_proj, over its energy, at random queries of the calibration text, with Adam.

Each group's key projections are learned along: prefill needs W_UK turned and nothing else, but a
decode rank may make its queries with weights of its own, which then predict from the rank's slice
what the other slices would have added to a logit. Corrections of the value projections are learned
along, too, because the closed form that follows fits them anew; they are dropped. So are the keys,
and logit scales stand for them, if only the basis is asked for.

Shape suffixes: Q queries, K keys, H heads, G groups, N nope dims, R latent dims, W latent dims of
one rank, V value dims, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tpla.convert.alignment import sliced_keys, sliced_values
from tpla.convert.sliced_attention import Projected, mask_future, rank_dims
from tpla.core.latent_layout import ShardPlan

LEARNING_RATE = 0.005
"""Of the turn, the keys and the values, at the first step; it falls to zero linearly."""

SCALE_LEARNING_RATE = 0.015
QUERIES_PER_STEP = 64

STEPS_PER_READ = 4
"""Steps on one sequence, whose projections cost a large model more than a step does."""


class LayerWeights(NamedTuple):
    """What of a layer's weights the error depends on, latent in the principal basis."""

    w_uk_HNR: torch.Tensor
    w_uv_HVR: torch.Tensor
    o_proj_EB: torch.Tensor
    scaling: float


class Learned(NamedTuple):
    """What was learned.

    Attributes:
        turn_RR: turn of the principal basis, ``[R, R]`` float64, orthogonal.
        keys_GHNW: decode's key projections in the turned basis, logit scales included.
    """

    turn_RR: torch.Tensor
    keys_GHNW: torch.Tensor


class _Sample(NamedTuple):
    """Queries of one sequence, and what exact attention makes of them."""

    nope_HQN: torch.Tensor
    query_HQR: torch.Tensor
    rope_HQK: torch.Tensor
    latent_KR: torch.Tensor
    positions_Q: torch.Tensor
    exact_HQV: torch.Tensor


class _Sliced:
    """Sliced attention of one layer, with everything that is learned."""

    def __init__(self, weights: LayerWeights, plan: ShardPlan, with_keys: bool) -> None:
        self.weights, self.plan = weights, plan
        heads, value_dims, rank = weights.w_uv_HVR.shape
        nope = weights.w_uk_HNR.shape[1]
        like = weights.w_uv_HVR
        self.skew_RR = like.new_zeros(rank, rank).requires_grad_()
        self.scales_HG = like.new_ones(heads, plan.groups).requires_grad_()
        dims = plan.groups * plan.latent_width
        self.correction_HDV = like.new_zeros(heads, dims, value_dims).requires_grad_()
        shape = (plan.groups, heads, nope, plan.latent_width)
        self.key_correction_GHNW = like.new_zeros(shape).requires_grad_(with_keys)

    def turn(self) -> torch.Tensor:
        """The orthogonal matrix ``[R, R]``."""
        matrix: torch.Tensor = torch.matrix_exp(self.skew_RR - self.skew_RR.T)
        return matrix

    def learned(self) -> Learned:
        """What was learned so far."""
        skew_RR = self.skew_RR.detach().double()
        # Exponentiated again in float64: prefill is exact only as far as the turn is orthogonal.
        turn_RR: torch.Tensor = torch.matrix_exp(skew_RR - skew_RR.T)
        w_uk_HNR = self.weights.w_uk_HNR @ turn_RR.to(self.weights.w_uk_HNR)
        keys_GHNW = sliced_keys(w_uk_HNR, self.plan, self.scales_HG.detach())
        return Learned(turn_RR.cpu(), keys_GHNW + self.key_correction_GHNW.detach())

    def error(self, sample: _Sample) -> torch.Tensor:
        """Squared error of the layer's output over its energy."""
        wrong = self._project(self._output(sample) - sample.exact_HQV)
        return wrong.square().sum() / self._project(sample.exact_HQV).square().sum()

    def _output(self, sample: _Sample) -> torch.Tensor:
        turn_RR = self.turn()
        latent_KR, query_HQR = sample.latent_KR @ turn_RR, sample.query_HQR @ turn_RR
        features = [
            self._read(sample, latent_KR, query_HQR, group) for group in range(self.plan.groups)
        ]
        values_HDV = sliced_values(self.weights.w_uv_HVR @ turn_RR, self.plan)
        return torch.cat(features, -1) @ (values_HDV + self.correction_HDV)

    def _read(
        self, sample: _Sample, latent_KR: torch.Tensor, query_HQR: torch.Tensor, group: int
    ) -> torch.Tensor:
        """What one group reads, ``[H, Q, W]``."""
        core = self.plan.core_dims
        dims = rank_dims(self.plan, group).to(latent_KR.device)
        scale_H11 = self.scales_HG[:, group, None, None]
        query_HQW = torch.cat(
            [query_HQR[..., dims[:core]], query_HQR[..., dims[core:]] * scale_H11], -1
        )
        query_HQW = query_HQW + sample.nope_HQN @ self.key_correction_GHNW[group]
        latent_KW = latent_KR[:, dims]
        logits = (query_HQW @ latent_KW.T + sample.rope_HQK) * self.weights.scaling
        return mask_future(logits, sample.positions_Q).softmax(-1) @ latent_KW

    def _project(self, heads_HQV: torch.Tensor) -> torch.Tensor:
        return heads_HQV.transpose(0, 1).flatten(1) @ self.weights.o_proj_EB.T


def learn_slicing(
    weights: LayerWeights,
    plan: ShardPlan,
    sequences: int,
    read: Callable[[int], Projected],
    steps: int,
    seed: int,
    with_keys: bool = True,
) -> Learned:
    """A turn of the principal basis, and keys of decode in it, that make slicing lose less.

    Args:
        weights: of the layer, float32.
        plan: how decode divides the latent.
        sequences: of the calibration text.
        read: what the layer's attention reads of the i-th sequence.
        steps: of Adam, each on other queries of one sequence.
        seed: of the choice of queries.
        with_keys: whether keys are learned, or only scaled.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.enable_grad():
        sliced = _Sliced(weights, plan, with_keys)
        tuned = [sliced.skew_RR, sliced.correction_HDV, sliced.key_correction_GHNW]
        tuned = [parameter for parameter in tuned if parameter.requires_grad]
        rates: list[dict[str, Any]] = [
            {"params": tuned, "lr": LEARNING_RATE},
            {"params": [sliced.scales_HG], "lr": SCALE_LEARNING_RATE},
        ]
        optimizer = torch.optim.Adam(rates)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
        for step in range(steps):
            if step % STEPS_PER_READ == 0:
                with torch.no_grad():
                    seen = read(int(torch.randint(sequences, (1,), generator=generator)))
            sample = _draw(weights, seen, generator)
            optimizer.zero_grad()
            sliced.error(sample).backward()
            optimizer.step()
            schedule.step()
    return sliced.learned()


@torch.no_grad()
def _draw(weights: LayerWeights, seen: Projected, generator: torch.Generator) -> _Sample:
    """Random queries of a sequence, with exact attention's output for them."""
    latent_KR = seen.latent_TR.float()
    keys = latent_KR.shape[0]
    positions_Q = torch.randint(keys, (min(keys, QUERIES_PER_STEP),), generator=generator)
    positions_Q = positions_Q.to(latent_KR.device)
    nope_HQN = seen.q_nope_HTN[:, positions_Q].float()
    query_HQR = nope_HQN @ weights.w_uk_HNR
    rope_HQK = seen.q_rope_HTD[:, positions_Q].float() @ seen.rope_TD.float().T
    logits = mask_future((query_HQR @ latent_KR.T + rope_HQK) * weights.scaling, positions_Q)
    exact_HQV = logits.softmax(-1) @ latent_KR @ weights.w_uv_HVR.transpose(1, 2)
    return _Sample(nope_HQN, query_HQR, rope_HQK, latent_KR, positions_Q, exact_HQV)
