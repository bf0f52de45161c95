"""A tpla.json that was edited, or is another model's, is refused by the name of the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tpla.core.checkpoint import Manifest
from tpla.core.errors import CheckpointError
from tpla.core.latent_layout import ModelPlan

LAYERS, HEADS, GROUPS, RANK = 2, 4, 2, 8
Where = tuple[str | int, ...]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    scales = [[[1.0, 2.0]] * HEADS] * LAYERS
    spectrum = [[1 / RANK] * RANK] * LAYERS
    plan = ModelPlan(RANK, GROUPS, (0, 4))
    Manifest(plan, "pca", "fit", scales, spectrum, "a" * 64, "b" * 64).save(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (("plan", "groups"), 4, r"logit_scales\[0\]\[0\] has 2 entries, the plan implies 4"),
        (("plan", "groups"), "2", "malformed"),
        (("plan", "groups"), 2.0, "whole numbers"),
        (("plan", "kv_lora_rank"), 16, r"spectrum\[0\] has 8 entries, the plan implies 16"),
        (("plan", "core_dims"), [0], "logit_scales has 2 entries, the others imply 1"),
        (("plan", "core_dims"), [0, 4, 0], "logit_scales has 2 entries, the others imply 3"),
        (("plan", "core_dims"), [0, "4"], "malformed"),
        (("plan",), None, "malformed"),
        (("logit_scales",), [], "logit_scales is not a list of lists"),
        (("logit_scales",), None, "logit_scales is not a list of lists"),
        (("logit_scales", 1), [[1.0, 1.0]], r"logit_scales\[1\] has 1 entries"),
        (("logit_scales", 1), 1.0, "logit_scales is not a list of lists"),
        (("logit_scales", 1), [1.0] * HEADS, r"logit_scales\[1\] is not a list of lists"),
        (("logit_scales", 1, 3), [1.0], r"logit_scales\[1\]\[3\] has 1 entries"),
        (("logit_scales", 1, 3, 0), float("nan"), r"logit_scales\[1\]\[3\] holds nan"),
        (("logit_scales", 1, 3, 0), "1.0", r"logit_scales\[1\]\[3\] holds '1\.0'"),
        (("logit_scales", 1, 3, 0), True, r"logit_scales\[1\]\[3\] holds True"),
        (("spectrum",), {}, "spectrum is not a list of lists"),
        (("spectrum",), [[1 / RANK] * RANK], "spectrum has 1 entries"),
        (("spectrum", 0, 0), float("inf"), r"spectrum\[0\] holds inf"),
        (("spectrum", 0, 0), None, r"spectrum\[0\] holds None"),
        (("method",), 1, "method=1 is not a text"),
        (("fingerprint",), None, "fingerprint=None is not a text"),
        (("alignment",), "key", "alignment='key' is none of none, values, keys"),
        (("calibration",), [], r"calibration=\[\] is not an object"),
        (("schema",), [2], "has schema"),
    ],
)
def test_a_field_that_cannot_be_is_named(
    folder: Path, where: Where, value: object, message: str
) -> None:
    _edit(folder, where, value)
    with pytest.raises(CheckpointError, match=f"{message}.*convert the model again"):
        Manifest.load(folder)


@pytest.mark.parametrize(
    ("where", "value"),
    [((), None), (("spectrum",), []), (("logit_scales", 0, 0, 0), 1), (("alignment",), "values")],
)
def test_what_can_be_is_read(folder: Path, where: Where, value: object) -> None:
    if where:
        _edit(folder, where, value)
    assert Manifest.load(folder).plan == ModelPlan(RANK, GROUPS, (0, 4))


def _edit(folder: Path, where: Where, value: object) -> None:
    document: Any = json.loads((folder / "tpla.json").read_text())
    inner = document
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    (folder / "tpla.json").write_text(json.dumps(document))
