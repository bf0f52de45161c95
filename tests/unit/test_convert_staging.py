"""What the file system may refuse a conversion: looked at first, and never a traceback."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.unit.checkpoints import make_checkpoint
from tpla.convert import pipeline
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.rotation import Method
from tpla.core.checkpoint import INDEX_NAME, Manifest
from tpla.core.errors import CheckpointError

OPTIONS = ConversionOptions(method=Method.HADAMARD, logit_scale=LogitScale.ENERGY)
Patch = pytest.MonkeyPatch


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source")


def _full(_: Path, patch: Patch) -> None:
    patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))


def _read_only(_: Path, patch: Patch) -> None:
    patch.setattr(os, "access", lambda *_: False)


def _mounted(out: Path, patch: Patch) -> None:
    out.mkdir()
    patch.setattr(os.path, "ismount", lambda path: Path(path) == out)


def _dangling(out: Path, _: Patch) -> None:
    out.symlink_to(out.with_name("nowhere"))


def _linked(out: Path, _: Patch) -> None:
    out.with_name("elsewhere").mkdir()
    out.symlink_to(out.with_name("elsewhere"))


@pytest.mark.parametrize(
    ("arrange", "message"),
    [
        (_full, r"0\.0 GiB free, the weights take"),
        (_read_only, "change its permissions"),
        (_mounted, "is a mount point"),
        (_dangling, "is a symbolic link"),
        (_linked, "is a symbolic link"),
    ],
)
def test_a_destination_that_cannot_be_written_is_refused_before_any_work(
    source: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    arrange: Callable[[Path, Patch], None],
    message: str,
) -> None:
    arrange(tmp_path / "out", monkeypatch)
    monkeypatch.setattr(pipeline, "_results", _no_work)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(source, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out.tmp").exists()


@pytest.mark.parametrize("inside", ["file/out", "file/deeper/out", "x" * 300])
def test_a_path_that_cannot_be_is_refused_before_any_work(
    source: Path, tmp_path: Path, monkeypatch: Patch, inside: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(pipeline, "_results", _no_work)
    with pytest.raises(CheckpointError, match=r"change (its )?permissions"):
        convert_checkpoint(source, tmp_path / inside, OPTIONS)


def test_the_space_asked_for_is_that_of_the_dtype_written(source: Path) -> None:
    checkpoint = pipeline.Checkpoint(source)
    whole = pipeline.written_bytes(checkpoint, None)
    assert whole == sum(entry.size for entry in checkpoint.entries.values())
    assert pipeline.written_bytes(checkpoint, torch.bfloat16) == whole // 2


def test_the_working_folder_may_become_the_checkpoint(
    source: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    convert_checkpoint(source, Path("../here"), OPTIONS)
    assert Manifest.load(tmp_path / "here").method == "hadamard"


def test_a_read_only_source_makes_no_read_only_copy(source: Path, tmp_path: Path) -> None:
    (source / "figures").mkdir()
    (source / "figures" / "a.png").write_bytes(b"png")
    for path in (*source.rglob("*"), source):
        path.chmod(0o555 if path.is_dir() else 0o444)
    convert_checkpoint(source, tmp_path / "out", OPTIONS)
    copies = [tmp_path / "out", *(tmp_path / "out").rglob("*")]
    assert tmp_path / "out" / "figures" / "a.png" in copies
    assert all(path.stat().st_mode & stat.S_IWUSR for path in copies)


def test_a_file_that_cannot_be_copied_ends_the_run_before_weights_are_written(
    source: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    (source / "README.md").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr(pipeline, "_spill", _no_work)
    with pytest.raises(CheckpointError, match=r"README\.md.*convert again"):
        convert_checkpoint(source, tmp_path / "out", OPTIONS)
    assert not (tmp_path / "out.tmp").exists()


def test_a_complete_folder_survives_a_failed_rename(
    source: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="rename it by hand"):
        patch.setattr(Path, "rename", refuse)
        convert_checkpoint(source, tmp_path / "out", OPTIONS)
    assert Manifest.load(tmp_path / "out.tmp").method == "hadamard"


def test_an_index_without_metadata_gets_some(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", max_shard_size="300KB")
    index = json.loads((source / INDEX_NAME).read_text())
    (source / INDEX_NAME).write_text(json.dumps({**index, "metadata": None}))
    convert_checkpoint(source, tmp_path / "out", OPTIONS)
    written = json.loads((tmp_path / "out" / INDEX_NAME).read_text())
    assert written["metadata"]["total_size"] > 0 and written["weight_map"] == index["weight_map"]


def _no_work(*_: object) -> None:
    raise AssertionError("work began")
