"""Second moments that a basis is chosen by: what each puts first, and that they are streamed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoints import LATENT, make_checkpoint, some_ids, write_text
from tpla.convert import sliced_attention
from tpla.convert.alignment import Alignment
from tpla.convert.calibrate import Recipe, basis_moment, latent_moments, rotate_layer
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.layers import LayeredModel
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.planning import Budget, survey
from tpla.convert.rotation import Method, pca_rotation
from tpla.convert.second_moments import AttentionMoments, LatentMoments, Readers
from tpla.convert.sliced_attention import Projected
from tpla.core.checkpoint import Manifest
from tpla.core.latent_layout import ModelPlan

RANK, HEADS, TOKENS, NOPE = 8, 2, 800, 24
PRINCIPAL = [Method.PCA, Method.CENTERED, Method.ATTENDED, Method.QUERIES]


def test_a_large_mean_comes_first_unless_the_moment_is_centered() -> None:
    latent_TR = torch.randn(TOKENS, RANK) * torch.linspace(1, 2, RANK)
    latent_TR[:, 0] = 9 + 0.1 * latent_TR[:, 0]
    moments = LatentMoments(RANK)
    moments.update(latent_TR)
    assert _order(moments.second())[0] == 0
    assert _order(moments.centered())[-1] == 0


def test_tokens_without_attention_do_not_count() -> None:
    # Half of the tokens, with all of their energy in dim 0, lie opposite to every query.
    latent_TR = torch.randn(TOKENS, RANK)
    latent_TR[::2] = 0
    latent_TR[::2, 0] = 8 * torch.randn(TOKENS // 2)
    marked_T1 = torch.ones(TOKENS, 1)
    marked_T1[::2] = -1
    seen = _seen(latent_TR)._replace(
        q_rope_HTD=torch.full((HEADS, TOKENS, 1), 20.0), rope_TD=marked_T1
    )
    read = AttentionMoments(_readers())
    # The first tokens have nothing but such a token to attend to.
    read.update(latent_TR[1:], _from(seen, 1))
    assert _order(_all(latent_TR))[0] == 0
    assert _order(read.attended())[0] != 0
    torch.testing.assert_close(
        read.attended()[0, 0], _covariance(latent_TR[1::2])[0, 0], rtol=0.3, atol=0
    )


def test_what_all_tokens_have_in_common_does_not_count_as_attended() -> None:
    latent_TR = torch.randn(TOKENS, RANK)
    latent_TR[:, 5] = 7.0
    read = AttentionMoments(_readers())
    read.update(latent_TR, _seen(latent_TR))
    assert _order(_all(latent_TR))[0] == 5
    assert _order(read.attended())[-1] == 5
    assert read.attended()[5, 5].abs() < 1e-4


def test_a_dim_that_nothing_reads_comes_last_by_queries() -> None:
    latent_TR = torch.randn(TOKENS, RANK)
    latent_TR[:, 2] *= 5
    readers = _readers(ignored_by_queries=[2], ignored_by_output=[2])
    read = AttentionMoments(readers)
    read.update(latent_TR, _seen(latent_TR))
    assert _order(_all(latent_TR))[0] == 2
    assert _order(read.attended())[0] == 2
    assert _order(read.queries())[-1] == 2


@pytest.mark.parametrize("reader", ["queries", "output"])
def test_queries_and_output_count_half_each(reader: str) -> None:
    half_read = "ignored_by_output" if reader == "queries" else "ignored_by_queries"
    ignored = {"ignored_by_queries": [2], "ignored_by_output": [2]}
    ignored[half_read] = [2, 4]
    latent_TR = torch.randn(TOKENS, RANK)
    readers = _readers(**ignored)
    # Larger weights everywhere must not make one reader count more than the other.
    read = AttentionMoments(readers._replace(output_RR=1e6 * readers.output_RR))
    read.update(latent_TR, _seen(latent_TR))
    energies_R = read.queries().diag()
    whole = energies_R[[0, 1, 3, 5, 6, 7]].mean()
    assert energies_R[2] < 1e-6 * whole
    assert 0.5 < energies_R[4] / whole < 0.9, "root 1/2 where one of the two readers looks away"


def test_sums_are_those_of_the_definition_whatever_the_sequences(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sliced_attention, "_LOGITS_AT_ONCE", 7 * 3 * HEADS * 40)
    readers = _readers()
    read, moments = AttentionMoments(readers), LatentMoments(RANK)
    wanted_RR, queries_RR, latents = torch.zeros(RANK, RANK).double(), 0.0, []
    for tokens in (40, 25):
        latent_TR = torch.randn(tokens, RANK) + 1
        seen = _seen(latent_TR)
        read.update(latent_TR, seen)
        moments.update(latent_TR)
        latents.append(latent_TR.double())
        for head in range(HEADS):
            for number in range(tokens):
                query_R = seen.q_nope_HTN[head, number] @ readers.w_uk_HNR[head]
                rope_K = seen.rope_TD @ seen.q_rope_HTD[head, number]
                logits_K = (latent_TR @ query_R + rope_K)[: number + 1] * readers.scaling
                wanted_RR += _covariance(latent_TR[: number + 1], logits_K.softmax(-1))
                queries_RR = queries_RR + torch.outer(query_R, query_R).double()
    wanted_RR /= HEADS * 65
    torch.testing.assert_close(read.attended(), wanted_RR, rtol=1e-4, atol=1e-5)
    sight_RR = sum(m / (m * wanted_RR).sum() / 2 for m in (queries_RR, readers.output_RR))
    values, vectors = torch.linalg.eigh(sight_RR)
    root_RR = vectors @ values.sqrt().sqrt().diag() @ vectors.T
    by_queries_RR = root_RR @ wanted_RR @ root_RR
    torch.testing.assert_close(read.queries(), by_queries_RR, rtol=1e-3, atol=1e-5)
    together = LatentMoments(RANK)
    together.update(torch.cat(latents))
    torch.testing.assert_close(moments.second(), together.second())
    torch.testing.assert_close(moments.centered(), _covariance(torch.cat(latents)))


@pytest.mark.parametrize("method", PRINCIPAL)
def test_a_layer_is_sorted_by_its_own_moment(source: Path, method: Method) -> None:
    """Measured anew in the rotated layer the moment is diagonal, and falls from dim to dim."""
    model = LayeredModel(Checkpoint(source), torch.device("cpu"))
    layer: Any = model.layer(0)
    hidden = model.embed(list(some_ids()))
    recipe = Recipe(ModelPlan(LATENT, 2, (0, 16)), method, LogitScale.ONE)
    with torch.no_grad():
        rotate_layer(model, layer, 0, hidden, recipe)
        own = {
            each: basis_moment(model, layer, hidden, each, latent_moments(layer, hidden))
            for each in PRINCIPAL
        }
    falling_R = own[method].diag()
    assert torch.all(falling_R.diff() <= 1e-5 * falling_R[0])
    torch.testing.assert_close(
        own[method], falling_R.diag(), rtol=0, atol=1e-4 * float(falling_R[0])
    )
    for other in set(PRINCIPAL) - {method}:
        lying_RR = own[other] - own[other].diag().diag()
        assert lying_RR.abs().max() > 1e-3 * own[other].diag().max(), "another order"


@pytest.mark.parametrize("method", PRINCIPAL[1:])
def test_cores_divided_by_layer_are_fitted_and_planned_in_the_basis(
    source: Path, tmp_path: Path, method: Method
) -> None:
    options = ConversionOptions(
        core_dims=(0, 16),
        method=method,
        calibration=write_text(tmp_path / "text.txt", 900),
        context=128,
        alignment=Alignment.VALUES,
    )
    convert_checkpoint(source, tmp_path / "out", options)
    manifest = Manifest.load(tmp_path / "out")
    assert (manifest.method, manifest.alignment) == (method.value, "values")
    assert manifest.plan.core_dims == (0, 16)
    assert torch.tensor(manifest.logit_scales).std() > 0, "fitted"
    principal = replace(options, method=Method.PCA)
    kls = [survey(source, each, Budget(max_kl=1.0))[0].kl for each in (options, principal)]
    assert kls[0] != kls[1], "a plan is measured in its own basis"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("moments") / "model")


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def _readers(
    ignored_by_queries: list[int] | None = None, ignored_by_output: list[int] | None = None
) -> Readers:
    w_uk_HNR = torch.randn(HEADS, NOPE, RANK) * 0.1
    w_uk_HNR[..., ignored_by_queries or []] = 0
    w_ER = torch.randn(64, RANK).double()
    w_ER[:, ignored_by_output or []] = 0
    return Readers(w_uk_HNR, w_ER.T @ w_ER, 0.5)


def _seen(latent_TR: torch.Tensor) -> Projected:
    tokens = latent_TR.shape[0]
    return Projected(
        torch.randn(HEADS, tokens, NOPE),
        torch.randn(HEADS, tokens, 1),
        latent_TR,
        torch.randn(tokens, 1),
    )


def _from(seen: Projected, first: int) -> Projected:
    return Projected(
        seen.q_nope_HTN[:, first:],
        seen.q_rope_HTD[:, first:],
        seen.latent_TR[first:],
        seen.rope_TD[first:],
    )


def _all(latent_TR: torch.Tensor) -> torch.Tensor:
    moments = LatentMoments(RANK)
    moments.update(latent_TR)
    return moments.second()


def _covariance(latent_TR: torch.Tensor, weight_T: torch.Tensor | None = None) -> torch.Tensor:
    correction = {"correction": 0, "aweights": None if weight_T is None else weight_T.double()}
    covariance_RR: torch.Tensor = torch.cov(latent_TR.double().T, **correction)
    return covariance_RR


def _order(moment_RR: torch.Tensor) -> list[int]:
    """The dim that each direction of the basis lies along most, first direction first."""
    order: list[int] = pca_rotation(moment_RR).abs().argmax(0).tolist()
    return order
