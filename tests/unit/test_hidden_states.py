"""Hidden states beyond a limit lie in a file, and nobody sees a difference."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.unit.checkpoints import make_checkpoint, write_text
from tpla.convert import calibrate
from tpla.convert.hidden_states import Chosen, HiddenStates
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint
from tpla.convert.planning import Budget, survey
from tpla.convert.rotation import Method

CPU = torch.device("cpu")
HIDDEN = 1024
STATES_MIB = 48
SCRIPT = """
import re, sys
from pathlib import Path
from tpla.convert.pipeline import ConversionOptions, convert_checkpoint

def peak_mib():
    # Not ru_maxrss: that starts at the parent's peak.
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

folder, memory = Path(sys.argv[1]), int(sys.argv[2])
for tokens in (512, int(sys.argv[3])):
    options = ConversionOptions(
        calibration=folder / "text.txt", max_tokens=tokens, context=256, state_memory=memory
    )
    convert_checkpoint(folder / "source", folder / f"out-{memory}-{tokens}", options)
    print(peak_mib())
"""


def _states(memory_bytes: int, dtype: torch.dtype = torch.float32) -> HiddenStates:
    generator = torch.Generator().manual_seed(1)
    lengths = [5, 1, 7]
    first = [torch.randn(length, 6, generator=generator).to(dtype) for length in lengths]
    return HiddenStates(iter(first), lengths, 6, dtype, CPU, memory_bytes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_file_gives_back_what_memory_would(dtype: torch.dtype) -> None:
    kept, spilled = _states(10**6, dtype), _states(0, dtype)
    assert (kept.spilled, spilled.spilled) == (False, True)
    for states in (kept, spilled):
        other = states.copy()
        other[1] = torch.full((1, 6), 3.0, dtype=dtype)
        assert (other[1] == 3).all() and not (states[1] == 3).any()
        assert [state.shape[0] for state in states] == [5, 1, 7]
    for index, state in enumerate(spilled):
        assert state.dtype == dtype and torch.equal(state, kept[index])
    assert torch.equal(Chosen(spilled, [2, 0])[0], kept[2])
    assert [len(state) for state in spilled[1:]] == [1, 7]


def test_the_limit_is_what_all_sequences_take() -> None:
    assert not _states(13 * 6 * 4).spilled
    assert _states(13 * 6 * 4 - 1).spilled


@pytest.mark.parametrize("method", [Method.PCA, Method.LEARNED])
def test_a_conversion_is_the_same_from_a_file(
    tmp_path: Path, method: Method, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "NEGLIGIBLE_ERROR", -1.0)
    source = make_checkpoint(tmp_path / "source")
    text = write_text(tmp_path / "text.txt", 900)
    kept = ConversionOptions(calibration=text, context=128, method=method, learning_steps=3)
    spilled = replace(kept, state_memory=0)
    manifests = [
        convert_checkpoint(source, tmp_path / f"out{number}", options)
        for number, options in enumerate((kept, spilled))
    ]
    assert manifests[0] == manifests[1]


def test_plans_measure_the_same_from_a_file(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source")
    kept = ConversionOptions(calibration=write_text(tmp_path / "text.txt", 900), context=128)
    found = [
        survey(source, options, Budget(), measured=True)
        for options in (kept, replace(kept, state_memory=0))
    ]
    assert found[0] == found[1]


def test_memory_does_not_grow_with_the_text(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", hidden_size=HIDDEN, num_hidden_layers=1)
    tokens = STATES_MIB * 2**20 // (4 * HIDDEN)
    write_text(tmp_path / "text.txt", tokens)
    grown = {}
    for memory in (2**20, 2**40):
        arguments = [str(tmp_path), str(memory), str(tokens)]
        result = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        short, long = map(float, result.stdout.split())
        grown[memory] = long - short
    assert grown[2**40] > 0.7 * STATES_MIB, "the measurement does not see hidden states"
    assert grown[2**20] < 0.5 * STATES_MIB, grown
