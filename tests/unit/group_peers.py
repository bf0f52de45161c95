"""A rank with a real pool and a process group, in this process or in one of its own.

The pools lie in host memory and the group is gloo's, or on two GPUs and NCCL's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.unit.transfer_pair import METADATA, Events, eventually
from tpla.core.config import FaultPlan, TransferTimeouts
from tpla.core.latent_layout import CacheLayout, KVFormat, ModelPlan
from tpla.workers.transfer import group_plane
from tpla.workers.transfer.faults import FaultySendingPlane
from tpla.workers.transfer.group_plane import GroupReceivingPlane, GroupSendingPlane
from tpla.workers.transfer.pool_access import decode_pages, prefill_pages
from tpla.workers.transfer.protocol import Identity, Reservation, Rows, SendingPlane
from tpla.workers.transfer.receiver import DecodeReceiver
from tpla.workers.transfer.sender import PrefillSender
from tpla.workers.transfer.zmq_link import ZmqClientLink, ZmqServerLink

PATIENCE = TransferTimeouts(handshake=20, reserve=20, push=2, ack=2)


@dataclass(frozen=True)
class Cache:
    """Both ranks' pools; the defaults need many chunks of :attr:`chunk_bytes`."""

    page_size: int = 4
    pages: int = 40
    kv_lora_rank: int = 64
    qk_rope_head_dim: int = 16
    groups: int = 2
    group: int = 0
    core_dims: tuple[int, ...] = (0, 0, 0)
    kv_format: KVFormat = KVFormat.FP8
    row_align: int = 4
    backend: str = "gloo"
    chunk_bytes: int = 1 << 12
    patience: TransferTimeouts = PATIENCE

    @property
    def layout(self) -> CacheLayout:
        """The decode rank's."""
        plan = ModelPlan(self.kv_lora_rank, self.groups, self.core_dims)
        return CacheLayout(plan, self.group, self.qk_rope_head_dim, self.kv_format, self.row_align)

    @property
    def layers(self) -> int:
        """Of the model."""
        return len(self.core_dims)

    def identity(self, name: str) -> Identity:
        """Of either rank."""
        return Identity(name, "f" * 64, len(METADATA), self.kv_lora_rank, self.qk_rope_head_dim)

    def prefill_pool(self) -> Any:
        """Random pages of the whole latent."""
        width = self.kv_lora_rank + self.qk_rope_head_dim
        device = "cuda:0" if self.backend == "nccl" else "cpu"
        generator = torch.Generator(device).manual_seed(0)
        shape = (self.pages * self.page_size, 1, width)
        buffers = [
            torch.randn(shape, generator=generator, device=device).bfloat16()
            for _ in range(self.layers)
        ]
        return self._pool(buffers, kv_lora_rank=self.kv_lora_rank)

    def decode_pool(self) -> Any:
        """Empty pages of the rank's rows."""
        slots = self.pages * self.page_size
        device = "cuda:1" if self.backend == "nccl" else "cpu"
        buffers = [
            torch.zeros((slots, 1, each.row_bytes), dtype=torch.uint8, device=device)
            for each in self.layout.layers
        ]
        return self._pool(buffers, layout=self.layout)

    def _pool(self, buffers: list[torch.Tensor], **more: Any) -> Any:
        return SimpleNamespace(
            kv_buffer=buffers, layer_num=self.layers, page_size=self.page_size, **more
        )


class Prefill:
    """A prefill rank."""

    def __init__(self, cache: Cache, fault: FaultPlan | None = None) -> None:
        self.cache = cache
        self.source = prefill_pages(cache.prefill_pool())
        self.events = Events()
        link = ZmqServerLink("127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{link.port}"
        plane: SendingPlane = GroupSendingPlane(self.source, cache.backend, cache.patience)
        if fault is not None:
            plane = FaultySendingPlane(plane, fault)
        self.sender = PrefillSender(link, plane, cache.identity("p"), cache.patience, self.events)

    def rows(self, pages: list[int], layout: CacheLayout) -> Rows:
        """What a decode rank must hold of ``pages``."""
        return self.source.read(np.array(pages, np.int32), layout)

    def open(self, room: int) -> None:
        """Wait until decode has reserved."""
        self.sender.open(room)
        assert eventually(lambda: room in self.events.ready, 60)

    def push(self, room: int, pages: list[int]) -> None:
        """Send all pages of the room."""
        self.sender.push(room, 0, np.array(pages, np.int32), METADATA)

    def close(self) -> None:
        """Stop the rank."""
        self.sender.close()


class Decode:
    """A decode rank."""

    def __init__(self, cache: Cache) -> None:
        self.pool = cache.decode_pool()
        self.events = Events()
        self.lost: list[str] = []
        plane = GroupReceivingPlane(decode_pages(self.pool), cache.backend, cache.patience)
        self.receiver = DecodeReceiver(
            ZmqClientLink("d"), plane, cache.identity("d"), cache.patience, self.events,
            self.lost.append,
        )  # fmt: skip

    def reserve(self, room: int, endpoint: str, pages: list[int], ranks: int = 1) -> None:
        """Ask ``endpoint`` for the room's rows."""
        self.receiver.expect(room, [endpoint])
        self.receiver.greet(endpoint)
        wanted = np.array(pages, np.int32)
        self.receiver.reserve(room, Reservation(wanted, endpoint, (), ranks, 0))

    def holds(self, pages: list[int], rows: Rows) -> bool:
        """Whether ``pages`` hold these rows, layer by layer, bit for bit."""
        tokens = len(pages) * self.pool.page_size
        for run, part in self.pool.layout.parts(tokens):
            expected_YTB = rows[part].reshape(run.shape(tokens))
            for layer, expected_TB in zip(run.layers, expected_YTB, strict=True):
                buffer = self.pool.kv_buffer[layer]
                by_page = buffer.view(-1, self.pool.page_size, run.layout.row_bytes)
                stored_TB = by_page[pages].cpu().numpy().reshape(expected_TB.shape)
                if not np.array_equal(stored_TB, expected_TB):
                    return False
        return True

    def written(self) -> list[int]:
        """Pages that hold anything."""
        buffer = self.pool.kv_buffer[0]
        touched = buffer.view(-1, self.pool.page_size * buffer.shape[-1])
        return touched.any(-1).nonzero().flatten().tolist()

    def close(self) -> None:
        """Stop the rank."""
        self.receiver.close()


def prefill_process(
    pipe: Connection, cache: Cache, room: int, pages: list[int], fault: FaultPlan | None
) -> None:
    """Serve one room, until told to end."""
    group_plane.CHUNK_BYTES = cache.chunk_bytes
    prefill = Prefill(cache, fault)
    pipe.send((prefill.endpoint, prefill.rows(pages, cache.layout)))
    prefill.open(room)
    prefill.push(room, pages)
    pipe.recv()
    prefill.close()


def decode_process(pipe: Connection, cache: Cache, room: int, pages: list[int]) -> None:
    """Reserve one room; compare it with what it must become.

    Is told the endpoint, then to ``go`` on or to ``stop``, then the rows; says ``ready`` first, so
    that the time-outs of the test do not begin before, and whether the rows are there last.
    """
    group_plane.CHUNK_BYTES = cache.chunk_bytes
    decode = Decode(cache)
    pipe.send("ready")
    decode.reserve(room, pipe.recv(), pages)
    if pipe.recv() == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    eventually(lambda: room in decode.events.done or room in decode.events.failed, 60)
    pipe.send(room in decode.events.done and decode.holds(pages, pipe.recv()))
    pipe.recv()
    decode.close()


class Process:
    """A rank in a process of its own."""

    def __init__(self, target: Any, *arguments: Any) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("spawn")
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()

    def stands_still(self) -> bool:
        """Whether it has stopped itself."""
        with open(f"/proc/{self.process.pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "T"

    def close(self) -> None:
        """Kill it, whatever it does."""
        self.process.kill()
        self.process.join(10)


def seconds_until(condition: Callable[[], bool], limit: float) -> float:
    """How long it took, infinite when it did not happen."""
    begun = time.monotonic()
    return time.monotonic() - begun if eventually(condition, limit) else float("inf")
