"""Who reads which tokens: decode work divided among parts on the device.

The tokens of a batch are cut into tiles of ``block_tokens``. All tiles lie on one line, request
after request, each request preceded by ``OVERHEAD`` tiles for its prologue and epilogue. The line
is cut into ``parts`` pieces of equal length; a cut near either end of a request moves to that end,
since a short split costs more in partial results than it saves. Where lengths are so alike that
parts of whole requests are hardly longer, they are cut nowhere: combining a batch of short requests
takes as long as a fifth of their attention. Nothing here depends on the host knowing a length, so
one CUDA graph serves every batch of its size.

Cuts are the scheduling of FlashMLA (``get_decoding_sched_meta.cu``) in closed form.

Shape suffixes: B requests, P parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

OVERHEAD = 5
"""Tiles that beginning and ending a request cost."""

SNAP = 2
"""A cut this many tiles from an end of a request moves to that end."""

SPLIT = 8
"""Tiles by which parts of whole requests may be longer, for one split that each part saves."""

_BLOCK_PARTS = 16


@triton.jit
def _schedule_kernel(
    length_ptr,
    part_ptr,
    split_ptr,
    batch,
    parts,
    min_tiles,
    BLOCK_TOKENS: tl.constexpr,
    OVERHEAD: tl.constexpr,
    SNAP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    b = tl.arange(0, BLOCK_B)
    length = tl.load(length_ptr + b, mask=b < batch, other=0).to(tl.int32)
    tiles = (tl.maximum(length, 0) + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    cost = tl.where(b < batch, tiles + OVERHEAD, 0)
    end = tl.cumsum(cost, 0)
    start = end - cost
    total = tl.sum(cost, 0)
    share = tl.maximum((total + parts - 1) // parts, min_tiles)

    # The last position on the line whose cut still leaves tile 0 (the last tile) to its right.
    head = start + OVERHEAD + tl.minimum(tiles - 1, SNAP)
    tail = tl.maximum(head, start + OVERHEAD + tiles - 1 - SNAP)
    first = head // share
    last = tail // share
    splits = tl.sum(tl.where(b < batch, last - first, 0), 0)
    requests = (batch + parts - 1) // parts
    whole = (requests * tl.max(cost, 0) - share) * parts <= SPLIT * splits
    if tl.program_id(0) == 0:
        tl.store(split_ptr + 2 * b, tl.where(whole, b // requests, first), mask=b < batch)
        tl.store(split_ptr + 2 * b + 1, tl.where(whole, b // requests, last), mask=b < batch)

    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    cut = p * share
    before = (end[None, :] <= cut[:, None]) & (b < batch)[None, :]
    request = tl.sum(before.to(tl.int32), 1)
    own = b[None, :] == request[:, None]
    own_start = tl.sum(tl.where(own, start[None, :], 0), 1)
    own_tiles = tl.sum(tl.where(own, tiles[None, :], 0), 1)
    tile = tl.minimum(tl.maximum(cut - own_start - OVERHEAD, 0), own_tiles)
    inside = request < batch
    to_head = (tile <= SNAP) | (request >= batch)
    to_tail = (tile > SNAP) & (own_tiles - tile <= SNAP) & inside
    request = tl.where(to_tail, request + 1, request)
    request = tl.where(whole, tl.minimum(p * requests, batch), request)
    tile = tl.where(to_head | to_tail | whole, 0, tile)
    tl.store(part_ptr + 2 * p, request, mask=p <= parts)
    tl.store(part_ptr + 2 * p + 1, tile, mask=p <= parts)


def decode_schedule(
    length_B: torch.Tensor,
    part_P2: torch.Tensor,
    split_B2: torch.Tensor,
    block_tokens: int,
    min_tiles: int = 1,
) -> None:
    """Divide a batch among parts; once a step, for all layers.

    Args:
        length_B: cached tokens of each request, int32.
        part_P2: written, ``[parts + 1, 2]`` int32: part ``p`` works from (request, tile)
            ``part_P2[p]`` up to ``part_P2[p + 1]``, exclusive.
        split_B2: written, ``[B, 2]`` int32: first and last part that work on the request.
        block_tokens: tokens of a tile.
        min_tiles: least share of a part, overhead included.

    Raises:
        ValueError: a tensor has the wrong shape or dtype, or is not contiguous.
    """
    batch, parts = length_B.shape[0], part_P2.shape[0] - 1
    for name, tensor, shape in (
        ("length", length_B, (batch,)),
        ("part", part_P2, (parts + 1, 2)),
        ("split", split_B2, (batch, 2)),
    ):
        if tensor.dtype != torch.int32 or tensor.shape != shape or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous int32 {shape}, not {tensor.dtype} {tuple(tensor.shape)}"
            )
    _schedule_kernel[(triton.cdiv(parts + 1, _BLOCK_PARTS),)](
        length_B,
        part_P2,
        split_B2,
        batch,
        parts,
        min_tiles,
        BLOCK_TOKENS=block_tokens,
        OVERHEAD=OVERHEAD,
        SNAP=SNAP,
        SPLIT=SPLIT,
        BLOCK_B=triton.next_power_of_2(max(batch, 2)),
        BLOCK_P=_BLOCK_PARTS,
    )
