"""Which worker has probably cached which prompt prefix.

An approximate prefix tree: a prompt is cut into chunks of characters, and the node of a chunk is
the hash of all chunks up to it, so that a tree of any depth is one flat table with bounded memory.
The least recently used nodes go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping

CHUNK_CHARS = 128
MAX_CHUNKS = 1024
"""Chunks considered of one prompt: 128 KiB of characters decide the choice well enough."""


class PrefixTree:
    """Prefixes sent to each worker, as far back as ``max_entries`` nodes reach."""

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._workers_of: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers_of)

    def matches(self, text: str) -> Mapping[str, float]:
        """For each worker that knows a prefix of ``text``: the share of ``text`` it knows."""
        nodes = list(_nodes(text))
        matched: dict[str, int] = {}
        alive: set[str] | None = None
        for depth, node in enumerate(nodes, start=1):
            known = self._workers_of.get(node)
            alive = set(known or ()) if alive is None else alive & (known or set())
            if not alive:
                break
            for worker in alive:
                matched[worker] = depth
        return {worker: depth / len(nodes) for worker, depth in matched.items()}

    def insert(self, text: str, worker: str) -> None:
        """Note that ``worker`` is being sent ``text``."""
        for node in _nodes(text):
            self._workers_of.setdefault(node, set()).add(worker)
            self._workers_of.move_to_end(node)
        while len(self._workers_of) > self._max_entries:
            self._workers_of.popitem(last=False)

    def forget(self, worker: str) -> None:
        """Drop a worker that is gone, or whose cache is."""
        for node in list(self._workers_of):
            workers = self._workers_of[node]
            workers.discard(worker)
            if not workers:
                del self._workers_of[node]


def _nodes(text: str) -> Iterator[int]:
    """One node for each chunk; the last chunk may be short."""
    node = 0
    for start in range(0, min(len(text), CHUNK_CHARS * MAX_CHUNKS), CHUNK_CHARS):
        node = hash((node, text[start : start + CHUNK_CHARS]))
        yield node
