"""The sweep over plans: what a row says is what its variant and its questions were."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints import make_checkpoint, write_text
from tpla.benchmarks import accuracy
from tpla.core.errors import ConfigError


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("accuracy")
    accuracy.main(
        calibration=write_text(folder / "calibration.txt", 600),
        text=write_text(folder / "text.txt", 300, seed=1),
        model=make_checkpoint(folder / "model"),
        plan=["2:0", "2:16"],
        variant=["pca:none", "pca:none:averaged", "pca:values:averaged"],
        context=96,
        questions=1,
        recall_questions=2,
        recall_distance=100,
        json_path=folder / "accuracy.json",
    )
    found: list[dict[str, Any]] = json.loads((folder / "accuracy.json").read_text())["rows"]
    return found


def test_a_row_names_its_variant(rows: list[dict[str, Any]]) -> None:
    named = [(row["core_dims"], row["alignment"], row["core_values"]) for row in rows]
    assert named == [
        (core_dims, alignment, core_values)
        for core_dims in (0, 16)
        for alignment, core_values in (
            ("none", "counted"),
            ("none", "averaged"),
            ("values", "averaged"),
        )
    ]


def test_sharing_the_cores_values_matters_where_there_is_a_core(
    rows: list[dict[str, Any]],
) -> None:
    no_core, no_core_averaged, _, core, core_averaged, _ = (row["kl"] for row in rows)
    assert no_core == no_core_averaged
    assert abs(core - core_averaged) > 0.01 * core


def test_questions_are_asked_in_their_numbers(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        assert (row["questions"], row["recall_questions"], row["recall_distance"]) == (1, 2, 100)
        assert row["recall"] in (0, 0.5, 1) and 0 <= row["tasks"] <= 1


def test_recall_questions_without_questions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="give --questions"):
        accuracy.Held(tmp_path / "text", 1024, 4096, recall_questions=400)
