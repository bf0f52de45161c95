"""The learned basis: orthogonal, better where energy misleads, and dropped where it is worse."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.checkpoints import LATENT, make_checkpoint, write_text
from tpla.convert import calibrate
from tpla.convert.alignment import sliced_keys
from tpla.convert.evaluate import Subject, evaluate_specs
from tpla.convert.learned_rotation import LayerWeights, Learned, learn_slicing
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.planning import Budget, survey
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import Mode, Projected
from tpla.core.checkpoint import KEYS_TENSOR, Manifest, values_path
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, ShardPlan

RANK, HEADS = 8, 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("learned")
    make_checkpoint(folder / "source", num_hidden_layers=1)
    write_text(folder / "text.txt", 900)
    return folder


@pytest.fixture(scope="module")
def options(folder: Path) -> ConversionOptions:
    return ConversionOptions(
        calibration=folder / "text.txt", context=128, core_dims=16, dtype=torch.float32
    )


def test_it_finds_the_dims_that_queries_ask_for() -> None:
    # Four dims have most of the energy, but queries ask for the other four, and for them alone. The
    # basis begins half-way between: exactly at the principal one the gradient vanishes.
    generator = torch.Generator().manual_seed(5)
    asked = torch.randn(HEADS, 6, RANK, generator=generator)
    asked[..., :4] = 0
    eye = torch.eye(4)
    mixed = torch.cat([torch.cat([eye, eye]), torch.cat([-eye, eye])], 1) / 2**0.5
    weights = LayerWeights(
        asked @ mixed,
        torch.randn(HEADS, 3, RANK, generator=generator),
        torch.randn(12, HEADS * 3, generator=generator),
        0.5,
    )
    sequences = [_sequence(generator, mixed) for _ in range(4)]
    plan = ShardPlan(RANK, 2, 4)
    learned = learn_slicing(weights, plan, 4, sequences.__getitem__, 300, seed=0, with_keys=False)
    turn = learned.turn_RR
    identity = torch.eye(RANK, dtype=torch.float64)
    torch.testing.assert_close(turn.T @ turn, identity, rtol=0, atol=1e-12)
    share_of_asked = (mixed.double() @ turn)[4:, :4].square().sum() / 4
    assert share_of_asked > 0.7, "half of the shared core makes logits at first, then most of it"


def test_the_same_seed_learns_the_same(
    folder: Path, options: ConversionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "NEGLIGIBLE_ERROR", -1.0)
    learned = replace(options, method=Method.LEARNED, learning_steps=5)
    prints = {
        convert_checkpoint(folder / "source", folder / f"seed{name}", learned).fingerprint
        for name in ("", "-again")
    }
    assert len(prints) == 1


def test_a_basis_that_loses_more_on_held_out_text_is_dropped(
    folder: Path, options: ConversionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interleave(weights: LayerWeights, plan: ShardPlan, *_: object) -> Learned:
        turn = torch.cat([torch.eye(LATENT)[:, ::2], torch.eye(LATENT)[:, 1::2]], 1)
        ones = torch.ones(weights.w_uk_HNR.shape[0], plan.groups)
        return Learned(turn.double(), sliced_keys(weights.w_uk_HNR @ turn, plan, ones))

    # Half of the latent repeats the other: PCA gives group 0 all of it, and nothing is lost.
    monkeypatch.setattr(calibrate, "NEGLIGIBLE_ERROR", -1.0)
    source = make_checkpoint(folder / "duplicated", num_hidden_layers=1, duplicated=True)
    monkeypatch.setattr(calibrate, "learn_slicing", interleave)
    principal = replace(options, core_dims=0)
    learned = replace(principal, method=Method.LEARNED)
    kept = convert_checkpoint(source, folder / "kept", learned)
    assert kept.fingerprint == convert_checkpoint(source, folder / "pca", principal).fingerprint
    assert Manifest.load(folder / "kept").method == "learned"


def test_it_needs_text_to_judge_by(
    folder: Path, tmp_path: Path, options: ConversionOptions
) -> None:
    short = replace(options, method=Method.LEARNED, max_tokens=300)
    with pytest.raises(ConfigError, match="3 calibration sequences hold none out"):
        convert_checkpoint(folder / "source", tmp_path / "out", short)
    with pytest.raises(ConfigError, match="learning_steps=0"):
        steps = replace(options, method=Method.LEARNED, learning_steps=0)
        convert_checkpoint(folder / "source", tmp_path / "out", steps)


def test_plans_are_compared_in_the_basis_that_learning_begins_at(
    folder: Path, options: ConversionOptions
) -> None:
    budget = Budget()
    learned = replace(options, method=Method.LEARNED)
    found = [survey(folder / "source", each, budget, measured=True) for each in (options, learned)]
    assert found[0] == found[1] and found[0][0].measure is not None


def test_learned_keys_are_kept_and_read(
    folder: Path, options: ConversionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "NEGLIGIBLE_ERROR", -1.0)
    learned = replace(options, method=Method.LEARNED, learning_steps=60)
    manifest = convert_checkpoint(folder / "source", folder / "keys", learned)
    assert (manifest.alignment, manifest.keyed) == ("keys+values", True)
    subject = Subject(folder / "keys")
    keys_GHNW = subject.fitted(0)[KEYS_TENSOR]
    heads, width = len(manifest.logit_scales[0]), manifest.plan.layer(0).latent_width
    assert keys_GHNW.shape == (2, heads, 32, width)
    spec = subject.spec(Mode.TPLA, KVFormat.FP32, 64)
    sequences = subject.sequences(folder / "text.txt", 128, 512, False)
    (with_keys,) = evaluate_specs(subject, sequences, [spec], 128)
    save_file(
        {**subject.fitted(0), KEYS_TENSOR: torch.zeros_like(keys_GHNW)},
        values_path(folder / "keys", 0),
    )
    (without,) = evaluate_specs(subject, sequences, [spec], 128)
    assert with_keys.alignment == "keys+values"
    assert with_keys.kl < 0.5 * without.kl


def test_a_layer_that_loses_nothing_is_not_searched(
    folder: Path, options: ConversionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> Learned:
        raise AssertionError("searched")

    source = make_checkpoint(folder / "nothing-lost", num_hidden_layers=1, duplicated=True)
    monkeypatch.setattr(calibrate, "learn_slicing", refuse)
    learned = replace(options, core_dims=0, method=Method.LEARNED)
    assert convert_checkpoint(source, folder / "not-searched", learned).keyed
    monkeypatch.setattr(calibrate, "NEGLIGIBLE_ERROR", -1.0)
    with pytest.raises(AssertionError, match="searched"):
        convert_checkpoint(source, folder / "searched", learned)


def _sequence(generator: torch.Generator, basis: torch.Tensor) -> Projected:
    energies = torch.tensor([3.0] * 4 + [1.0] * 4)
    return Projected(
        torch.randn(HEADS, 40, 6, generator=generator),
        torch.randn(HEADS, 40, 2, generator=generator),
        (torch.randn(40, RANK, generator=generator) * energies) @ basis,
        torch.randn(40, 2, generator=generator),
    )
