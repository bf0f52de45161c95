"""A conversion and a budget hold one layer in memory."""

from __future__ import annotations

import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.unit.checkpoints import make_checkpoint, write_text
from tpla.convert.layers import LayeredModel
from tpla.convert.pipeline import ConversionOptions
from tpla.convert.planning import Budget, list_candidates, measure_candidates
from tpla.core.latent_layout import KVFormat

LAYER_MIB = 12
SCRIPT = """
import re, sys
from pathlib import Path
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint

def peak_mib():
    # Not ru_maxrss: that starts at the parent's peak.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

folder = Path(sys.argv[1])
options = ConversionOptions(calibration=folder / "text.txt", max_tokens=512, context=256)
for name in ("shallow", "deep"):
    convert_checkpoint(folder / name, folder / f"out-{name}", options)
    print(peak_mib())
"""


def test_memory_is_that_of_one_layer(tmp_path: Path) -> None:
    shape = {
        "hidden_size": 512,
        "intermediate_size": 2048,
        "first_k_dense_replace": 99,
        "max_shard_size": "50MB",
    }
    make_checkpoint(tmp_path / "shallow", num_hidden_layers=2, **shape)
    make_checkpoint(tmp_path / "deep", num_hidden_layers=8, **shape)
    write_text(tmp_path / "text.txt")
    added = _weights_mib(tmp_path / "deep") - _weights_mib(tmp_path / "shallow")
    assert added > 6 * LAYER_MIB
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    shallow, deep = map(float, result.stdout.split())
    assert deep - shallow < 1.5 * LAYER_MIB, f"{added:.0f} MiB of weights more"


def test_a_budget_holds_one_layer_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers are counted: what a step takes beside one differs by more than a layer each time."""
    read_layers: list[weakref.ref[nn.Module]] = []
    reads = {name: getattr(LayeredModel, name) for name in ("layer", "head")}

    def read(name: str, *arguments: Any) -> nn.Module:
        assert not any(layer() for layer in read_layers), f"a layer is kept while {name} is read"
        made: nn.Module = reads[name](*arguments)
        read_layers.append(weakref.ref(made))
        return made

    monkeypatch.setattr(LayeredModel, "layer", lambda *arguments: read("layer", *arguments))
    monkeypatch.setattr(LayeredModel, "head", lambda *arguments: read("head", *arguments))
    make_checkpoint(tmp_path / "model", num_hidden_layers=3)
    write_text(tmp_path / "text.txt")
    options = ConversionOptions(calibration=tmp_path / "text.txt", max_tokens=512, context=64)
    candidates = list_candidates(tmp_path / "model", 2, Budget())
    measure_candidates(tmp_path / "model", options, candidates, KVFormat.FP8)
    assert len(read_layers) == 3 + 1


def _weights_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
