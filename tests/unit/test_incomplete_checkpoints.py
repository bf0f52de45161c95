"""Weights that were not copied or downloaded to their end: refused before anything is made of them.

SGLang's own loader serves what it finds, with whatever memory held in place of the rest.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.unit.checkpoints import make_checkpoint
from tpla.convert import pipeline
from tpla.convert.logit_scale import LogitScale
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.rotation import Method
from tpla.core.checkpoint import INDEX_NAME, fingerprint
from tpla.core.config import Mode, Role
from tpla.core.errors import CheckpointError
from tpla.workers.launch import WorkerOptions, configure


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "source", max_shard_size="300KB")


def _absent(folder: Path) -> None:
    max(folder.glob("*.safetensors")).unlink()


def _cut(folder: Path) -> None:
    path = max(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def _without_index(folder: Path) -> None:
    _absent(folder)
    (folder / INDEX_NAME).unlink()


DAMAGES = [
    (_absent, r"lacks 1 of \d+ weight files.*complete the download"),
    (_cut, r"cut short, \d+ of \d+ bytes; copy or download it again"),
    (_without_index, rf"\*\.safetensors and no {INDEX_NAME}"),
]


@pytest.mark.parametrize("mode", [Mode.MLA, Mode.SNAPMLA])
@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_worker_does_not_serve_them(
    sharded: Path, mode: Mode, role: Role, damage: Any, message: str
) -> None:
    options = WorkerOptions(
        role=role, model=sharded, mode=mode, groups=None, kv_format=None, pv_format="fp16",
        scatter_output=None, transfer="zmq", transfer_timeout=30.0, device="cpu", fault=None,
        sglang_arguments=(),
    )  # fmt: skip
    assert configure(options).model == str(sharded)
    damage(sharded)
    with pytest.raises(CheckpointError, match=message):
        configure(options)


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_conversion_refuses_them_before_any_work(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, message: str
) -> None:
    monkeypatch.setattr(pipeline, "_results", lambda *_: pytest.fail("work began"))
    damage(sharded)
    options = ConversionOptions(method=Method.HADAMARD, logit_scale=LogitScale.ENERGY)
    with pytest.raises(CheckpointError, match=message):
        convert_checkpoint(sharded, tmp_path / "out", options)
    assert not (tmp_path / "out.tmp").exists()


def test_no_fingerprint_is_made_of_a_file_that_was_cut(sharded: Path) -> None:
    _cut(sharded)
    with pytest.raises(CheckpointError, match="cut short"):
        fingerprint(sharded)
