"""Conversions whose layers hold cores of different size: what is written, served and evaluated."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.unit.checkpoints import LATENT, make_checkpoint, write_text
from tpla.convert.evaluate import Subject, evaluate_specs
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.report import read_rows
from tpla.convert.sliced_attention import Mode
from tpla.core.checkpoint import VALUES_TENSOR, Manifest, values_path
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import KVFormat, ModelPlan

CONTEXT, DIVIDED = 128, (0, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, converted with each core everywhere, and with one for each layer."""
    folder = tmp_path_factory.mktemp("layers")
    make_checkpoint(folder / "source")
    text = write_text(folder / "text.txt", 2000)
    options = ConversionOptions(calibration=text, context=CONTEXT, dtype=torch.float32)
    for name, core_dims in (("0", 0), ("32", 32), ("divided", DIVIDED)):
        convert_checkpoint(folder / "source", folder / name, replace(options, core_dims=core_dims))
    return folder


def test_each_layer_is_that_of_a_conversion_with_its_core_everywhere(folder: Path) -> None:
    divided = Manifest.load(folder / "divided")
    assert divided.plan == ModelPlan(LATENT, 2, DIVIDED)
    divided.check_values(folder / "divided")
    for layer, core_dims in enumerate(DIVIDED):
        alike = Manifest.load(folder / str(core_dims))
        assert divided.logit_scales[layer] == alike.logit_scales[layer]
        values, expected = (
            load_file(values_path(folder / name, layer))[VALUES_TENSOR]
            for name in ("divided", str(core_dims))
        )
        assert values.shape[2] == (LATENT - core_dims) // 2 + core_dims
        assert torch.equal(values, expected)
    assert divided.fingerprint == Manifest.load(folder / "0").fingerprint


def test_an_evaluation_decodes_each_layer_by_its_own_plan(folder: Path, tmp_path: Path) -> None:
    rows = {}
    for name in ("0", "32", "divided"):
        subject = Subject(folder / name)
        sequences = subject.sequences(folder / "text.txt", CONTEXT, 600, False)
        spec = subject.spec(Mode.TPLA, KVFormat.FP8, CONTEXT // 2)
        (rows[name],) = evaluate_specs(subject, sequences, [spec], CONTEXT)
    assert [rows[name].core_dims for name in rows] == [0, 32, [0, 32]]
    kl = {name: row.kl for name, row in rows.items()}
    assert max(kl["32"], kl["divided"]) < kl["0"]
    assert kl["32"] != kl["divided"]
    (tmp_path / "eval_x.json").write_text(json.dumps([asdict(row) for row in rows.values()]))
    assert read_rows(tmp_path / "eval_x.json") == list(rows.values())


def test_plans_of_earlier_releases_are_read_as_one_core_for_all_layers(
    folder: Path, tmp_path: Path
) -> None:
    document = json.loads((folder / "32" / "tpla.json").read_text())
    assert document["schema"] == 2 and document["plan"]["core_dims"] == [32, 32]
    document["schema"], document["plan"]["core_dims"] = 1, 32
    (tmp_path / "tpla.json").write_text(json.dumps(document))
    assert Manifest.load(tmp_path) == Manifest.load(folder / "32")
    document["schema"] = 3
    (tmp_path / "tpla.json").write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match="has schema 3, this release reads 1 and 2"):
        Manifest.load(tmp_path)


def test_one_number_too_few_is_refused(folder: Path, tmp_path: Path) -> None:
    options = ConversionOptions(calibration=folder / "text.txt", core_dims=(0, 0, 32))
    with pytest.raises(ConfigError, match="is for 3 layers, the model has 2"):
        convert_checkpoint(folder / "source", tmp_path / "out", options)
