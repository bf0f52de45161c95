"""Digests of what crosses the wire, the same on both sides (xxh3-64)."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import xxhash


def chunk_digest(room: int, sequence: int, page_start: int, pages: int, payload: memoryview) -> int:
    """Digest of a chunk: its place and every byte of latent, scale and RoPE key."""
    digest = xxhash.xxh3_64(struct.pack("<QQQQ", room, sequence, page_start, pages))
    digest.update(payload)
    return digest.intdigest()


def room_digest(room: int, chunk_digests: Sequence[int], metadata: bytes | memoryview) -> int:
    """Digest of a whole room: its chunks in order and the metadata of the first token."""
    digest = xxhash.xxh3_64(struct.pack("<Q", room))
    digest.update(struct.pack(f"<{len(chunk_digests)}Q", *chunk_digests))
    digest.update(metadata)
    return digest.intdigest()
