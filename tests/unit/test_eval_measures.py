"""Perplexity, divergence and agreement of ways to decode."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.checkpoints import (
    LATENT,
    logits_of,
    make_checkpoint,
    quantize_checkpoint,
    some_ids,
    write_text,
)
from tpla.convert.evaluate import EvalRow, Subject, evaluate_specs, table_specs
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.rotation import Method
from tpla.convert.sliced_attention import DecodeSpec, Mode
from tpla.convert.text import load_tokenizer, read_sequences
from tpla.core.checkpoint import Manifest
from tpla.core.errors import CheckpointError, ConfigError
from tpla.core.latent_layout import KVFormat, ModelPlan

CONTEXT = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measures")
    write_text(folder / "text.txt", 4000)
    write_text(folder / "held_out.txt", 8 * CONTEXT, seed=1)
    source = make_checkpoint(folder / "source")
    for method in Method:
        convert_checkpoint(
            source,
            folder / method.value,
            ConversionOptions(
                method=method,
                calibration=folder / "text.txt",
                logit_scale=LogitScale.FIT,
                context=CONTEXT,
                learning_steps=20,
            ),
        )
    return folder


@pytest.fixture(scope="module", params=list(Method))
def rows(request: pytest.FixtureRequest, folder: Path) -> dict[tuple[str, int, str], EvalRow]:
    subject = Subject(folder / request.param.value)
    specs = table_specs(subject, CONTEXT)
    measured = evaluate_specs(subject, _held_out(folder), specs, CONTEXT)
    return {(row.name, row.prefill, row.kv_format): row for row in measured}


def test_mla_is_the_yardstick(rows: dict[Any, EvalRow]) -> None:
    for prefill in (0, 48):
        row = rows["mla", prefill, "fp32"]
        assert (row.kl, row.top1) == (0.0, 1.0)
        assert row.tokens == 8 * (CONTEXT - 48 - 1)


def test_slicing_loses_less_than_grouped_latents(rows: dict[Any, EvalRow]) -> None:
    for prefill in (0, 48):
        gla, tpla = rows["gla", prefill, "fp32"], rows["tpla", prefill, "fp32"]
        assert 0 < tpla.kl < gla.kl
        assert tpla.top1 >= gla.top1


def test_an_exact_prefill_helps(rows: dict[Any, EvalRow]) -> None:
    assert rows["gla", 48, "fp32"].kl < 0.95 * rows["gla", 0, "fp32"].kl


def test_fp8_costs_a_little(rows: dict[Any, EvalRow]) -> None:
    assert 0 < rows["mla", 0, "fp8"].kl < 0.02
    assert abs(rows["tpla", 0, "fp8"].kl - rows["tpla", 0, "fp32"].kl) < 0.02


@pytest.mark.parametrize("prefill", [0, 48])
def test_p_v_in_fp8_costs_a_little_more(rows: dict[Any, EvalRow], prefill: int) -> None:
    """A weight is rounded to a sixteenth at most, as an element of an FP8 row is."""
    for mode in ("mla", "tpla"):
        row, rounded = rows[mode, prefill, "fp8"], rows[f"{mode} pv-fp8", prefill, "fp8"]
        assert 0 < abs(rounded.kl - row.kl) < rows["mla", prefill, "fp8"].kl
        assert abs(rounded.top1 - row.top1) < 0.1
    assert rows["mla pv-fp8", prefill, "fp8"].kl > rows["mla", prefill, "fp8"].kl


def test_what_is_sliced_can_be_told_apart(rows: dict[Any, EvalRow]) -> None:
    for prefill in (0, 48):
        norm, both = rows["tpla norm", prefill, "fp32"], rows["tpla both", prefill, "fp32"]
        softmax = rows["tpla -align", prefill, "fp32"]
        assert 0 < norm.kl < both.kl
        assert softmax.kl < both.kl
        assert (norm.alignment, norm.sliced) == ("none", "norm")


def test_measured_bases_lose_less_than_others(folder: Path) -> None:
    kl = {}
    for method in Method:
        subject = Subject(folder / method.value)
        spec = subject.spec(Mode.TPLA, KVFormat.FP32, 0)
        (row,) = evaluate_specs(subject, _held_out(folder), [spec], CONTEXT)
        kl[method] = row.kl
    measured = max(kl[method] for method in Method if method.is_measured)
    assert measured < min(kl[method] for method in Method if not method.is_measured)


def test_figures_are_those_of_the_definition(folder: Path) -> None:
    subject = Subject(folder / "pca")
    ids = some_ids(3, CONTEXT)
    exact_spec = subject.spec(Mode.MLA, KVFormat.FP32, 20)
    coarse_spec = subject.spec(Mode.MLA, KVFormat.FP8, 20)
    exact, coarse = evaluate_specs(subject, list(ids), [exact_spec, coarse_spec], CONTEXT)
    log_probs = logits_of(folder / "source", ids).log_softmax(-1)[:, 20:-1]
    nll = -log_probs.gather(-1, ids[:, 21:, None]).mean()
    assert exact.ppl == pytest.approx(math.exp(nll), rel=1e-4)
    assert exact.tokens == coarse.tokens == log_probs.shape[0] * log_probs.shape[1]
    assert coarse.ppl != exact.ppl
    assert 0.5 < coarse.top1 < 1


def test_equal_halves_and_scale_two_lose_nothing(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", duplicated=True)
    write_text(tmp_path / "text.txt")
    options = ConversionOptions(method=Method.IDENTITY, calibration=tmp_path / "text.txt")
    manifest = convert_checkpoint(source, tmp_path / "out", options)
    torch.testing.assert_close(
        torch.tensor(manifest.logit_scales), torch.full((2, 4, 2), 2.0), rtol=1e-4, atol=0
    )
    subject = Subject(tmp_path / "out")
    spec = subject.spec(Mode.TPLA, KVFormat.FP32, 0)
    (row,) = evaluate_specs(subject, list(some_ids()), [spec], CONTEXT)
    assert row.kl < 1e-8
    assert row.top1 == 1.0


def test_short_sequences_count_where_they_are_long_enough(folder: Path) -> None:
    subject = Subject(folder / "pca")
    spec = subject.spec(Mode.TPLA, KVFormat.FP32, 50)
    sequences = [some_ids(1, 60)[0], some_ids(1, 20)[0], some_ids(1, 51)[0]]
    (row,) = evaluate_specs(subject, sequences, [spec], CONTEXT)
    assert row.tokens == 9
    with pytest.raises(ConfigError, match="nothing to score"):
        evaluate_specs(subject, sequences[1:], [spec], CONTEXT)


@pytest.mark.parametrize("family", ["v2", "v3"])
def test_bfloat16_arithmetic_is_near_float32(folder: Path, tmp_path: Path, family: str) -> None:
    source = make_checkpoint(tmp_path / "source", family)
    options = ConversionOptions(
        calibration=folder / "text.txt", max_tokens=500, compute_dtype=torch.bfloat16
    )
    convert_checkpoint(source, tmp_path / "out", options)
    ppl = []
    for dtype in (torch.float32, torch.bfloat16):
        subject = Subject(tmp_path / "out", dtype=dtype)
        spec = subject.spec(Mode.TPLA, KVFormat.BF16, 16)
        (row,) = evaluate_specs(subject, _held_out(folder), [spec], CONTEXT)
        ppl.append(row.ppl)
    assert ppl[1] == pytest.approx(ppl[0], rel=0.05)


def test_block_fp8_checkpoints_can_be_measured(folder: Path, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "v3")
    quantize_checkpoint(source)
    options = ConversionOptions(calibration=folder / "text.txt", max_tokens=500)
    convert_checkpoint(source, tmp_path / "out", options)
    subject = Subject(tmp_path / "out")
    spec = subject.spec(Mode.TPLA, KVFormat.FP8, 0)
    (row,) = evaluate_specs(subject, list(some_ids()), [spec], CONTEXT)
    assert 0 < row.kl < 1


def test_a_manifest_of_other_weights_is_refused(folder: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", seed=7)
    (other / "tpla.json").write_text((folder / "pca" / "tpla.json").read_text())
    Manifest.load(other)
    with pytest.raises(CheckpointError, match="written for other weights"):
        Subject(other)


def test_a_plain_checkpoint_is_mla_only(folder: Path) -> None:
    subject = Subject(folder / "source")
    assert subject.spec(Mode.MLA, KVFormat.FP32, 0) == DecodeSpec(
        Mode.MLA, ModelPlan(LATENT, 1, (0, 0)), KVFormat.FP32
    )
    with pytest.raises(CheckpointError, match="tpla convert"):
        subject.spec(Mode.TPLA, KVFormat.FP32, 0)


def _held_out(folder: Path) -> list[torch.Tensor]:
    tokenizer = load_tokenizer(folder / "source")
    return read_sequences(folder / "held_out.txt", tokenizer, CONTEXT, max_tokens=10_000)
