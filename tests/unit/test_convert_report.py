"""``tpla report``: what is on the page, and that it is what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.unit.checkpoints import make_checkpoint, write_text
from tpla.convert import eval_cli, report_cli
from tpla.convert.endpoint_tasks import EndpointResult, TaskRow
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.report import Findings, read_rows, write_report
from tpla.convert.spectrum import Spectrum
from tpla.core.checkpoint import Manifest

PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    source = make_checkpoint(folder / "source")
    options = ConversionOptions(calibration=write_text(folder / "text.txt", 600))
    convert_checkpoint(source, folder / "converted", options)
    write_text(folder / "held_out.txt", 300, seed=1)
    return folder


@pytest.fixture(scope="module")
def reported(folder: Path) -> Path:
    out = folder / "out"
    with pytest.MonkeyPatch.context() as patch:
        text = ["--text", folder / "held_out.txt", "--context", "100"]
        assert _run(patch, out, "--model", folder / "converted", *text) == 0
    return out


def test_the_page_holds_what_was_measured(reported: Path) -> None:
    page = (reported / "report.md").read_text()
    rows = read_rows(reported / "eval_converted.json")
    base = next(row for row in rows if (row.name, row.kv_format) == ("mla", "fp32"))
    for title, name, prefill in (
        ("| GLA |", "gla", 0),
        ("| TPLA |", "tpla -align", 0),
        ("| TPLA, aligned |", "tpla", 0),
        ("| TPLA, aligned, exact prefill |", "tpla", 50),
        ("| RMSNorm sliced |", "tpla norm", 0),
        ("| both sliced |", "tpla both", 0),
    ):
        (line,) = [line for line in page.splitlines() if line.startswith(title)]
        measured = [r for r in rows if (r.name, r.prefill) == (name, prefill)]
        assert [row.kv_format for row in measured] == (
            ["fp32"] if "sliced" in title else ["fp32", "fp8"]
        )
        for row in measured:
            assert f"| {row.ppl / base.ppl:.4f} | {row.kl:.5f} | {100 * row.top1:.2f} |" in line
    assert f"| TPLA, aligned | {6.51 / 6.31:.3f} | 61.52 |" in page
    assert (reported / "spectrum-converted.png").read_bytes().startswith(PNG)
    assert "](spectrum-converted.png)" in page


def test_results_on_disk_make_the_same_tables(
    folder: Path, reported: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _run(monkeypatch, folder / "again", "--results", reported) == 0
    first, second = (reported / "report.md").read_text(), (folder / "again/report.md").read_text()
    assert _tables(second) == _tables(first.split("## Spectrum")[0])


def test_a_spectrum_outlives_its_checkpoint(
    folder: Path, reported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "spectrum_kept.json"
    monkeypatch.setattr(
        sys, "argv", ["tpla eval", "spectrum", str(folder / "converted"), "--json", str(kept)]
    )
    with pytest.raises(SystemExit) as stop:
        eval_cli.evaluate()
    assert not stop.value.code
    assert _run(monkeypatch, tmp_path / "out", "--results", tmp_path) == 0
    _, described = (reported / "report.md").read_text().split("## Spectrum: converted\n")
    page = (tmp_path / "out" / "report.md").read_text()
    assert described.replace("spectrum-converted", "spectrum-kept") in page
    assert (tmp_path / "out" / "spectrum-kept.png").read_bytes().startswith(PNG)
    spectrum = Spectrum.load(kept)
    measured = Manifest.load(folder / "converted").spectrum
    for layer, shares in enumerate(measured):
        enough = spectrum.dims_for(layer, 0.9)
        assert sum(shares[: enough - 1]) < 0.9 <= sum(shares[:enough]) + 1e-3


def test_sweeps_and_answers_are_shown(tmp_path: Path) -> None:
    sweep = [
        {
            **{"groups": 2, "core_dims": core, "row_bytes": 132, "row_share": 0.673, "top1": 0.95},
            **{"method": "pca", "alignment": alignment, "kl": kl},
            **{"tokens": 3066, "context": 1024, "prefill": 512},
        }
        for core, alignment, kl in ((0, "none", 0.018), (0, "values", 0.012), ([0, 32], "none", 1))
    ]
    results = [
        EndpointResult(label, "m", 1.0, [TaskRow("recall", 3000, 20, exact, 0, 3100)])
        for label, exact in (("mla", 20), ("tpla", 19))
    ]
    asked = {"questions": 100, "recall_questions": 400, "recall_distance": 3000}
    asked |= {"exact_recall": 1.0, "recall": 0.99}
    asked |= {"exact_tasks": 0.995, "tasks": 0.98, "exact_ppl": 2.0, "ppl": 2.002}
    whole = {"header": {}, "model": "embedded", "rows": sweep}
    cut = {"header": {"note": "cut short"}, "model": "large", "rows": [sweep[0] | asked]}
    (tmp_path / "accuracy_x.json").write_text(json.dumps(whole))
    (tmp_path / "accuracy_y.json").write_text(json.dumps(cut))
    shared = [sweep[0] | {"core_values": each} for each in ("counted", "averaged")]
    (tmp_path / "accuracy_z.json").write_text(json.dumps(whole | {"rows": shared}))
    document = {"endpoints": [asdict(result) for result in results]}
    (tmp_path / "tasks_x.json").write_text(json.dumps(document))
    findings = Findings()
    findings.read(tmp_path)
    page = write_report(tmp_path / "out", findings).read_text()
    assert "| 2 | 0 | pca | values | 132 | 67.3% | 0.01200 | 95.00% |" in page
    assert "| 2 | 0..32 | pca | none |" in page
    assert "Core dims by layer: 2 groups 0,32." in page
    assert "Model: embedded. 3066 tokens scored, context 1024" in page
    x, y = page.index("bytes: accuracy_x"), page.index("bytes: accuracy_y")
    assert x < page.index("Model: embedded") < y < page.index("Model: large")
    assert page.index("Of the run: cut short") > y and page.count("Of the run") == 1
    assert "| 2 | 0 | pca | none | averaged | 132 |" in page
    assert page.count("| core's values |") == 1
    assert "| 95.00% | 1.00100 | 99.0% of 100.0% | 98.0% of 99.5% |" in page
    assert "400 held-out questions over 3000 tokens, and 100 of each task" in page
    assert "| recall 3000 | 20 | 100.0 | 95.0 |" in page
    assert "| DeepSeek-V3 | 58.19 | 56.04 | 0.963 |" in page
    assert (tmp_path / "out" / "accuracy_x.png").read_bytes().startswith(PNG)


def test_nothing_to_report_and_foreign_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run(monkeypatch, tmp_path / "out") == 2
    assert "nothing to report" in capsys.readouterr().err
    (tmp_path / "eval_x.json").write_text('[{"mode": "mla"}]')
    assert _run(monkeypatch, tmp_path / "out", "--results", tmp_path) == 2
    assert "eval_x.json holds no rows" in capsys.readouterr().err
    (tmp_path / "eval_x.json").unlink()
    (tmp_path / "spectrum_x.json").write_text('{"plan": {}}')
    assert _run(monkeypatch, tmp_path / "out", "--results", tmp_path) == 2
    assert "spectrum_x.json holds no result" in capsys.readouterr().err
    (tmp_path / "spectrum_x.json").unlink()
    (tmp_path / "accuracy_x.json").write_text("[]")
    assert _run(monkeypatch, tmp_path / "out", "--results", tmp_path) == 2
    assert "accuracy_x.json holds no result" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_matplotlib_is_loaded_only_to_draw() -> None:
    modules = "tpla.convert.cli, tpla.convert.eval_cli, tpla.convert.report_cli"
    script = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def _tables(page: str) -> list[str]:
    return [line for line in page.splitlines() if line.startswith("|")]


def _run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["tpla report", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        report_cli.report()
    return int(stop.value.code or 0)
