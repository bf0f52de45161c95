"""What a launch is given that cannot be: one line that says so, before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tpla.workers import launch_cli


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--state", "file"], "--state: file cannot be made"),
        (["--state", "/proc/tpla"], "--state: /proc/tpla cannot be made"),
        (["--decode-flags", "'a"], '--decode-flags "\'a": No closing quotation'),
        (["--model", "nowhere"], "nowhere is not a folder; point --model at a checkpoint"),
        (["--model", "nowhere", "--mode", "mla"], "nowhere is not a folder"),
        (["--model", "file", "--mode", "snapmla"], "file is not a folder"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr(launch_cli, "run_to_its_end", lambda *_: pytest.fail("work began"))
    monkeypatch.setattr(launch_cli, "_run", lambda *_: pytest.fail("processes would be started"))
    monkeypatch.setattr(sys, "argv", ["tpla launch", "--device", "cpu", *words])
    with pytest.raises(SystemExit) as end:
        launch_cli.launch()
    assert end.value.code == 2
    assert f"tpla launch: {message}" in " ".join(capsys.readouterr().err.split())
