"""Buffers known by their address alone, as torch tensors."""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def pointed_rows(layer_pointer_Y: torch.Tensor, slots: int, row_bytes: int) -> list[torch.Tensor]:
    """``[slots, row_bytes]`` uint8 views of memory on the pointers' own device; none is copied.

    Args:
        layer_pointer_Y: int64 addresses.
        slots: rows of each buffer that may be touched.
        row_bytes: bytes of a row.
    """
    cuda = layer_pointer_Y.is_cuda
    return [
        _view(address, slots * row_bytes, cuda).view(slots, row_bytes)
        for address in layer_pointer_Y.tolist()
    ]


class _CudaMemory:
    """What torch takes a CUDA address from (the CUDA array interface, version 3)."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _view(address: int, size: int, cuda: bool) -> torch.Tensor:
    if cuda:
        return torch.as_tensor(_CudaMemory(address, size), device="cuda")
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)


def page_slots(pages_N: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[N * page_size]`` int64 slots of the pages' tokens."""
    offset = torch.arange(page_size, device=pages_N.device)
    return (pages_N.long()[:, None] * page_size + offset).flatten()
