"""What measured figures belong to: commit, GPU, driver and versions."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from typing import Any

import torch

_PACKAGES = ("triton", "sglang", "sglang-kernel", "flashinfer-python")


def describe_machine(command: str, commit: str | None = None) -> dict[str, Any]:
    """Header of a report; ``commit`` where git cannot tell."""
    return {
        "command": command,
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "gpus": torch.cuda.device_count(),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name.replace("-", "_"): _version(name) for name in _PACKAGES},
    }


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.partition("\n")[0] or "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"
