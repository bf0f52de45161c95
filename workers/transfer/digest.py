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


def place_digest(place: Place) -> int:
    """Digest of a chunk's place alone, with which that of its rows begins on a device."""
    return chunk_digest(place, memoryview(b""))


def room_digest(room: int, chunk_digests: Sequence[int], metadata: bytes | memoryview) -> int:
    """Digest of a whole room: its chunks in order and the metadata of the first token."""
    digest = xxhash.xxh3_64(struct.pack("<Q", room))
    digest.update(struct.pack(f"<{len(chunk_digests)}Q", *chunk_digests))
    digest.update(metadata)
    return digest.intdigest()
