"""Plans chosen by bytes or by divergence."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.checkpoints import LATENT, edit_config, make_checkpoint, write_text
from tpla.convert import cli, division, planning
from tpla.convert.division import choose_plan, divide_by_layer
from tpla.convert.evaluate import Subject, evaluate_specs
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.planning import (
    Budget,
    Candidate,
    PlanMeasure,
    choose,
    list_candidates,
    survey,
)
from tpla.convert.sliced_attention import Mode
from tpla.convert.text import load_tokenizer, read_sequences
from tpla.core.checkpoint import Manifest
from tpla.core.errors import ConfigError
from tpla.core.latent_layout import KVFormat, ModelPlan

CONTEXT = 64
BUDGET = Budget(width_multiple=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and text of which every fourth document, and so sequence, is held out."""
    folder = tmp_path_factory.mktemp("planning")
    make_checkpoint(folder / "source")
    text = write_text(folder / "text.txt", 16 * CONTEXT).read_text()
    documents = [text[start : start + CONTEXT] for start in range(0, len(text), CONTEXT)]
    _write(folder / "all.jsonl", documents)
    _write(folder / "fitted.jsonl", [d for n, d in enumerate(documents) if n % 4 != 3])
    _write(folder / "held_out.jsonl", documents[3::4])
    return folder


@pytest.fixture(scope="module")
def options(folder: Path) -> ConversionOptions:
    return ConversionOptions(
        calibration=folder / "all.jsonl", context=CONTEXT, per_document=True, max_tokens=2000
    )


@pytest.fixture(scope="module")
def measured(folder: Path, options: ConversionOptions) -> list[Candidate]:
    return survey(folder / "source", options, BUDGET, measured=True)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (1, [(0, 644)]),
        (2, [(core, 388 + core // 2) for core in range(0, 512, 32)]),
        (4, [(core, 260 + 3 * core // 4) for core in range(0, 512, 64)]),
    ],
)
def test_candidates_of_deepseek_v3(
    tmp_path: Path, groups: int, expected: list[tuple[int, int]]
) -> None:
    source = make_checkpoint(tmp_path / "source", num_hidden_layers=1)
    edit_config(source, kv_lora_rank=512, qk_rope_head_dim=64)
    found = list_candidates(source, groups, Budget())
    assert [(c.plan.core, c.row_bytes) for c in found] == expected
    assert all(c.plan.layer(0).latent_width % 16 == 0 for c in found)


def test_what_is_measured_is_what_a_conversion_loses(
    folder: Path, options: ConversionOptions, measured: list[Candidate]
) -> None:
    candidate = measured[1]
    converted = replace(
        options, calibration=folder / "fitted.jsonl", core_dims=candidate.plan.core_dims
    )
    convert_checkpoint(folder / "source", folder / "out", converted)
    subject = Subject(folder / "out")
    tokenizer = load_tokenizer(folder / "source")
    held_out = read_sequences(folder / "held_out.jsonl", tokenizer, CONTEXT, 2000, True)
    spec = subject.spec(Mode.TPLA, KVFormat.FP8, CONTEXT // 2)
    (row,) = evaluate_specs(subject, held_out, [spec], CONTEXT)
    assert candidate.measure is not None
    assert candidate.kl == pytest.approx(row.kl, rel=1e-3)
    assert candidate.measure.top1 == pytest.approx(row.top1)


def test_a_larger_core_costs_more_and_loses_less(measured: list[Candidate]) -> None:
    assert [c.plan.core for c in measured] == [0, 16, 32, 48]
    assert [c.row_bytes for c in measured] == sorted({c.row_bytes for c in measured})
    assert measured[-1].kl < measured[0].kl / 2
    for candidate in measured:
        assert candidate.measure is not None and len(candidate.measure.layer_errors) == 2
    first, last = measured[0].measure, measured[-1].measure
    assert first is not None and last is not None
    assert sum(last.layer_errors) < sum(first.layer_errors)


def test_bytes_choose_the_largest_plan_that_fits() -> None:
    some = _candidates(0.3, 0.2, 0.1)
    assert choose(some, Budget(bytes_per_token=round(some[1].row_bytes))) is some[1]
    assert choose(some, Budget(bytes_per_token=round(some[2].row_bytes) - 1)) is some[1]
    assert choose(some, Budget(bytes_per_token=10**6)) is some[2]
    with pytest.raises(ConfigError, match=f"bytes_per_token=9 .* {some[0].row_bytes:g} bytes"):
        choose(some, Budget(bytes_per_token=9))


def test_divergence_chooses_the_smallest_plan_that_meets_it() -> None:
    some = _candidates(0.3, 0.2, 0.1)
    assert choose(some, Budget(max_kl=0.25)) is some[1]
    assert choose(some, Budget(max_kl=0.2, bytes_per_token=round(some[1].row_bytes))) is some[1]
    with pytest.raises(ConfigError, match=r"at least 0\.100000 "):
        choose(some, Budget(max_kl=0.05))
    with pytest.raises(ConfigError, match=r"max_kl=0\.15"):
        choose(some, Budget(max_kl=0.15, bytes_per_token=round(some[1].row_bytes)))


def test_bytes_go_to_the_layers_that_gain_most() -> None:
    # Layer 0 gains 6 by the first step, 3 by the second; layer 1 gains 1 by each.
    some = _with_errors([10.0, 3.0], [4.0, 2.0], [1.0, 1.0])
    by_bytes = [divide_by_layer(some, candidate.token_bytes).core for candidate in some]
    assert by_bytes == [0, [32, 0], 32]
    assert divide_by_layer(some, some[1].token_bytes - 1).core == [16, 0]


def test_a_step_that_only_pays_as_a_whole_is_taken_as_a_whole() -> None:
    some = _with_errors([5.0, 5.0], [5.5, 4.0], [1.0, 3.9])
    assert divide_by_layer(some, some[1].token_bytes).core == [32, 0]


def test_bytes_that_gain_nothing_are_not_spent() -> None:
    some = _with_errors([5.0, 1.0], [1.0, 1.5], [1.0, 2.0])
    assert divide_by_layer(some, 10**6).core == [16, 0]


def test_a_division_is_chosen_only_where_it_measures_better(
    folder: Path, options: ConversionOptions, measured: list[Candidate]
) -> None:
    limit = round(measured[1].row_bytes)
    by_bytes = choose_plan(folder / "source", options, replace(BUDGET, bytes_per_token=limit))
    assert all(c.row_bytes <= limit and not c.plan.is_uniform for c in by_bytes.divisions)
    assert by_bytes.chosen.kl == min(c.kl for c in (by_bytes.uniform, *by_bytes.divisions))
    limit_kl = (measured[1].kl + measured[2].kl) / 2
    by_kl = choose_plan(folder / "source", options, replace(BUDGET, max_kl=limit_kl))
    assert by_kl.divisions and by_kl.uniform.plan.core == 32
    assert by_kl.chosen.kl <= limit_kl
    better = [c for c in by_kl.divisions if c.kl <= limit_kl]
    assert by_kl.chosen.token_bytes == min(c.token_bytes for c in (by_kl.uniform, *better))


def test_convert_takes_a_budget(
    folder: Path, measured: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ["--calibration", folder / "all.jsonl", "--context", CONTEXT, "--per-document"]
    common = [folder / "source", folder / "by-kl", *text, "--width-multiple", 8]
    between = (measured[1].kl + measured[2].kl) / 2
    assert _run(monkeypatch, "convert", *common, "--max-kl", between, "--uniform") == 0
    assert Manifest.load(folder / "by-kl").plan == ModelPlan(LATENT, 2, (32, 32))
    common[1] = folder / "by-bytes"
    limit = round(measured[1].row_bytes)
    assert _run(monkeypatch, "convert", *common, "--bytes-per-token", limit) == 0
    core_dims = Manifest.load(folder / "by-bytes").plan.core_dims
    assert len(core_dims) == 2 and sum(core_dims) <= 32


def test_plan_prints_what_it_costs_and_buys(
    folder: Path,
    measured: list[Candidate],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text = ["--calibration", folder / "all.jsonl", "--context", CONTEXT, "--per-document"]
    limits = ["--width-multiple", 8, "--bytes-per-token", round(measured[2].row_bytes)]
    out = folder / "plan.json"
    assert _run(monkeypatch, "plan", folder / "source", *text, *limits, "--json", out) == 0
    printed = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert [row["measure"]["kl"] for row in document["candidates"]] == pytest.approx(
        [c.kl for c in measured]
    )
    chosen = document["chosen"]
    rows = [document["uniform"], *document["divisions"]]
    assert chosen["measure"]["kl"] == min(row["measure"]["kl"] for row in rows)
    assert "chosen: --groups 2 --core-dims " in printed
    assert f"{chosen['measure']['kl']:.6f}" in printed and f"{measured[2].kl:.6f}" in printed


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("plan", ["--groups", "65"], "no plan of groups=65"),
        ("plan", ["--groups", "0"], "no plan of groups=0"),
        ("plan", ["--width-multiple", "0"], "width_multiple=0"),
        ("plan", ["--bytes-per-token", "9"], "bytes_per_token=9"),
        ("plan", ["--bytes-per-token", "9", "--uniform"], "less than the smallest row"),
        ("convert", ["out2", "--core-dims", "0,0,0"], "is for 3 layers, the model has 2"),
        ("convert", ["out2", "--core-dims", "many"], "core_dims='many'"),
        ("plan", ["--max-kl", "0.1"], "--calibration PATH"),
        ("plan", ["--calibration", "all.jsonl"], "hold none out"),
        ("convert", ["out2", "--core-dims", "0", "--max-kl", "1"], "contradict each other"),
    ],
)
def test_bad_values_end_with_one_line_and_status_2(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    assert _run(monkeypatch, command, "source", *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("convert", ["occupied", "--max-kl", "1"], "exists and is not empty"),
        ("convert", ["out3", "--max-kl", "nan"], "max_kl=nan must be more than 0"),
        ("convert", ["out3", "--max-kl", "0"], "max_kl=0 must be more than 0"),
        ("convert", ["out3", "--bytes-per-token", "9"], "less than the smallest row"),
        ("convert", ["out3", "--bytes-per-token", "9", "--max-kl", "1"], "bytes_per_token=9"),
        ("plan", ["--max-kl", "-1"], "max_kl=-1 must be more than 0"),
        ("plan", ["--bytes-per-token", "9"], "less than the smallest row"),
        ("plan", ["--max-kl", "1", "--json", "occupied"], "cannot write occupied"),
        ("plan", ["--max-kl", "1", "--json", "nowhere/plan.json"], "cannot write nowhere"),
    ],
)
def test_what_a_budget_cannot_have_is_refused_before_anything_is_measured(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    arguments: list[str],
    message: str,
) -> None:
    def measure(*_: object) -> None:
        raise AssertionError("measured first")

    for module in (planning, division):
        monkeypatch.setattr(module, "measure_candidates", measure)
    (folder / "occupied").mkdir(exist_ok=True)
    (folder / "occupied" / "file").write_text("")
    monkeypatch.chdir(folder)
    status = _run(monkeypatch, command, "source", *arguments, "--calibration", "all.jsonl")
    assert status == 2 and message in capsys.readouterr().err


def test_a_budget_may_need_a_core_for_the_latent_to_divide(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 64 dims are not three equal slices; the 24 beside a core of 40 are.
    monkeypatch.chdir(folder)
    common = ["source", "thirds", "--groups", 3, "--calibration", "all.jsonl", "--uniform"]
    assert _run(monkeypatch, "convert", *common, "--bytes-per-token", 9999) == 0
    assert Manifest.load(folder / "thirds").plan.core == 40


def _write(path: Path, documents: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))


def _candidates(*kls: float) -> list[Candidate]:
    plans = [ModelPlan(LATENT, 2, (16 * n, 16 * n)) for n in range(len(kls))]
    return [
        Candidate(plan, 200 + 16 * n, PlanMeasure(kl, 1.0, 1.0, [kl, kl]))
        for n, (plan, kl) in enumerate(zip(plans, kls, strict=True))
    ]


def _with_errors(*errors: list[float]) -> list[Candidate]:
    """Candidates of growing cores, each with the errors of its two layers."""
    return [
        replace(candidate, measure=PlanMeasure(0, 1, 1, each))
        for candidate, each in zip(_candidates(*[0.0] * len(errors)), errors, strict=True)
    ]


def _run(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [f"tpla {command}", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        {"convert": cli.convert, "plan": cli.plan}[command]()
    return int(stop.value.code or 0)
