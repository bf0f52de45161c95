"""Every Triton kernel under the interpreter, in a process that imports Triton for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = [
    "test_latent_decode.py",
    "test_helpers.py",
    "test_row_digest.py",
    "test_decode_backend.py",
    "test_cuda_staging.py",
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the same tests run on the GPU itself")
@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", HERE / name]
    result = subprocess.run(
        command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-2000:]
    assert "skipped" not in result.stdout.splitlines()[-1]
