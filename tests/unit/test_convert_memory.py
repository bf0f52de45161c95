"""Peak memory of a conversion and of a budget is that of one layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.unit.checkpoints import make_checkpoint, write_text

LAYER_MIB = 12
WIDE = 16384
PEAK = """
import re, sys
from pathlib import Path
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint

def peak_mib():
    # Not ru_maxrss: that starts at the parent's peak.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

"""
SCRIPT = f"""{PEAK}
folder = Path(sys.argv[1])
options = ConversionOptions(calibration=folder / "text.txt", max_tokens=512, context=256)
for name in ("shallow", "deep"):
    convert_checkpoint(folder / name, folder / f"out-{{name}}", options)
    print(peak_mib())
"""
BUDGET_SCRIPT = f"""{PEAK}
from tpla.convert.planning import Budget, list_candidates, measure_candidates
from tpla.core.latent_layout import KVFormat

folder = Path(sys.argv[1])
options = ConversionOptions(calibration=folder / "text.txt", max_tokens=512, context=64)
for name in ("narrow", "wide"):
    candidates = list_candidates(folder / name, 2, Budget())
    measure_candidates(folder / name, options, candidates, KVFormat.FP8)
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


def test_a_budget_holds_one_layer_at_a_time(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "first_k_dense_replace": 99, "num_hidden_layers": 3}
    make_checkpoint(tmp_path / "narrow", intermediate_size=192, **shape)
    make_checkpoint(tmp_path / "wide", intermediate_size=WIDE, **shape)
    write_text(tmp_path / "text.txt")
    layer = 3 * 512 * WIDE * 4 / 2**20
    result = subprocess.run(
        [sys.executable, "-c", BUDGET_SCRIPT, str(tmp_path)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    narrow, wide = map(float, result.stdout.split())
    # One matrix more: a tensor is in memory twice while it is copied into its layer.
    assert layer < wide - narrow < 1.6 * layer, f"a layer is {layer:.0f} MiB"


def _weights_mib(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
