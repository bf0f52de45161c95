"""``tpla eval detail``: ranges that add up to the whole, and errors where they were made."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoints import make_checkpoint, some_ids, write_text
from tpla.convert import eval_cli
from tpla.convert.checkpoint_io import Checkpoint
from tpla.convert.eval_detail import Detail, Range, attended_distance, evaluate_detail
from tpla.convert.evaluate import Subject, evaluate_specs
from tpla.convert.layers import LayeredModel
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.sliced_attention import Mode
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat

CONTEXT, PREFILL = 96, 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detail")
    source = make_checkpoint(folder / "source")
    text = write_text(folder / "text.txt", 600)
    options = ConversionOptions(core_dims=(0, 32), calibration=text, context=CONTEXT)
    convert_checkpoint(source, folder / "converted", options)
    return folder


@pytest.fixture(scope="module")
def detail(folder: Path) -> Detail:
    subject = Subject(folder / "converted")
    spec = subject.spec(Mode.TPLA, KVFormat.FP32, PREFILL)
    return evaluate_detail(subject, list(some_ids(3, CONTEXT)), spec)


@pytest.mark.parametrize("kind", ["by_position", "by_distance"])
def test_ranges_add_up_to_the_whole(folder: Path, detail: Detail, kind: str) -> None:
    subject = Subject(folder / "converted")
    spec = subject.spec(Mode.TPLA, KVFormat.FP32, PREFILL)
    (row,) = evaluate_specs(subject, list(some_ids(3, CONTEXT)), [spec], CONTEXT)
    ranges: list[Range] = getattr(detail, kind)
    assert sum(each.tokens for each in ranges) == row.tokens
    for name in ("kl", "top1"):
        total = sum(getattr(each, name) * each.tokens for each in ranges)
        assert total / row.tokens == pytest.approx(getattr(row, name), rel=1e-5)
    assert all(one.stop <= other.start for one, other in pairwise(ranges))


def test_positions_are_cut_from_the_first_that_is_scored(detail: Detail) -> None:
    assert len(detail.by_position) == 8
    assert (detail.by_position[0].start, detail.by_position[-1].stop) == (PREFILL, CONTEXT - 1)


def test_a_layer_with_a_wider_core_is_less_wrong(folder: Path, detail: Detail) -> None:
    convert_checkpoint(
        folder / "source",
        folder / "narrow",
        ConversionOptions(calibration=folder / "text.txt", context=CONTEXT),
    )
    subject = Subject(folder / "narrow")
    spec = subject.spec(Mode.TPLA, KVFormat.FP32, PREFILL)
    narrow = evaluate_detail(subject, list(some_ids(3, CONTEXT)), spec)
    assert detail.layer_errors[0] == pytest.approx(narrow.layer_errors[0], rel=1e-4)
    assert detail.layer_errors[1] < 0.8 * narrow.layer_errors[1]


def test_the_exact_model_departs_nowhere(folder: Path) -> None:
    subject = Subject(folder / "source")
    spec = subject.spec(Mode.MLA, KVFormat.FP32, PREFILL)
    exact = evaluate_detail(subject, list(some_ids(2, CONTEXT)), spec)
    assert max(exact.layer_errors) < 1e-8
    assert all(each.kl < 1e-6 and each.top1 == 1.0 for each in exact.by_distance)


def test_distance_is_that_of_the_definition(folder: Path) -> None:
    model = LayeredModel(Checkpoint(folder / "source"), torch.device("cpu"))
    layer: Any = model.layer(0)
    layer.self_attn.config._attn_implementation = "eager"  # the one that returns probabilities
    hidden = model.embed([some_ids(1, 20)[0]])[0]
    with torch.no_grad():
        found = attended_distance(model, layer, hidden)
        _, probs_BHQK = layer.self_attn(
            layer.input_layernorm(hidden)[None],
            position_embeddings=model.rotary(20),
            attention_mask=torch.full((1, 1, 20, 20), float("-inf")).triu(1),
        )
    expected = [
        sum(float(probs_BHQK[0, :, t, k].mean()) * (t - k) for k in range(t + 1)) for t in range(20)
    ]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_a_text_too_short_is_refused(folder: Path) -> None:
    subject = Subject(folder / "converted")
    spec = subject.spec(Mode.TPLA, KVFormat.FP8, 50)
    with pytest.raises(ConfigError, match="nothing to score"):
        evaluate_detail(subject, [some_ids(1, 30)[0]], spec)


def test_the_command_prints_and_writes_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder / "detail.json"
    arguments = ["detail", folder / "converted", "--text", folder / "text.txt", "--context", "100"]
    monkeypatch.setattr(sys, "argv", ["tpla eval", *map(str, arguments), "--json", str(out)])
    with pytest.raises(SystemExit) as stop:
        eval_cli.evaluate()
    assert not stop.value.code
    written = json.loads(out.read_text())
    assert written["by_position"][0]["start"] == 50
    printed = capsys.readouterr().out
    for each in written["by_distance"]:
        assert f"{each['kl']:.6f}" in printed
    assert f"{written['layer_errors'][1]:.6f}" in printed
