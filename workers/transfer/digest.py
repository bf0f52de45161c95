"""Digests of what crosses the wire, the same on both sides (xxh3-64).

A chunk's place is its room, its number in the room, and its first page and number of pages there.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash

Place = tuple[int, int, int, int]


def chunk_digest(place: Place, payload: memoryview) -> int:
    """Digest of a chunk in host memory: its place and every byte of latent, scale and RoPE key."""
    digest = xxhash.xxh3_64(struct.pack("<QQQQ", *place))
    digest.update(payload)
    return digest.intdigest()


def staged_digest(place: Place, row_digest: int) -> int:
    """Digest of a chunk in a staging buffer, of which the device made ``row_digest``."""
    return xxhash.xxh3_64_intdigest(struct.pack("<QQQQQ", *place, row_digest))


def room_digest(room: int, chunk_digests: Sequence[int], metadata: bytes | memoryview) -> int:
    """Digest of a whole room: its chunks in order and the metadata of the first token."""
    digest = xxhash.xxh3_64(struct.pack("<Q", room))
    digest.update(struct.pack(f"<{len(chunk_digests)}Q", *chunk_digests))
    digest.update(metadata)
    return digest.intdigest()
