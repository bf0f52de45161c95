"""A launch whose arguments stay, so that repeating it takes the host little.

For every launch Triton looks at each argument, to find the binary that was compiled for such ones.
That takes the host several times as long as the launch itself, and longer than a chunk of KV rows
takes to be moved. The binary for the same arguments is the same, so it is looked up once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton


class PreparedLaunch:
    """Launches a kernel on the current stream of the device that all its tensors are on.

    Args:
        kernel: a function under ``triton.jit``.
        grid: one to three numbers of programs.
        arguments: those that come first in the kernel's signature; tensors are kept alive.
        num_warps: of a program.
        constants: the other arguments, by name.
    """

    def __init__(
        self,
        kernel: triton.JITFunction[Any],
        grid: tuple[int, ...],
        *arguments: Any,
        num_warps: int,
        **constants: Any,
    ) -> None:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | constants
        self._kernel = kernel
        self._grid = (*grid, 1, 1)[:3]
        self._arguments = tuple(named[name] for name in kernel.arg_names)
        # A launcher asks the driver about each tensor that it gets, and about no address.
        self._addressed = tuple(
            each.data_ptr() if isinstance(each, torch.Tensor) else each for each in self._arguments
        )
        self._num_warps = num_warps
        self._binary: Callable[..., None] | None = None

    def compile(self) -> None:
        """Do now what the first call would wait for, on the device that is current."""
        if self._binary is None:
            compiled = self._kernel.warmup(
                *self._arguments, grid=self._grid, num_warps=self._num_warps
            )
            if compiled is not None:  # the interpreter compiles nothing
                self._binary = compiled[self._grid]

    def __call__(self) -> None:
        """Begin it; nothing is synchronised."""
        self.compile()
        if self._binary is not None:
            self._binary(*self._addressed)
        else:
            self._kernel[self._grid](*self._arguments, num_warps=self._num_warps)
