"""Entry point ``sglang.srt.platforms``: runs inside the first ``import sglang`` of every process.

General plug-ins come too late on a host without a GPU: ``run_scheduler_process`` lives in a module
whose import already needs ``sgl_kernel``, and the wheel of that name loads libcuda.
"""

from __future__ import annotations

from tpla.core.config import worker_config_from_environment


def activate() -> None:
    """Install the CPU stand-in for ``sgl_kernel`` in CPU workers; claim no platform."""
    config = worker_config_from_environment()
    if config is not None and config.device == "cpu":
        from tpla.workers.sglang_plugin import sgl_kernel_cpu

        sgl_kernel_cpu.install()
