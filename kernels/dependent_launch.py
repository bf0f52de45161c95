"""Whether kernels may be launched before those that they depend on have ended."""

from __future__ import annotations

import functools

import torch
import triton


@functools.cache
def launches_dependents(device: torch.device) -> bool:
    """Programmatic dependent launch: Hopper and later; Triton's interpreter knows nothing of it.

    There a kernel lets its dependent start early (``gdc_launch_dependents``), and the dependent,
    launched with ``launch_pdl``, waits until all that the kernel wrote can be read (``gdc_wait``).
    A captured graph keeps the two launches bound in the same way.
    """
    if device.type != "cuda" or triton.knobs.runtime.interpret:
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)
