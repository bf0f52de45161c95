"""``tpla convert`` and ``tpla eval`` as a user meets them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.checkpoints import make_checkpoint, write_text
from tpla.convert import cli, eval_cli, pipeline
from tpla.core.checkpoint import Manifest

FIELDS = [
    *("mode", "groups", "core_dims", "method", "kv_format", "context", "prefill", "tokens"),
    *("ppl", "kl", "top1", "scored_from", "alignment", "sliced", "pv_format"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    make_checkpoint(folder / "source")
    write_text(folder / "text.txt", 600)
    return folder


@pytest.fixture(scope="module")
def converted(folder: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["--groups", "2", "--core-dims", "16", "--calibration", folder / "text.txt"]
        assert _run(patch, "convert", folder / "source", folder / "out", *arguments) == 0
    return folder / "out"


def test_convert_writes_what_was_asked_for(converted: Path) -> None:
    manifest = Manifest.load(converted)
    assert (manifest.plan.groups, manifest.plan.core) == (2, 16)
    assert (manifest.method, manifest.logit_scale) == ("pca", "fit")


@pytest.mark.parametrize(("tokens", "warned"), [(1023, True), (1024, False)])
def test_convert_says_how_many_tokens_it_read_and_warns_of_few(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tokens: int,
    warned: bool,
) -> None:
    text = write_text(tmp_path / "text.txt", 2000)
    arguments = [tmp_path / "out", "--calibration", text, "--max-tokens", tokens]
    assert _run(monkeypatch, "convert", folder / "source", *arguments) == 0
    printed = capsys.readouterr()
    assert f"{tokens} calibration tokens" in printed.out
    assert ("give 1024 or more" in printed.err) == warned


def test_eval_ppl_writes_one_row(
    converted: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = folder / "ppl.json"
    options = ["--mode", "tpla", "--kv-format", "fp8", "--context", "100", "--prefill", "40"]
    status = _run(
        monkeypatch,
        *("eval", "ppl", converted, "--text", folder / "text.txt", "--json", out),
        *options,
    )
    assert status == 0
    row = json.loads(out.read_text())
    assert list(row) == FIELDS
    assert row["tokens"] == 6 * 59
    assert (row["groups"], row["core_dims"], row["method"]) == (2, 16, "pca")
    assert (row["kv_format"], row["context"], row["prefill"]) == ("fp8", 100, 40)
    printed = capsys.readouterr().out
    assert f"{row['ppl']:.4f}" in printed and f"{row['kl']:.6f}" in printed


def test_eval_table_compares_the_modes(
    converted: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "table.json"
    arguments = ["table", converted, "--text", folder / "text.txt", "--context", "100"]
    assert _run(monkeypatch, "eval", *arguments, "--json", out) == 0
    rows = json.loads(out.read_text())
    assert all(list(row) == FIELDS for row in rows)
    variants = (("mla", "none"), ("gla", "none"), ("tpla", "values"), ("tpla", "none"))
    expected = [
        (mode, alignment, prefill, kv_format, "fp16")
        for mode, alignment in variants
        for prefill in (0, 50)
        for kv_format in ("fp32", "fp8")
    ]
    expected += [
        (mode, alignment, prefill, "fp8", "fp8")
        for mode, alignment in (("mla", "none"), ("tpla", "values"))
        for prefill in (0, 50)
    ]
    keys = ("mode", "alignment", "prefill", "kv_format", "pv_format")
    assert [tuple(row[key] for key in keys) for row in rows] == expected
    assert len({(row["tokens"], row["scored_from"]) for row in rows}) == 1, "figures must compare"


def test_a_plain_checkpoint_can_be_measured_as_mla(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = folder / "mla.json"
    arguments = ["ppl", folder / "source", "--text", folder / "text.txt", "--context", "100"]
    status = _run(monkeypatch, "eval", *arguments, "--mode", "mla", "--json", out)
    assert status == 0
    row = json.loads(out.read_text())
    assert (row["groups"], row["core_dims"], row["method"]) == (1, 0, "none")
    assert (row["kl"], row["top1"]) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "nowhere", "out2"], "error: method=pca"),
        (["convert", "source", "out2"], "error: method=pca"),
        (["convert", "source", "out2", "--groups", "3", "--method", "identity"], "cannot share"),
        (["convert", "source", "out2", "--calibration", "nowhere.txt"], "cannot read text"),
        (
            ["convert", "source", "out2", "--calibration", "text.txt", "--device", "warp"],
            "device='warp'",
        ),
        (["eval", "ppl", "source", "--text", "text.txt", "--context", "99"], "tpla convert"),
        (["eval", "ppl", "out", "--text", "text.txt", "--context", "9999"], "2..512"),
        (
            ["eval", "ppl", "out", "--text", "text.txt", "--context", "99", "--prefill", "98"],
            "leaves nothing to score",
        ),
        (
            ["eval", "ppl", "out", "--text", "text.txt", "--context", "99", "--prefill", "-1"],
            "at least 0",
        ),
        (
            ["eval", "ppl", "out", "--text", "text.txt", "--context", "99", "--pv-format", "fp8"],
            "pv_format=fp8 adds up fp8 rows, kv_format=fp32",
        ),
        (
            ["eval", "ppl", "out", "--text", "text.txt", "--context", "99", "--json", "no/no"],
            "cannot write",
        ),
    ],
)
def test_bad_values_end_with_one_line_and_status_2(
    converted: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(folder)
    if arguments[1] == "nowhere":
        message = "nowhere is not a folder"
    assert _run(monkeypatch, *arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert not (folder / "out2").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_terminated_conversion_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.signal(number, lambda *_: pytest.fail("it was not told"))
    monkeypatch.setattr(pipeline, "_copy_other_files", _tell(number))
    arguments = [folder / "source", folder / "out3", "--method", "identity", "--groups", "1"]
    try:
        assert _run(monkeypatch, "convert", *arguments) == 128 + number
    finally:
        signal.signal(number, before)
    assert not list(folder.glob("out3*"))


def test_under_nohup_a_conversion_outlives_its_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(pipeline, "_spill", _tell(signal.SIGHUP, pipeline._spill))
    arguments = [folder / "source", folder / "out4", "--method", "identity", "--groups", "1"]
    try:
        assert _run(monkeypatch, "convert", *arguments) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (folder / "out4" / "tpla.json").is_file()


def _tell(number: signal.Signals, then: Callable[..., None] | None = None) -> Callable[..., None]:
    """Sends this process a signal, and then does what it stands for."""

    def tell(*arguments: object) -> None:
        os.kill(os.getpid(), number)
        if then is not None:
            then(*arguments)

    return tell


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "source"],
        ["convert", "source", "out2", "--method", "svd"],
        ["convert", "source", "out2", "--dtype", "int8"],
        ["eval", "ppl", "out", "--text", "text.txt", "--mode", "mha"],
    ],
)
def test_words_that_are_no_option_end_with_status_2(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    assert _run(monkeypatch, *arguments) == 2


def test_options_stay_as_documented(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert _run(monkeypatch, "convert", "--help") == 0
    text = capsys.readouterr().out
    for option in (
        *("--groups", "--method", "--core-dims", "--calibration", "--logit-scale"),
        *("--max-tokens", "--context", "--per-document", "--dtype", "--seed"),
        *("--device", "--compute-dtype", "--bytes-per-token", "--max-kl", "--kv-format"),
        *("--width-multiple", "--trust-remote-code"),
    ):
        assert option in text


def _run(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", [f"tpla {command}", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        {"convert": cli.convert, "eval": eval_cli.evaluate}[command]()
    return int(stop.value.code or 0)
