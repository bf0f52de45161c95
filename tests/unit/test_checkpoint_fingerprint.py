"""A checkpoint's fingerprint changes with its tensors and its rotation, not with its files."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tpla.core.checkpoint import fingerprint
from tpla.core.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
DOWN, UP, NORM = "0.kv_a_proj_with_mqa.weight", "0.kv_b_proj.weight", "0.norm.weight"


def tensors() -> Tensors:
    return {
        DOWN: torch.arange(32.0).reshape(8, 4),
        UP: torch.ones(4, 8),
        NORM: torch.ones(6),
    }


def headed(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def saved(folder: Path, *files: Tensors) -> Path:
    folder.mkdir()
    for index, held in enumerate(files):
        save_file(held, folder / f"{index}.safetensors")
    return folder


@pytest.mark.parametrize(
    "change",
    [
        lambda held: held.update({NORM: torch.ones(2, 3)}),
        lambda held: held.update({NORM: torch.ones(6, dtype=torch.int32)}),
        lambda held: held.update({"1.norm.weight": held.pop(NORM)}),
        lambda held: held.update({"1.norm.weight": torch.ones(6)}),
        lambda held: held.update({DOWN: held[DOWN].flip(0)}),
        lambda held: held.update({UP: -held[UP]}),
    ],
    ids=["shape", "dtype", "name", "one more", "rotation down", "rotation up"],
)
def test_another_model_has_another_fingerprint(
    tmp_path: Path, change: Callable[[Tensors], None]
) -> None:
    other = tensors()
    change(other)
    assert fingerprint(saved(tmp_path / "a", tensors())) != fingerprint(
        saved(tmp_path / "b", other)
    )


def test_files_and_their_order_are_immaterial(tmp_path: Path) -> None:
    whole, parts = tensors(), tensors()
    norm = {NORM: parts.pop(NORM)}
    marks = {
        fingerprint(saved(tmp_path / "whole", whole)),
        fingerprint(saved(tmp_path / "norm first", norm, parts)),
        fingerprint(saved(tmp_path / "norm last", parts, norm)),
    }
    assert len(marks) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 64,
        headed(b"not JSON"),
        headed(b"[]"),
        headed(b'{"weight": 1}'),
        headed(b'{"weight": {"dtype": "F32"}}'),
        headed(b'{"kv_b_proj.weight": {"dtype": "F32", "shape": [1], "data_offsets": 4}}'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "broken.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"broken\.safetensors is not"):
        fingerprint(tmp_path)


def test_a_folder_without_weights_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no"):
        fingerprint(tmp_path)
