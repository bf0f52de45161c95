"""Torch reference of :mod:`tpla.kernels.decode_schedule`, one cut at a time.

Shape suffixes: B requests, P parts.
"""

from __future__ import annotations

import torch

from tpla.kernels.decode_schedule import OVERHEAD, SNAP


def decode_schedule(
    length_B: torch.Tensor,
    part_P2: torch.Tensor,
    split_B2: torch.Tensor,
    block_tokens: int,
    min_tiles: int = 1,
) -> None:
    """Same arguments and results as the kernel's wrapper."""
    parts = part_P2.shape[0] - 1
    tiles = [-(-max(length, 0) // block_tokens) for length in length_B.tolist()]
    share = max(-(-sum(count + OVERHEAD for count in tiles) // parts), min_tiles)
    cuts = [_cut(part * share, tiles) for part in range(parts + 1)]
    part_P2.copy_(torch.tensor(cuts, dtype=torch.int32))
    for request in range(len(tiles)):
        begin, end = (request, 0), (request + 1, 0)
        first = max(part for part in range(parts) if tuple(cuts[part]) <= begin)
        last = max(part for part in range(parts) if tuple(cuts[part]) < end)
        split_B2[request] = torch.tensor([first, last], dtype=torch.int32)


def _cut(position: int, tiles: list[int]) -> tuple[int, int]:
    for request, count in enumerate(tiles):
        if position < count + OVERHEAD:
            tile = max(position - OVERHEAD, 0)
            if tile <= SNAP:
                return request, 0
            return (request + 1, 0) if count - tile <= SNAP else (request, tile)
        position -= count + OVERHEAD
    return len(tiles), 0
