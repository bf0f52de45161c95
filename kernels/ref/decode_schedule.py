"""Torch reference of :mod:`tpla.kernels.decode_schedule`, one cut at a time.

Shape suffixes: B requests, P parts.
"""

from __future__ import annotations

import torch

from tpla.kernels.decode_schedule import OVERHEAD, SNAP, SPLIT


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
    splits = _splits(cuts, len(tiles))
    requests = -(-len(tiles) // parts)
    longer = requests * (max(tiles) + OVERHEAD) - share
    if longer * parts <= SPLIT * sum(last - first for first, last in splits):
        cuts = [(min(part * requests, len(tiles)), 0) for part in range(parts + 1)]
        splits = _splits(cuts, len(tiles))
    part_P2.copy_(torch.tensor(cuts, dtype=torch.int32))
    split_B2.copy_(torch.tensor(splits, dtype=torch.int32))


def _splits(cuts: list[tuple[int, int]], batch: int) -> list[tuple[int, int]]:
    """First and last part of each request."""
    found = []
    for request in range(batch):
        first = max(part for part in range(len(cuts) - 1) if cuts[part] <= (request, 0))
        last = max(part for part in range(len(cuts) - 1) if cuts[part] < (request + 1, 0))
        found.append((first, last))
    return found


def _cut(position: int, tiles: list[int]) -> tuple[int, int]:
    for request, count in enumerate(tiles):
        if position < count + OVERHEAD:
            tile = max(position - OVERHEAD, 0)
            if tile <= SNAP:
                return request, 0
            return (request + 1, 0) if count - tile <= SNAP else (request, tile)
        position -= count + OVERHEAD
    return len(tiles), 0
