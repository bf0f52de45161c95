"""``deploy/setup.sh`` in a folder of its own; interpreters only note what they are asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

WORKING = """#!/bin/bash
echo "$*" >> {log}
[[ "$*" != "-m uv --version" ]] || echo "uv {uv}"
echo done
"""
"""What .venv/bin/python is once all is well."""

WITHOUT_PIP = "#!/bin/bash\nexit 1\n"
"""What a venv that failed leaves behind: it knows no module."""

MAKER = """#!/bin/bash
echo "$*" >> {log}
[ "$2" != venv ] || {{ mkdir -p .venv/bin && cp {working} .venv/bin/python; }}
"""
"""The interpreter that .venv is made with."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deploy").mkdir()
    for name in ("deploy/setup.sh", "pyproject.toml", "requirements.lock"):
        shutil.copy(ROOT / name, tmp_path / name)
    log = tmp_path / "log"
    (uv,) = re.findall(r"uv_version=(\S+)", (ROOT / "deploy/setup.sh").read_text())
    working = script(tmp_path / "working", WORKING.format(log=log, uv=uv))
    script(tmp_path / "maker", MAKER.format(log=log, working=working))
    return tmp_path


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def set_up(folder: Path, log: Path | None = None) -> list[str]:
    """What the interpreters were asked for."""
    log = log or folder / "log"
    log.unlink(missing_ok=True)
    done = subprocess.run(
        ["bash", folder / "deploy/setup.sh"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": str(folder / "maker")},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return log.read_text().splitlines()


@pytest.mark.parametrize("left", [None, WITHOUT_PIP], ids=["nothing", "a venv that failed"])
def test_the_environment_is_made_unless_it_works(folder: Path, left: str | None) -> None:
    if left is not None:
        script(folder / ".venv/bin/python", left)
    asked = set_up(folder)
    assert any(line.startswith("-m venv ") for line in asked)
    assert any("-r requirements.lock" in line for line in asked)


def test_an_environment_that_works_is_kept(folder: Path) -> None:
    set_up(folder)
    assert set_up(folder) == ["-m uv --version"]


def test_a_copy_of_the_folder_is_set_up_for_itself(folder: Path, tmp_path: Path) -> None:
    set_up(folder)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, symlinks=True, ignore=shutil.ignore_patterns("copy"))
    asked = [line for line in set_up(copy, folder / "log") if line.endswith("-e .")]
    assert len(asked) == 1
    assert set_up(copy, folder / "log") == ["-m uv --version"]
