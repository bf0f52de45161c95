"""Packed training batches, written by worker processes ahead of the trainer."""

import multiprocessing
import queue
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from random import Random

import numpy as np
from tokenizers import Tokenizer

from tpla.convert.reference.conversations import draw_conversation
from tpla.convert.reference.tokenizer import encode_chats

CHATS_PER_DRAW = 64


@dataclass(frozen=True, slots=True)
class Batch:
    """Chats packed end to end; no chat sees another.

    tokens    uint16  [T]    input ids
    targets   uint16  [T]    the next token of the same chat
    weights   float16 [T]    loss weight of each target; 0 at the last token of a chat
    positions uint16  [T]    position in the chat
    bounds    int32   [N+1]  start of each chat, padded with T
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    positions: np.ndarray
    bounds: np.ndarray


def pack(chats: list[tuple[np.ndarray, np.ndarray]], size: int, max_chats: int) -> Batch:
    """Pack whole chats into exactly `size` tokens; the last one is cut."""
    tokens = np.zeros(size, np.uint16)
    targets = np.zeros(size, np.uint16)
    weights = np.zeros(size, np.float16)
    positions = np.zeros(size, np.uint16)
    bounds = np.full(max_chats + 1, size, np.int32)
    start = 0
    for index, (ids, weight) in enumerate(chats):
        if index >= max_chats:
            raise ValueError(f"more than {max_chats} chats in a batch of {size} tokens")
        bounds[index] = start
        n = min(len(ids), size - start)
        tokens[start : start + n] = ids[:n]
        targets[start : start + n - 1] = ids[1:n]
        weights[start : start + n - 1] = weight[1:n]
        positions[start : start + n] = np.arange(n)
        start += n
    if start != size:
        raise ValueError(f"{start} tokens cannot fill a batch of {size}: pass more chats")
    return Batch(tokens, targets, weights, positions, bounds)


def batches(
    tokenizer: Tokenizer, seed: int, size: int, max_chats: int, longest: int
) -> Iterator[Batch]:
    """Endless batches of training chats; `longest` cuts chats (tokens)."""
    rng = Random(seed)
    pending: list[tuple[np.ndarray, np.ndarray]] = []
    total = 0
    while True:
        while total < size:
            drawn = [draw_conversation(rng, longest_tokens=longest) for _ in range(CHATS_PER_DRAW)]
            for ids, weights in encode_chats(tokenizer, drawn):
                pending.append((ids[:longest], weights[:longest]))
                total += min(len(ids), longest)
        chosen, length = [], 0
        while length < size:
            chosen.append(pending.pop())
            length += len(chosen[-1][0])
            total -= len(chosen[-1][0])
        yield pack(chosen, size, max_chats)


def _work(
    tokenizer_json: str,
    seed: int,
    shape: tuple[int, int, int],
    output: "multiprocessing.Queue[Batch]",
    stop: Event,
) -> None:
    """Body of a worker process."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    for batch in batches(tokenizer, seed, *shape):
        while not stop.is_set():
            try:
                output.put(batch, timeout=1.0)
                break
            except queue.Full:
                continue
        if stop.is_set():
            output.cancel_join_thread()
            return


class BatchStream:
    """Batches from worker processes; when they fall behind, recent batches come again."""

    def __init__(
        self, tokenizer: Tokenizer, workers: int, size: int, max_chats: int, longest: int, seed: int
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._queue: multiprocessing.Queue[Batch] = context.Queue(maxsize=64)
        self._stop = context.Event()
        self._recent: list[Batch] = []
        self._rng = Random(seed)
        self.fresh = 0
        self.repeated = 0
        self._workers = [
            context.Process(
                target=_work,
                args=(
                    tokenizer.to_str(),
                    seed * 1000 + n,
                    (size, max_chats, longest),
                    self._queue,
                    self._stop,
                ),
                daemon=True,
            )
            for n in range(workers)
        ]
        for worker in self._workers:
            worker.start()

    def next(self, keep: int = 400) -> Batch:
        """A new batch if one is ready, else a random one of the last `keep`."""
        try:
            batch = self._queue.get(block=len(self._recent) < 20)
        except queue.Empty:
            self.repeated += 1
            return self._rng.choice(self._recent)
        self.fresh += 1
        self._recent.append(batch)
        if len(self._recent) > keep:
            self._recent.pop(0)
        return batch

    def close(self) -> None:
        """Stop the workers."""
        self._stop.set()
        for worker in self._workers:
            worker.join(timeout=5)
            if worker.is_alive():
                worker.terminate()
