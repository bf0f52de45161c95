"""Bases of the latent and the factors of its slices' logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.checkpoints import make_checkpoint, some_ids
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.layers import LayeredModel
from tpla.convert.logit_scale import (
    LogitStatistics,
    energy_from_weights,
    weight_covariance,
)
from tpla.convert.rotation import Method, hadamard_rotation, make_rotation, spectrum
from tpla.convert.sliced_attention import Projected, project, up_projections
from tpla.core.latent_layout import ShardPlan


@pytest.mark.parametrize("method", list(Method))
@pytest.mark.parametrize("rank", [1, 8, 48, 96, 128])
def test_a_rotation_is_orthogonal(method: Method, rank: int) -> None:
    covariance = _covariance(rank)
    rotation = make_rotation(method, rank, covariance, seed=3)
    assert rotation.dtype == torch.float64
    torch.testing.assert_close(
        rotation.T @ rotation, torch.eye(rank, dtype=torch.float64), rtol=0, atol=1e-12
    )


def test_pca_sorts_and_decorrelates() -> None:
    covariance = _covariance(32)
    rotation = make_rotation(Method.PCA, 32, covariance, seed=0)
    turned = rotation.T @ covariance @ rotation
    assert torch.all(turned.diag().diff() <= 0)
    torch.testing.assert_close(turned, turned.diag().diag(), rtol=0, atol=1e-10)
    shares = spectrum(covariance, rotation)
    torch.testing.assert_close(
        torch.tensor(shares, dtype=torch.float64), turned.diag() / turned.trace()
    )


def test_hadamard_spreads_energy_evenly() -> None:
    assert torch.allclose(hadamard_rotation(64, 0).abs(), torch.full((64, 64), 1 / 8).double())
    one_dim = torch.zeros(96, 96).double()
    one_dim[5, 5] = 1.0
    shares = spectrum(one_dim, hadamard_rotation(96, 1))
    assert max(shares) < 1 / 16, "2^5 x 3: Hadamard over 32 of 96"


def test_hadamard_depends_on_the_seed() -> None:
    assert torch.equal(hadamard_rotation(96, 1), hadamard_rotation(96, 1))
    assert not torch.equal(hadamard_rotation(96, 1), hadamard_rotation(96, 2))


def test_slices_that_are_alike_have_the_energy_scale_of_their_number() -> None:
    plan = ShardPlan(64, groups=4)
    statistics = LogitStatistics(2, plan, torch.device("cpu"))
    for _ in range(4):
        statistics.update(_random_sequence(64, nope=64), torch.eye(64).repeat(2, 1, 1), 0.1)
    torch.testing.assert_close(
        statistics.energy(), torch.full((2, 4), 4.0).double(), rtol=0.1, atol=0
    )


def test_energy_without_text_ignores_what_the_text_would_not_show() -> None:
    plan = ShardPlan(12, groups=2, core_dims=4)
    keys = torch.randn(3, 8, 12)
    covariance = torch.eye(12).double()
    alike = energy_from_weights(torch.ones(3, 8, 12), covariance, plan)
    torch.testing.assert_close(alike, torch.full((3, 2), 2.0).double())
    covariance[8:, 8:] = 0
    strong_and_absent = energy_from_weights(keys, covariance, plan)
    torch.testing.assert_close(strong_and_absent, torch.ones(3, 2).double())


def test_covariance_from_weights_has_the_latents_mean_square() -> None:
    down, norm = torch.randn(16, 64), torch.rand(64)
    covariance = weight_covariance(down, None, norm)
    assert covariance.trace() == pytest.approx(16)
    assert not torch.equal(covariance, weight_covariance(down, torch.randn(16), norm))


@pytest.mark.parametrize("core_dims", [0, 16])
def test_fit_is_never_worse_than_one(layer: Any, core_dims: int) -> None:
    plan = ShardPlan(64, groups=2, core_dims=core_dims)
    module, model, hidden = layer
    statistics = LogitStatistics(4, plan, torch.device("cpu"))
    w_uk, _ = up_projections(module.self_attn)
    for hidden_TE in hidden:
        seen = _seen(module, model, hidden_TE)
        statistics.update(seen, w_uk, module.self_attn.scaling)
    fitted = statistics.error(statistics.fit())
    for other in (torch.ones(4, 2), statistics.energy(), statistics.fit() * 1.01):
        assert torch.all(fitted <= statistics.error(other.double()) + 1e-9)
    assert torch.all(fitted >= -1e-9)


def test_statistics_are_those_of_the_definition(layer: Any) -> None:
    """Cov and Var under the exact attention, by the textbook for one head and query at a time."""
    module, model, hidden = layer
    plan = ShardPlan(64, groups=2, core_dims=16)
    attention = module.self_attn
    w_uk, _ = up_projections(attention)
    seen = _seen(module, model, hidden[0][:20])
    statistics = LogitStatistics(4, plan, torch.device("cpu"))
    statistics.update(seen, w_uk, attention.scaling)
    cross, square = torch.zeros(4, 2).double(), torch.zeros(4, 2).double()
    for head in range(4):
        for query in range(20):
            absorbed = (seen.q_nope_HTN[head, query] @ w_uk[head]) * attention.scaling
            latents = seen.latent_TR[: query + 1]
            rope = seen.rope_TD[: query + 1] @ seen.q_rope_HTD[head, query] * attention.scaling
            probs = (latents @ absorbed + rope).softmax(-1)
            whole = latents[:, 16:] @ absorbed[16:]
            for group in range(2):
                dims = slice(16 + 24 * group, 40 + 24 * group)
                part = latents[:, dims] @ absorbed[dims]
                mean = (probs * part).sum()
                cross[head, group] += (probs * part * whole).sum() - mean * (probs * whole).sum()
                square[head, group] += (probs * part**2).sum() - mean**2
    torch.testing.assert_close(statistics.cross, cross, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(statistics.square, square, rtol=1e-3, atol=1e-4)


def test_a_slice_that_is_constant_keeps_scale_one() -> None:
    plan = ShardPlan(8, groups=2)
    statistics = LogitStatistics(1, plan, torch.device("cpu"))
    seen = _random_sequence(8, heads=1)
    seen.latent_TR[:, 4:] = 0
    statistics.update(seen, torch.randn(1, 8, 8), 1.0)
    assert statistics.fit()[0, 1] == 1
    assert statistics.energy()[0, 1] == 1


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, LayeredModel, list[torch.Tensor]]:
    folder = make_checkpoint(tmp_path_factory.mktemp("layer") / "model")
    model = LayeredModel(Checkpoint(folder), torch.device("cpu"))
    return model.layer(0), model, model.embed(list(some_ids()))


@torch.no_grad()
def _seen(module: Any, model: LayeredModel, hidden_TE: torch.Tensor) -> Projected:
    rotary = model.rotary(hidden_TE.shape[0])
    return project(module.self_attn, module.input_layernorm(hidden_TE), rotary)


def _covariance(rank: int) -> torch.Tensor:
    samples = torch.randn(4 * rank, rank, dtype=torch.float64) * torch.linspace(3, 0.1, rank)
    return samples.T @ samples / len(samples)


def _random_sequence(rank: int, heads: int = 2, tokens: int = 256, nope: int = 8) -> Projected:
    return Projected(
        torch.randn(heads, tokens, nope),
        torch.zeros(heads, tokens, 4),
        torch.randn(tokens, rank),
        torch.zeros(tokens, 4),
    )
