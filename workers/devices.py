"""Which device workers run on, and how many GPUs there are."""

from __future__ import annotations

from tpla.core.errors import ConfigError


def gpu_count() -> int:
    """GPUs that this process may use; ``CUDA_VISIBLE_DEVICES`` narrows them."""
    import torch

    return torch.cuda.device_count()


def resolve_device(asked: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` takes GPUs where there are any.

    Raises:
        ConfigError: an unknown device, or GPUs asked for where none is visible.
    """
    if asked not in {"auto", "cpu", "cuda"}:
        raise ConfigError(f"--device {asked} is not known; use auto, cpu or cuda")
    if asked == "cpu":
        return asked
    if gpu_count():
        return "cuda"
    if asked == "cuda":
        raise ConfigError(
            "--device cuda, but no GPU is visible; check nvidia-smi and CUDA_VISIBLE_DEVICES, "
            "or use --device cpu"
        )
    return "cpu"
